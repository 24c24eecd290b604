"""`forebay::attention_q` in Triton: attention over packed rows, dequantized in registers.

The kernels are those of `decode_attention` and `prefill_attention`. Keys and values stay rotated: a tile of queries is
rotated as it is loaded, in decoding by every share of a sequence, and a result before it is rounded, in decoding where
the shares are merged. Of rows of more than 256 values, as of latents, many queries attend to values in scratch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels.attention.attention_q import reference as operator
from forebay.kernels.attention.costs import unpacked_nbytes
from forebay.kernels.attention.decode_attention import gpu as decode_attention
from forebay.kernels.attention.decode_attention.decode_shares import TYPICAL_LANES
from forebay.kernels.attention.prefill_attention import gpu as prefill_attention
from forebay.kernels.attention.scoring import SYNCHRONISED, Scoring, SoftmaxRange
from forebay.kernels.gpu_support.arguments import check_tensor
from forebay.kernels.gpu_support.cache_rows import check_rows, packed_view
from forebay.kernels.gpu_support.cache_tiles import AttendedCache, check_head_dim, contiguous_view, same_rows
from forebay.kernels.gpu_support.launches import KernelCall, bound_with_scratch
from forebay.kernels.gpu_support.unpacked_rows import unpack_call
from forebay.kernels.operator import Call

OP = "attention_q"


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, bits: int, group: int, out: Tensor
) -> None:
    operator.check(q, k_cache, v_cache, start, bits, group)
    check_tensor(OP, "q", q)
    check_head_dim(OP, q)
    batch, heads, queries, dim = q.shape
    for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
        check_tensor(OP, name, cache, device=q.device, dtype=torch.uint8)
        check_rows(OP, cache, name, dim)
    check_tensor(OP, "start", start, device=q.device, dtype=torch.int64)
    check_tensor(OP, "out", out, device=q.device, dtype=q.dtype, shape=(batch, queries, heads, dim))


def bind_attention_q(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scoring: Scoring, bits: int, group: int, out: Tensor,
    softmax: SoftmaxRange = SYNCHRONISED,
) -> Callable[[], None]:  # fmt: skip
    """attention_q as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    _check(q, k_cache, v_cache, start, bits, group, out)
    return _bind(q, (k_cache, v_cache), start, scoring, (bits, group), out, softmax, None)


def _bind(
    q: Tensor, caches: tuple[Tensor, Tensor], start: Tensor, scoring: Scoring, form: tuple[int, int], out: Tensor,
    softmax: SoftmaxRange, splits: int | None,
) -> Callable[[], None]:  # fmt: skip
    """The same of arguments that have been checked; `form` is bits and elements of a group."""
    view = packed_view(*caches, q.shape[3], *form)
    _, kv_heads, capacity, row_nbytes = caches[0].shape
    cache = AttendedCache(view, kv_heads, capacity, 2 * row_nbytes, start)
    if q.shape[2] == 1:
        return decode_attention.bind_view(q[:, :, 0], cache, scoring, softmax, splits, out[:, 0])
    if q.shape[3] <= TYPICAL_LANES:
        return prefill_attention.bind_view(q, cache, scoring, out)

    def launches(scratch: Tensor, _: Tensor) -> list[KernelCall | Call]:
        made, rows = list[KernelCall | Call](), list[Tensor]()
        for each in caches[:1] if same_rows(view) else caches:
            count = math.prod(each.shape[:3]) * q.shape[3]
            values = scratch[len(rows) * nbytes :][:nbytes].view(q.dtype)[:count].view(*each.shape[:3], q.shape[3])
            made.append(unpack_call(each, packed_view(each, each, q.shape[3], *form), start, q.shape[2], values))
            rows.append(values)
        plain = AttendedCache(contiguous_view(rows[0], rows[-1]), kv_heads, capacity, 2 * row_nbytes, start)
        return [*made, prefill_attention.bind_view(q, plain, scoring, out)]

    nbytes = unpacked_nbytes(q, caches[0])
    return bound_with_scratch(q.device, nbytes * (1 if same_rows(view) else 2), 0, launches)


def attention_q(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scoring: Scoring, bits: int, group: int, out: Tensor,
    splits: int | None = None,
) -> None:  # fmt: skip
    """q [B, H, S, D], caches uint8 [B, Hkv, L, R], start int64 [B] -> out [B, S, H, D].

    Any strides but D's and a row's. The host is not synchronised, so start is not checked against L. `splits` are the
    shares of a sequence for one query; None: as many as plans count memory for. ValueError names the argument that is
    wrong, before the launch.
    """
    _check(q, k_cache, v_cache, start, bits, group, out)
    _bind(q, (k_cache, v_cache), start, scoring, (bits, group), out, SYNCHRONISED, splits)()
