"""`forebay::kv_append_q`: write the K and V of new positions, quantised, into a cache of packed rows.

A quantised cache is uint8 [B, Hkv, L, R]: one packed row (`packing`) for each position of each KV head, groups along
the head dimension, scales and lows in fp16, R = row_nbytes(D, bits, group, CACHE_ALIGN). What writes it and what reads
it, `attention_q`, must be told the same bits and group; `packing.cache_group_size` says the usual group.

Rows are rotated before they are quantised, by Hadamard blocks along the head dimension (QuaRot, Ashkboos et al. 2024):
some channels of K are ten times as large as the rest, and would set the step of their whole group; a rotation shares
them out. It comes after rotary embeddings and is orthogonal, so scores of rotated queries with rotated keys are those
of the plain ones, and a result over rotated values is rotated back once: softcap, window, scale and grouped queries
never see it. Codes of 4 bits are made twice: the range is min-max first, then the least-squares fit to these codes
where that lowers the squared error.

On SmolLM2 the divergence of the predictions (KL, nats a token; about what a 4-bit K adds to log perplexity) is 0.083
for plain groups of 64, 0.033 rotated by blocks of 64, 0.026 in groups of 32 too, 0.021 in blocks of 32, 0.018 fitted.
K in groups along 64 positions (KIVI, Liu et al. 2024) gives 0.010, but a block's range needs all its tokens: a row here
depends on nothing but its own position, so appends may come in any pieces, be repeated, and be cut off.

NaN, infinity, or a magnitude beyond fp16's range makes NaN of all groups that its block touches: nothing is lost in
silence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import kv_append, native, packing
from forebay.kernels import quantize as quantize_module
from forebay.kernels.quantized_native import CacheAppendArgs

SCALE_DTYPE = torch.float16
MOST_ROTATED = 32  # elements of a block


def _hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the Hadamard matrix of +-1 of each block of `rotation_size(D)`; twice is that size times x."""
    stride = 1
    while stride < rotation_size(x.shape[-1]):
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        stride *= 2
    return x


def rotation_size(head_dim: int) -> int:
    """Elements of a rotated block: the largest power of two, at most MOST_ROTATED, that divides head_dim."""
    return min(MOST_ROTATED, head_dim & -head_dim)


def _factors(head_dim: int) -> tuple[float, float]:
    """What rows are multiplied by when stored, and when read: powers of two, which do not round."""
    power = rotation_size(head_dim).bit_length() - 1
    return 2.0 ** -((power + 1) // 2), 2.0 ** -(power // 2)


def _refitted(rows: Tensor, packed: Tensor, scale: Tensor, low: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """The 4-bit groups of fp32 rows [N, D], each with the range that fits its codes best and codes in that range, where
    that lowers the squared error."""
    count, size = scale.shape[1], rows.shape[1]

    def grouped(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, count * group - size)).unflatten(1, (count, group))

    def error(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
        made = codes.float() * scale.float()[..., None] + low.float()[..., None]
        return ((made.double() - x) * valid).square().sum(-1)

    x, valid = grouped(rows).double(), grouped(torch.ones_like(rows[:1])).double()
    n, codes = valid.sum(-1), packing.unpack_codes(packed, 4).unflatten(1, (count, group)).double()
    q, total = codes.sum(-1), x.sum(-1)
    fitted = (n * (codes * x).sum(-1) - q * total) / (n * codes.square().sum(-1) - q.square())
    new_scale = fitted.float().to(SCALE_DTYPE)
    new_low = ((total - fitted * q) / n).float().to(SCALE_DTYPE)
    new = ((x.float() - new_low.float()[..., None]) / new_scale.float()[..., None]).round().clamp(0, 15) * valid
    better = (new_scale > 0) & new_scale.isfinite() & new_low.isfinite()
    better &= error(new, new_scale, new_low) < error(codes, scale, low)
    codes = torch.where(better[..., None], new, codes).to(torch.uint8)
    return (packing.pack_codes(codes.flatten(1), 4), torch.where(better, new_scale, scale),
            torch.where(better, new_low, low))


def pack(x: Tensor, bits: int, group: int) -> Tensor:
    """x [..., D] as packed cache rows uint8 [..., R], by plain torch on any device; NaN where a group is not held."""
    rows = _hadamard(x.reshape(-1, x.shape[-1]).float()) * _factors(x.shape[-1])[0]
    parts = quantize_module.reference(rows, bits, group, 1, SCALE_DTYPE)
    if bits == 4:
        parts = _refitted(rows, *parts, group)
    return packing.pack_rows(*parts, align=packing.CACHE_ALIGN).view(*x.shape[:-1], -1)


def unpack(cache: Tensor, head_dim: int, bits: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., D] of packed cache rows [..., R], rotated back, by plain torch on any device."""
    parts = packing.unpack_rows(cache, head_dim, bits, group, SCALE_DTYPE)
    rows = _hadamard(quantize_module.dequantize_reference(*parts, bits, group, -1, head_dim))
    limit = torch.finfo(dtype).max
    return rows.mul_(_factors(head_dim)[1]).clamp_(-limit, limit).to(dtype)


def reference(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int
) -> tuple[Tensor, Tensor]:
    """New caches [B, Hkv, L, R] with k and v [B, Hkv, S, D] at positions start[b] .. start[b] + S - 1; any device."""
    return kv_append.reference(k_cache, v_cache, pack(k, bits, group), pack(v, bits, group), start)


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"kv_append_q: {argument} {problem}")


def check_format(op: str, bits: int, group: int) -> None:
    """ValueError, opened by op, unless cache rows of this format exist."""
    packing.check_format(op, bits, group)
    if group % 4:
        raise ValueError(f"{op}: group must be a multiple of 4, got {group}")


def check(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    """ValueError names the argument whose shape or dtype is wrong; positions are checked where they are used."""
    check_format("kv_append_q", bits, group)
    for new, cache, name in ((k, k_cache, "k"), (v, v_cache, "v")):
        if new.dim() != 4 or new.dtype not in native.DTYPES or new.dtype != k.dtype or new.shape[:3] != k.shape[:3]:
            _fail(name, f"must be [B, Hkv, S, D] of fp32, bf16 or fp16 like k, got {new.dtype} {tuple(new.shape)}")
        wanted = (*k.shape[:2], k_cache.shape[2] if k_cache.dim() == 4 else "L",
                  packing.row_nbytes(new.shape[3], bits, group, packing.CACHE_ALIGN))  # fmt: skip
        if cache.dtype != torch.uint8 or tuple(cache.shape) != wanted:
            _fail(f"{name}_cache", f"must be uint8 {wanted}, got {cache.dtype} {tuple(cache.shape)}")
    if start.dtype != torch.int64 or start.shape != k.shape[:1]:
        _fail("start", f"must be int64 of shape {tuple(k.shape[:1])}, got {start.dtype} {tuple(start.shape)}")


def _refuse_start(k_cache: Tensor, k: Tensor, start: Tensor) -> None:
    _fail("start", f"must leave positions within 0 .. {k_cache.shape[2]}, got {start.tolist()} and {k.shape[2]} new")


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    """By torch, one sequence after another."""
    begins, new = start.tolist(), k.shape[2]
    if begins and (min(begins) < 0 or max(begins) + new > k_cache.shape[2]):
        _refuse_start(k_cache, k, start)
    for cache, x in ((k_cache, k), (v_cache, v)):
        rows = pack(x, bits, group)
        for b, begin in enumerate(begins):
            cache[b, :, begin : begin + new] = rows[b]


def bind_kv_append_q(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int
) -> Callable[[], None]:
    """A closure over CPU tensors that appends the present contents of k and v at the present contents of start.

    Strides and pointers are settled here; the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(k_cache, v_cache, k, v, start, bits, group)
    tensors = (k_cache, v_cache, k, v)
    library = native.load()
    plain = all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in tensors)
    most = 0 if library is None else library.forebay_cache_max_head_dim()
    if not plain or max(k.shape[3], v.shape[3]) > most or k.numel() == 0:
        return lambda: _append(k_cache, v_cache, k, v, start, bits, group)
    if not start.is_contiguous():
        _fail("start", "must be contiguous")
    args = CacheAppendArgs(
        *(t.data_ptr() for t in tensors), start.data_ptr(),
        *k_cache.shape[:3], k.shape[2], k.shape[3], v.shape[3], group,
        *(stride for t in tensors for stride in t.stride()[:3]), bits, native.DTYPES[k.dtype],
    )  # fmt: skip
    return native.NativeCall("kv_append_q", args, (*tensors, start), refuse=lambda: _refuse_start(k_cache, k, start))


@torch.library.custom_op("forebay::kv_append_q", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def kv_append_q(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    """Write k [B, Hkv, S, D] and v, as codes of `bits`, into the caches [B, Hkv, L, R] at start[b] .. start[b] + S - 1.

    start is int64 [B]. Any strides. ValueError, before anything is written, where a shape, a dtype or a position is
    wrong; on fake tensors only shapes are known.
    """
    bind_kv_append_q(k_cache, v_cache, k, v, start.contiguous(), bits, group)()


@kv_append_q.register_kernel("cuda")
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    from forebay.kernels.gpu.kv_append_q import kv_append_q as launch

    launch(k_cache, v_cache, k, v, start, bits, group)


@kv_append_q.register_fake
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    check(k_cache, v_cache, k, v, start, bits, group)
