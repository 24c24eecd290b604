"""`forebay::activation_append_q`: write hidden states, quantised, into a checkpoint that K and V are made from again.

A checkpoint of activations is uint8 [B, L, R]: one packed row (`packing`) for each position, groups along the hidden
dimension, scales and lows in fp16, R = row_nbytes(H, bits, group), a multiple of 16 so that every row is read 128 bits
at a time. `kv_from_activation` reads it. The format act8 is 8 bits in groups of 64 (`packing.ACTIVATION_FORMATS`): at
H = 4096 a row has 4352 bytes, 0.53 times those of fp16.

Rows are not rotated as a cache's are (`kv_append_q`): the reader would have to rotate them back ahead of the norm, once
for every KV head. On SmolLM2 predictions with K and V made from act8 rows diverge by 0.0014 nats a token (KL; groups of
32 0.0006, of 128 0.0025, rotated 0.0002), and perplexity grows by 0.13 %.

A group with NaN, infinity, or a range beyond fp16's reads back as NaN: nothing is lost in silence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels import native, packing, quantize

OP = "activation_append_q"
SCALE_DTYPE = torch.float16
GROUPS = (32, 64, 128)


def pack(x: Tensor, bits: int, group: int) -> Tensor:
    """x [..., H] as packed rows uint8 [..., R], by plain torch on any device; NaN where a group is not held."""
    return packing.pack_rows(*quantize.reference(x, bits, group, -1, SCALE_DTYPE))


def unpack(rows: Tensor, features: int, bits: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., H = features] of packed rows [..., R], by plain torch on any device."""
    parts = packing.unpack_rows(rows, features, bits, group, SCALE_DTYPE)
    return quantize.dequantize_reference(*parts, bits, group, -1, features, dtype)


def reference(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> Tensor:
    """A new checkpoint [B, L, R] with x [B, S, H] at positions start[b] .. start[b] + S - 1, on any device."""
    made, rows = cache.clone(), pack(x, bits, group)
    for b, begin in enumerate(start.tolist()):
        made[b, begin : begin + x.shape[1]] = rows[b]
    return made


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"{OP}: {argument} {problem}")


def check_format(op: str, bits: int, group: int, prefix: str = "") -> None:
    """ValueError, opened by op, unless rows of this format exist; prefix begins the names of the two arguments."""
    if bits not in packing.BITS:
        raise ValueError(f"{op}: {prefix}bits must be one of {packing.BITS}, got {bits}")
    if group not in GROUPS:
        raise ValueError(f"{op}: {prefix}group must be one of {GROUPS}, got {group}")


def check(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> None:
    """ValueError names the argument whose dtype, shape or device is wrong; positions are looked at when used."""
    check_format(OP, bits, group)
    if x.dim() != 3 or x.dtype not in native.DTYPES or x.shape[-1] < 1:
        _fail("x", f"must be [B, S, H] of fp32, bf16 or fp16, got {x.dtype} {tuple(x.shape)}")
    wanted = (x.shape[0], cache.shape[1] if cache.dim() == 3 else "L", packing.row_nbytes(x.shape[2], bits, group))
    if cache.dtype != torch.uint8 or tuple(cache.shape) != wanted:
        _fail("cache", f"must be uint8 {wanted}, got {cache.dtype} {tuple(cache.shape)}")
    if cache.stride(2) != 1 or cache.stride(0) % 2 or cache.stride(1) % 2 or cache.storage_offset() % 2:
        _fail("cache", f"must have contiguous rows at even addresses, got strides {cache.stride()}")
    if start.dtype != torch.int64 or start.shape != x.shape[:1]:
        _fail("start", f"must be int64 of shape {tuple(x.shape[:1])}, got {start.dtype} {tuple(start.shape)}")
    for tensor, name in ((x, "x"), (start, "start")):
        if tensor.device != cache.device:
            _fail(name, f"must be on {cache.device}, got {tensor.device}")


def _write(rows: Tensor, x: Tensor, bits: int, group: int) -> None:
    """x [S, H] into packed rows [S, R]: by the C++ kernel in place, without a compiler by torch."""
    if native.load() is None:
        rows.copy_(pack(x, bits, group))
        return
    parts = packing.unpack_rows(rows, x.shape[1], bits, group, SCALE_DTYPE)
    rows[:, parts[0].shape[1] + 4 * parts[1].shape[1] :] = 0
    quantize.native_quantize(x, parts, bits, group)()


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
        _fail("start", f"must leave positions within 0 .. {cache.shape[1]}, got {begins} and {new} new")
    if x.stride(2) != 1:
        x = x.contiguous()
    for b, begin in enumerate(begins):
        _write(cache[b, begin : begin + new], x[b], bits, group)


@activation_append_q.register_kernel("cuda")
def _(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> None:
    launch(cache, x, start, bits, group)


def launch(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> None:
    """The operator by its Triton kernel: for tensors on a GPU, or anywhere under TRITON_INTERPRET=1."""
    from forebay.kernels.gpu import activation_append_q as gpu

    check(cache, x, start, bits, group)
    gpu.activation_append_q(cache, x, start, bits, group)


@activation_append_q.register_fake
def _(cache: Tensor, x: Tensor, start: Tensor, bits: int, group: int) -> None:
    check(cache, x, start, bits, group)
