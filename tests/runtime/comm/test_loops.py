"""Threads of gloo that look at sockets yield to those that exchange, in every group that ranks make."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from on_ranks import Nursery

from forebay.runtime.comm.loops import LOOP, NICE


def policies() -> list[tuple[int, int]]:
    """Of each such thread of this rank its policy and its niceness, once it has exchanged in two groups."""
    import torch
    import torch.distributed as dist

    from forebay.runtime.comm.ranks import group_of, join_ranks, make_groups

    rank, _ = join_ranks("cpu")
    pairs = [(0, 1), (1, 2)]
    make_groups(pairs)
    for pair in pairs:
        if rank in pair:
            dist.all_reduce(torch.ones(8), group=group_of(pair))
    loops = [int(t.name) for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text().strip() == LOOP]
    return [(os.sched_getscheduler(t), os.getpriority(os.PRIO_PROCESS, t)) for t in loops]


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling of Linux")
def test_threads_that_look_at_sockets_yield() -> None:
    nursery = Nursery()
    try:
        for found in nursery.on_ranks(3, policies):
            assert found and set(found) == {(os.SCHED_BATCH, NICE)}
    finally:
        nursery.close()
