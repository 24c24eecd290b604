"""What a plan for a GPU needs to know of its kernels: names and transient memory; needs neither Triton nor a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.gpu import decode_shares, selection

# Products that Triton's kernels take; torch multiplies the rest ("aten").
HALVES = ("float16", "bfloat16")


def _kind(weight: str) -> tuple[str, int]:
    """(kind of selection, group size) of a weight's dtype, or of its packed rows ("w4g64")."""
    if not weight.startswith("w"):
        return "linear", 0
    bits, group_size = weight[1:].split("g")
    return f"linear_w{bits}", int(group_size)


def processors() -> int:
    """Multiprocessors of the GPU here, or of an H200 where there is none."""
    return decode_shares.processor_count(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


def choose_linear(weight: str, m: int, n: int, k: int, device_name: str) -> str:
    """The implementation of x [m, k] times a weight [n, k] on a GPU of that name, in full, from its measured table, or
    where it has none the default one.

    weight is torch's name of its dtype, or "w4g64" and the like for packed rows.
    """
    kind, _ = _kind(weight)
    if kind == "linear" and weight not in HALVES:
        return "aten"
    name = selection.choose(kind, m, n, k, selection.table_of(device_name))
    return selection.explicit(kind, name, m, n, k, processors())


def linear_workspace_nbytes(impl: str, weight: str, m: int, n: int, k: int) -> int:
    """Bytes that a product takes beside its operands; "aten" makes its result apart, and again with what follows it."""
    kind, group_size = _kind(weight)
    if impl == "aten":
        return 2 * m * n * getattr(torch, weight).itemsize
    return selection.HELD_COUNTERS_NBYTES + selection.workspace_nbytes(kind, impl, m, n, k, group_size, processors())


def attention_workspace_nbytes(q: Tensor, k: Tensor, bits: int = 0, group: int = 0) -> int:
    """Bytes that attention of q [B, H, S, D] over a cache k [B, Hkv, L, D] takes beside its operands.

    bits and group are those of packed rows [B, Hkv, L, R].
    """
    batch, heads, queries, dim = q.shape
    if queries > 1:
        return selection.HELD_COUNTERS_NBYTES
    shares = decode_shares.workspace_nbytes(
        batch, heads, k.shape[1], k.shape[2], dim, q.dtype.itemsize, processors(), bits, group
    )  # fmt: skip
    return selection.HELD_COUNTERS_NBYTES + shares
