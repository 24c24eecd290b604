"""`forebay::activation_append_q`: write hidden states, quantized, into a checkpoint that K and V are made from again.

A checkpoint of activations is uint8 [B, L, R]: one packed row (`packing`) for each position, groups along the hidden
dimension, scales and lows in fp16, R = row_nbytes(H, bits, group), a multiple of 16. `dequantize_rows` reads it. The
format act8 is 8 bits in groups of 64 (`formats.table`): at H = 4096 a row has 4352 bytes, 0.53 times those of fp16.

Rows are not rotated as a cache's are (`kv_append_q`): the reader would have to rotate them back. On SmolLM2 predictions
with K and V made from act8 rows diverge by 0.0014 nats a token (KL; groups of 32 0.0006, of 128 0.0025, rotated
0.0002), and perplexity grows by 0.13 %.

A group with NaN, infinity, or a range beyond fp16's reads back as NaN: nothing is lost in silence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.cache.activation_append_q.reference import SCALE_DTYPE, check, fail, pack, reference
from forebay.kernels.cpu_support import native
from forebay.kernels.define import define_operator, filling
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.operator import Call, Cost, Use, nbytes_of
from forebay.kernels.quantization.quantize import cpu as quantize_cpu


def _packed(x: Tensor, bits: int, group: int) -> Tensor:
    """x [N, H] as packed rows [N, R]: by the C++ kernel, without a compiler by torch."""
    if native.load() is None:
        return pack(x, bits, group)
    made = torch.zeros(x.shape[0], row_sizes.row_nbytes(x.shape[1], bits, group), dtype=torch.uint8)
    packed, scale, low = packing.unpack_rows(made, x.shape[1], bits, group, SCALE_DTYPE)
    assert low is not None
    quantize_cpu.native_quantize(x, (packed, scale, low), bits, group)()
    return made


def bind_activation_append_q(cache: Tensor, x: Tensor, rows: Tensor, bits: int, group: int) -> Call:
    """A call without arguments on the tensors' contents then; what can be checked before is checked here."""
    check(cache, x, rows, bits, group)
    number = torch.arange(len(rows))[:, None]

    def call() -> None:
        if x.numel() == 0:
            return
        if rows.min() < 0 or rows.max() >= cache.shape[1]:
            fail("rows", f"must lie within 0 .. {cache.shape[1] - 1}, got {rows.min()} .. {rows.max()}")
        made = _packed(x.contiguous().view(-1, x.shape[2]), bits, group)
        cache[number, rows] = made.view(*x.shape[:2], -1)

    return call


def _activation_append_q(cache: Tensor, x: Tensor, rows: Tensor, bits: int, group: int) -> None:
    """Write x [B, S, H], as codes of `bits` in groups of `group`, into the rows [B, S] of cache [B, L, R].

    rows is int64; of tokens with one row any stays. x has any strides, cache contiguous rows. ValueError, before
    anything is written, where a shape, a dtype, a device or a row is wrong; on a GPU rows outside the cache are left
    out.
    """
    check(cache, x, rows, bits, group)


def _bind_gpu(cache: Tensor, x: Tensor, rows: Tensor, bits: int, group: int) -> Call:
    """The operator by its Triton kernel: for tensors on a GPU, or anywhere under TRITON_INTERPRET=1."""
    from forebay.kernels.cache.activation_append_q.gpu import bind_activation_append_q as bind

    check(cache, x, rows, bits, group)
    return bind(cache, x, rows, bits, group)


def _cost(use: Use) -> Cost:
    """The new rows alone."""
    cache, x, rows = use.args[:3]
    return Cost(0, nbytes_of(x, rows), math.prod(x.shape[:2]) * cache.shape[2])


def _cpu_workspace(use: Use) -> int:
    """The packed rows and a copy of x that is contiguous; without a compiler what torch's operators take too, at most
    24 bytes an element."""
    cache, x, rows = use.args[:3]
    tokens = math.prod(x.shape[:2])
    plain = 24 * tokens * x.shape[2] if native.load() is None else 0
    return tokens * cache.shape[2] + nbytes_of(x) + 2 * nbytes_of(rows) + plain


ACTIVATION_APPEND_Q = define_operator(
    _activation_append_q,
    writes=("cache",),
    reference=reference,
    cost=_cost,
    bind={"cpu": filling(bind_activation_append_q), "cuda": filling(_bind_gpu)},
    workspace={"cpu": _cpu_workspace},
)
