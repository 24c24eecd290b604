"""Seconds that one item of a Program takes alone, from the measured machine, and what it takes of the memory's rate."""

from __future__ import annotations

import math

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.program import Copy, FileRows, FileSlice, Item, Launch, TensorRef
from forebay.rewriter.machine.profile import Machine

LOOKUPS = ("aten.embedding.out", "aten.gather.out", "aten.index_select.out")  # they read as much as they write
APPENDS = ("forebay.kv_append", "forebay.kv_append_q")  # they write new positions of caches, as large as what they read
ATTENTION = ("forebay.attention", "forebay.attention_q")


def item_time_s(item: Item, machine: Machine) -> float:
    """Time of `item` with nothing beside it, in seconds; 0 for items that only order others."""
    if isinstance(item, Copy):
        return copy_time_s(item, machine)
    if isinstance(item, Launch):
        return launch_time_s(item, machine)
    return 0.0


def copy_time_s(item: Copy, machine: Machine) -> float:
    """bytes / bandwidth of the link; a lookup, which the step waits for, takes its latency too. That of other copies
    (`copy_latency_s`) is hidden while others are in flight."""
    src = item.src
    link = machine.link(source_tier(item), item.dst.arena)
    if isinstance(src, FileRows):
        rows = math.prod(src.index.shape)
        return link.latency_s + rows * max(src.row_nbytes, PAGE_NBYTES) / link.bandwidth_bytes_per_s
    return item.dst.nbytes / link.bandwidth_bytes_per_s


def copy_latency_s(item: Copy, machine: Machine) -> float:
    """Seconds that a copy takes longer when nothing was in flight before it; a lookup's stand in its time."""
    if isinstance(item.src, FileRows):
        return 0.0
    return machine.link(source_tier(item), item.dst.arena).latency_s


def source_tier(item: Copy) -> str:
    """The tier that a copy reads."""
    return "disk" if isinstance(item.src, FileSlice | FileRows) else item.src.arena


def launch_time_s(item: Launch, machine: Machine) -> float:
    """For matrix products the measured time of the implementation; for attention that of the bytes it sees and the
    operations it does; for the rest bytes touched / memory bandwidth. On a CPU, whose issuing thread computes, after
    dispatch; a GPU computes while its launches are issued (`launch_issue_s`)."""
    dispatch_s = machine.dispatch_s if machine.device_kind == "cpu" else 0.0
    if item.op.startswith("forebay.linear"):
        return dispatch_s + _product_time_s(item, machine)
    if item.op in ATTENTION:
        return dispatch_s + _attention_time_s(item, machine)
    return dispatch_s + touched_nbytes(item) / (2 * machine.memory_bytes_per_s)  # a copy moves each byte twice


def launch_issue_s(machine: Machine) -> float:
    """Seconds that a launch takes of the issuing thread beside what computes it; 0 where that is the same thread."""
    return 0.0 if machine.device_kind == "cpu" else machine.dispatch_s


def touched_nbytes(item: Launch) -> int:
    """Bytes of memory that a launch reads and writes."""
    writes = sum(s.nbytes for s in item.writes)
    if item.op in LOOKUPS:
        return 2 * writes
    if item.op in APPENDS:
        grown = {s.buffer for s in item.writes}
        return 2 * sum(s.nbytes for s in item.reads if s.buffer not in grown)
    return sum(s.nbytes for s in item.reads) + writes


def memory_share(item: Launch, machine: Machine, time_s: float) -> float:
    """Share (0..1) of the rate at which computation can read the device that a launch of `time_s` takes."""
    return min(1.0, touched_nbytes(item) / (time_s * _read_bytes_per_s(machine))) if time_s > 0 else 0.0


def _read_bytes_per_s(machine: Machine) -> float:
    return machine.tiers["device"].bandwidth_bytes_per_s or 2 * machine.memory_bytes_per_s


def _product_time_s(item: Launch, machine: Machine) -> float:
    x, weight, _ = item.args
    k = x.shape[-1]
    m, n, dtype = math.prod(x.shape[:-1]), weight.shape[0], weight.dtype
    if "group_size" in item.kwargs:  # packed rows
        dtype = f"w{item.op[-1]}g{item.kwargs['group_size']}"
    elif item.kwargs["form"] == "kn":
        n = weight.shape[1]
    measured = machine.gemm_impls(dtype)
    if not measured:  # at least its bytes must be read
        return touched_nbytes(item) / _read_bytes_per_s(machine)
    name = item.impl.split("_")[0]  # of "flat_64x256_s4": settings are those that shapes were measured with
    impl = name if name in measured else machine.best_gemm(dtype, m, n, k)
    return machine.gemm_time_s(impl, dtype, m, n, k)


def _attention_time_s(item: Launch, machine: Machine) -> float:
    """As if every sequence were as long as the cache holds; queries of a chunk see on average half of it less."""
    refs = [ref for ref in item.args if isinstance(ref, TensorRef)]
    if len(refs) < 3 or len(refs[0].shape) != 4:
        return touched_nbytes(item) / machine.attention_bytes_per_s
    q, k, v = refs[:3]
    batch, heads, queries, width = q.shape
    itemsize = 1 if k.dtype == "uint8" else 4 if k.dtype == "float32" else 2
    nbytes = (math.prod(k.shape) + math.prod(v.shape)) * itemsize
    flops = 2 * batch * heads * width * queries * (2 * k.shape[2] - queries + 1)
    return machine.attention_time_s(q.dtype, nbytes, flops)
