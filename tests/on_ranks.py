"""Run a function on several ranks, processes that exchange over gloo, and collect what each gives.

They are forked from a process that has imported all and traced the models that they run: each by itself took most of
its time for that. It has one thread, else none may fork from it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forked import code_server

LIMIT_S = 600.0


class Nursery:
    """Starts ranks until it is closed."""

    def __init__(self) -> None:
        self._asked, theirs = multiprocessing.Pipe()
        self._process = code_server().Process(target=_nursery, args=(theirs, dict(os.environ)))
        self._process.start()
        theirs.close()

    def close(self) -> None:
        self._asked.close()
        self._process.join(20)
        self._process.kill()

    def on_ranks(self, ranks: int, run: Callable[..., Any], *given: Any,
                 traced: Sequence[tuple[str, Any]] = ()) -> list[Any]:
        """What `run(*given)`, a function of a module, gives on each rank. The models of `traced`, folders and meshes,
        are traced for all ranks at once, and what becomes of their symbolic sizes on a rank is found out by dividing
        them for one. AssertionError with the first traceback."""
        self._asked.send((ranks, run, given, traced))
        assert self._asked.poll(LIMIT_S + 60), "ranks give no answer"
        found, failed = self._asked.recv()
        assert not failed, failed
        return found  # type: ignore[no-any-return]


def _nursery(asked: Connection, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import pytest
    import torch
    from captured_once import share_graphs

    from forebay.open_model import open_model
    from forebay.read_mesh import read_mesh
    from forebay.rewriter.pipeline.shard_captured import shard_captured
    from forebay.rewriter.switches import read_switches

    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    while True:
        try:
            ranks, run, given, traced = asked.recv()
        except EOFError:
            return
        try:
            share_graphs(patch)
            for folder, mesh in {repr(each): each for each in traced}.values():
                shard_captured(open_model(folder)[0], read_mesh(mesh), read_switches())
            if not traced:
                patch.undo()
            threads = len(list(Path("/proc/self/task").iterdir()))
            assert threads == 1, f"{threads} threads: a process that is forked now may wait for a lock forever"
            gc.collect()
            gc.freeze()  # ranks look through what they make, not through pages that all of them share
            asked.send((_on_ranks(ranks, run, given), ""))
        except BaseException:
            asked.send((None, traceback.format_exc()))


def _on_ranks(ranks: int, run: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [context.Process(target=_rank, args=(rank, ranks, port, pipes[rank][1], run, given), daemon=True)
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    found: list[Any] = [None] * ranks
    try:
        waiting = {own: rank for rank, (own, _) in enumerate(pipes)}
        while waiting:
            ready = wait([*waiting, *(processes[rank].sentinel for rank in waiting.values())], LIMIT_S)
            assert ready, f"ranks {sorted(waiting.values())} give no answer"
            for own, rank in list(waiting.items()):
                if own in ready:
                    del waiting[own]
                    found[rank], failed = own.recv()
                    assert not failed, f"rank {rank}:\n{failed}"
                else:
                    ended = processes[rank].exitcode
                    assert ended is None or own.poll(), f"rank {rank} gave no answer and ended with {ended}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _rank(rank: int, ranks: int, port: int, answer: Connection, run: Callable[..., Any], given: Sequence[Any]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    try:
        answer.send((run(*given), ""))
    except BaseException:
        answer.send((None, traceback.format_exc()))
    time.sleep(LIMIT_S)  # others may still read what this one sent, or look something up in its store
