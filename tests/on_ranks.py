"""Run a function on several ranks, processes that exchange over gloo, and collect what each gives."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.queues import Queue
from typing import Any

import torch.multiprocessing as mp

LIMIT_S = 600.0


def on_ranks(ranks: int, run: Callable[..., Any], *given: Any) -> list[Any]:
    """What `run(*given)`, a function of a module, gives on each rank. AssertionError with the first traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    answers: Queue = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, ranks, port, answers, run, given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found: list[Any] = [None] * ranks
    try:
        for _ in processes:
            rank, value, failed = answers.get(timeout=LIMIT_S)
            assert not failed, f"rank {rank}:\n{failed}"
            found[rank] = value
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    return found


def _rank(rank: int, ranks: int, port: int, answers: Queue, run: Callable[..., Any], given: Sequence[Any]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    import torch

    torch.set_num_threads(1)
    try:
        answers.put((rank, run(*given), ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    finally:
        answers.close()
        answers.join_thread()
        os._exit(0)  # whoever waits for others that failed is not waited for
