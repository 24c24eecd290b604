"""Seconds that one item of a Program takes alone, from the measured machine."""

from __future__ import annotations

import math

from forebay.rewriter.machine import Machine
from forebay.rewriter.program import Copy, FileRows, FileSlice, Item, Launch

PAGE = 4096  # a row lookup reads whole pages


def item_time_s(item: Item, machine: Machine) -> float:
    """Time of `item` with nothing beside it, in seconds; 0 for items that only order others."""
    if isinstance(item, Copy):
        return copy_time_s(item, machine)
    if isinstance(item, Launch):
        return launch_time_s(item, machine)
    return 0.0


def copy_time_s(item: Copy, machine: Machine) -> float:
    """bytes / bandwidth of the link; its latency counts once for a lookup, which the step waits for, and is hidden
    behind other reads in flight for the rest."""
    src = item.src
    tier = "disk" if isinstance(src, FileSlice | FileRows) else src.arena
    link = machine.link(tier, item.dst.arena)
    if isinstance(src, FileRows):
        rows = math.prod(src.index.shape)
        return link.latency_s + rows * max(src.row_nbytes, PAGE) / link.bandwidth_bytes_per_s
    return item.dst.nbytes / link.bandwidth_bytes_per_s


def launch_time_s(item: Launch, machine: Machine) -> float:
    """Dispatch, plus: for matrix products the measured time of the implementation; for attention the cache bytes at
    the measured attention rate; for the rest bytes touched / memory bandwidth."""
    nbytes = sum(s.nbytes for s in (*item.reads, *item.writes))
    if item.op.startswith("forebay.linear"):
        return machine.dispatch_s + _product_time_s(item, machine, nbytes)
    if item.op in ("forebay.attention", "forebay.attention_q"):
        return machine.dispatch_s + nbytes / machine.attention_bytes_per_s
    return machine.dispatch_s + nbytes / (2 * machine.memory_bytes_per_s)  # a copy moves each byte twice


def _product_time_s(item: Launch, machine: Machine, nbytes: int) -> float:
    x, weight, _ = item.args
    k = x.shape[-1]
    m, n, dtype = math.prod(x.shape[:-1]), weight.shape[0], weight.dtype
    if "group_size" in item.kwargs:  # packed rows
        dtype = f"w{item.op[-1]}g{item.kwargs['group_size']}"
    elif item.kwargs["form"] == "kn":
        n = weight.shape[1]
    measured = {point.impl for point in machine.gemm if point.dtype == machine.measured_as(dtype)}
    if not measured:  # at least its bytes must move
        return nbytes / (2 * machine.memory_bytes_per_s)
    impl = item.impl if item.impl in measured else machine.best_gemm(dtype, m, n, k)
    return machine.gemm_time_s(impl, dtype, m, n, k)
