"""Contestants in processes of their own that share what was imported once: forked before anything computes, for
OpenMP's threads do not survive it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

Row = dict[str, Any]


class Forked:
    """A contestant in a process of its own, which answers commands as `worker(name)` does; `ask` sends one and waits.
    A process keeps nothing of those in `beside`, so that each ends when this process does."""

    def __init__(
        self, name: str, threads: int, worker: Callable[[str], Callable[[Row], Row]], beside: Sequence[Forked] = ()
    ) -> None:
        self.name = name
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        ours = [self.pipe, *(other.pipe for other in beside)]
        self._process = context.Process(target=_serve, args=(name, threads, worker, theirs, ours), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, do: str, **order: Any) -> Row:
        try:
            self.pipe.send({"do": do, **order})
            return self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise SystemExit(f"{self.name} failed at {do!r}, exit code {self._process.exitcode}; see above") from None

    def close(self) -> None:
        self.pipe.close()
        self._process.join()


def forked(
    names: Sequence[str], threads: int, worker: Callable[[str], Callable[[Row], Row]]
) -> dict[str, Forked]:
    """A process for each name."""
    found: dict[str, Forked] = {}
    for name in names:
        found[name] = Forked(name, threads, worker, tuple(found.values()))
    return found


def _serve(
    name: str, threads: int, worker: Callable[[str], Callable[[Row], Row]], pipe: Connection, others: list[Connection]
) -> None:
    import torch

    for other in others:
        other.close()
    os.dup2(2, 1)  # what libraries print is no part of the result
    os.environ["OMP_NUM_THREADS"], os.environ["TQDM_DISABLE"] = str(threads), "1"
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    answer = worker(name)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(order))
