"""rotary, kv_append, kv_append_q and activation_append_q: what happens to queries, keys and values
before attention, and to hidden states that stand in for keys and values."""

from __future__ import annotations

import functools

import torch

from benchmarks.gpu_cases.case import LIMITS, Aim, Case, Place, Work, checked, normal, relative_error, repeated
from forebay.kernels.cache.activation_append_q import reference as activation_append_q_reference
from forebay.kernels.cache.kv_append import reference as append
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.table import ACTIVATION_FORMATS
from forebay.kernels.positions.rotary import reference as rotation

LIMIT = LIMITS[torch.bfloat16]
DIM = 128


def rotary_work(place: Place) -> Work:
    from forebay.kernels.positions.rotary.gpu import bind_rotary

    heads, tokens = place.size(32, 3), place.size(4096, 5)
    nbytes = 2 * tokens * DIM * (2 * heads + 2)
    cos, sin = normal(place, 1, tokens, DIM), normal(place, 1, tokens, DIM)
    xs = [x.transpose(1, 2) for x in repeated(lambda: normal(place, 1, tokens, heads, DIM), place.copies(nbytes))]
    outs = [torch.empty_like(x) for x in xs]
    ours = [bind_rotary(x, cos, sin, out) for x, out in zip(xs, outs, strict=True)]
    verify = checked(ours[0], outs[0], lambda: rotation.reference(xs[0].double(), cos.double(), sin.double()))
    return Work(f"{tokens} tokens, {heads}x{DIM}", ours, verify, LIMIT, nbytes, aims=(Aim("bandwidth", 0.75),))


def kv_append_work(place: Place, bits: int = 0) -> Work:
    """Keys and values as they are, or in rows of so many bits."""
    from forebay.kernels.cache.kv_append.gpu import bind_kv_append
    from forebay.kernels.cache.kv_append_q.gpu import bind_kv_append_q

    heads, tokens = place.size(8, 3), place.size(4096, 5)
    packed = (bits, row_sizes.cache_group_size(DIM, bits)) if bits else ()
    width = row_sizes.cache_row_nbytes(DIM, bits) if bits else DIM
    nbytes = 2 * tokens * heads * (2 * DIM + (width if bits else 2 * DIM))
    start = torch.tensor([7], device=place.device)
    ks = [k.transpose(1, 2) for k in repeated(lambda: normal(place, 1, tokens, heads, DIM), place.copies(nbytes))]
    dtype = torch.uint8 if bits else ks[0].dtype
    caches = [torch.zeros(2, 1, heads, tokens + 16, width, dtype=dtype, device=k.device) for k in ks]
    bind, reference = (bind_kv_append_q, kv_append_q.reference) if bits else (bind_kv_append, append.reference)
    ours = [bind(*cache, k, k, start, *packed) for cache, k in zip(caches, ks, strict=True)]

    def verify() -> float:
        """Of the values that rows stand for: a fitted range may be the fp16 number beside the reference's."""
        want = torch.stack(reference(*caches[0], ks[0], ks[0], start, *packed))
        ours[0]()
        both = caches[0], want
        return relative_error(*((kv_append_q.unpack(cache, DIM, *packed) for cache in both) if bits else both))

    return Work(f"{tokens} tokens, {heads}x{DIM}{f', kv{bits}' if bits else ''}", ours, verify, LIMIT if bits else 0.0,
                nbytes, aims=(Aim("bandwidth", {0: 0.75, 4: 0.35, 8: 0.5}[bits]),))  # fmt: skip


def activation_append_q_work(place: Place, format: str) -> Work:
    from forebay.kernels.cache.activation_append_q.gpu import bind_activation_append_q

    bits, group = ACTIVATION_FORMATS[format].bits, ACTIVATION_FORMATS[format].group_size
    features, tokens = place.size(4096, 100), place.size(4096, 5)
    row_nbytes = row_sizes.row_nbytes(features, bits, group)
    nbytes = tokens * (2 * features + row_nbytes)
    rows = torch.arange(7, 7 + tokens, device=place.device)[None]
    xs = list(repeated(lambda: normal(place, 1, tokens, features), place.copies(nbytes)))
    caches = [torch.zeros(1, tokens + 16, row_nbytes, dtype=torch.uint8, device=place.device) for _ in xs]
    ours = [bind_activation_append_q(cache, x, rows, bits, group) for cache, x in zip(caches, xs, strict=True)]

    def verify() -> float:
        want = activation_append_q_reference.reference(caches[0], xs[0], rows, bits, group)
        ours[0]()
        return float((caches[0] != want).double().mean())

    return Work(f"{tokens} tokens, H={features}, {format}", ours, verify, 0.0, nbytes, aims=(Aim("bandwidth", 0.6),))


def cases(tiny: bool) -> list[Case]:
    """Llama-3-8B's heads, one prompt of 4096 tokens."""
    return [
        Case("rotary", rotary_work),
        Case("kv_append", kv_append_work),
        *(Case("kv_append_q", functools.partial(kv_append_work, bits=bits)) for bits in row_sizes.BITS),
        *(Case("activation_append_q", functools.partial(activation_append_q_work, format=f))
          for f in ACTIVATION_FORMATS),
    ]  # fmt: skip
