"""`forebay::activation_append_q`: write hidden states, quantised, into a checkpoint that K and V are made from again.

A checkpoint of activations is uint8 [B, L, R]: one packed row (`packing`) for each position, groups along the hidden
dimension, scales and lows in fp16, R = row_nbytes(H, bits, group), a multiple of 16 so that every row is read 128 bits
at a time. `kv_from_activation` reads it. The format act8 is 8 bits in groups of 64 (`formats.table`): at
H = 4096 a row has 4352 bytes, 0.53 times those of fp16.

Rows are not rotated as a cache's are (`kv_append_q`): the reader would have to rotate them back ahead of the norm, once
for every KV head. On SmolLM2 predictions with K and V made from act8 rows diverge by 0.0014 nats a token (KL; groups of
32 0.0006, of 128 0.0025, rotated 0.0002), and perplexity grows by 0.13 %.

A group with NaN, infinity, or a range beyond fp16's reads back as NaN: nothing is lost in silence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.cache.activation_append_q.reference import OP, SCALE_DTYPE, check, fail, pack, reference
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing
from forebay.kernels.operator import Cost, Operator, Use, nbytes_of
from forebay.kernels.quantization.quantize import cpu as quantize_cpu


def _write(rows: Tensor, x: Tensor, bits: int, group: int) -> None:
    """x [S, H] into packed rows [S, R]: by the C++ kernel in place, without a compiler by torch."""
    if native.load() is None:
        rows.copy_(pack(x, bits, group))
        return
    parts = packing.unpack_rows(rows, x.shape[1], bits, group, SCALE_DTYPE)
    rows[:, parts[0].shape[1] + 4 * parts[1].shape[1] :] = 0
    quantize_cpu.native_quantize(x, parts, bits, group)()


@torch.library.custom_op(f"forebay::{OP}", mutates_args=("cache",), device_types="cpu")
def activation_append_q(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> None:
    """Write x [B, S, H], as codes of `bits` in groups of `group`, into cache [B, L, R] at start[b] .. start[b] + S - 1.

    start is int64 [B]; x has any strides, cache contiguous rows. ValueError, before anything is written, where a shape,
    a dtype, a device or a position is wrong; on a GPU positions outside the cache are left out.
    """
    check(cache, x, start, bits, group)
    begins, new = start.tolist(), x.shape[1]
    if x.numel() == 0:
        return
    if min(begins) < 0 or max(begins) + new > cache.shape[1]:
        fail("start", f"must leave positions within 0 .. {cache.shape[1]}, got {begins} and {new} new")
    if x.stride(2) != 1:
        x = x.contiguous()
    for b, begin in enumerate(begins):
        _write(cache[b, begin : begin + new], x[b], bits, group)


@activation_append_q.register_kernel("cuda")
def _(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> None:
    launch(cache, x, start, bits, group)


def launch(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> None:
    """The operator by its Triton kernel: for tensors on a GPU, or anywhere under TRITON_INTERPRET=1."""
    from forebay.kernels.cache.activation_append_q import gpu

    check(cache, x, start, bits, group)
    gpu.activation_append_q(cache, x, start, bits, group)


@activation_append_q.register_fake
def _(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> None:
    check(cache, x, start, bits, group)


def _cost(use: Use) -> Cost:
    """The new positions alone."""
    cache, x, start = use.args[:3]
    return Cost(0, nbytes_of(x, start), math.prod(x.shape[:2]) * cache.shape[2])


ACTIVATION_APPEND_Q = Operator(torch.ops.forebay.activation_append_q.default, reference, _cost)
