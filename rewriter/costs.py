"""Seconds that one item of a Program takes alone, from the measured machine."""

from __future__ import annotations

import math

from .machine import Machine
from .program import Copy, FileRows, FileSlice, Item, Launch, dtype_itemsize


def item_time_s(item: Item, machine: Machine) -> float:
    """Time of `item` with nothing beside it: latency + bytes / bandwidth for copies; for matrix products the measured
    time of the chosen implementation; for other launches dispatch + bytes touched / memory bandwidth."""
    if isinstance(item, Copy):
        return copy_time_s(item, machine)
    if isinstance(item, Launch):
        return launch_time_s(item, machine)
    return 0.0


def copy_time_s(item: Copy, machine: Machine) -> float:
    """Seconds for one copy on its link. Rows are read page by page, a chunk of them in flight together."""
    src = item.src
    tier = "disk" if isinstance(src, FileSlice | FileRows) else src.arena
    link = machine.link(tier, item.dst.arena)
    if isinstance(src, FileRows):
        rows = math.prod(src.index.shape)
        return link.latency_s + rows * max(src.row_nbytes, 4096) / link.bandwidth
    return link.latency_s + item.dst.nbytes / link.bandwidth


def launch_time_s(item: Launch, machine: Machine) -> float:
    """Seconds for one launch, dispatch included."""
    if item.op == "forebay.linear":
        x, weight, _ = item.args
        k = x.shape[-1]
        n = weight.shape[0] if item.kwargs["form"] == "nk" else weight.shape[1]
        m = math.prod(x.shape[:-1])
        impl = item.impl or machine.best_gemm(weight.dtype, m, n, k)
        return machine.dispatch_s + machine.gemm_time_s(impl, weight.dtype, m, n, k)
    nbytes = sum(s.nbytes for s in (*item.reads, *item.writes))
    return machine.dispatch_s + nbytes / machine.memory_bandwidth


def launch_nbytes(item: Launch) -> int:
    """Bytes of operands and results."""
    return sum(math.prod(r.shape) * dtype_itemsize(r.dtype) for r in item.out) + sum(s.nbytes for s in item.reads)
