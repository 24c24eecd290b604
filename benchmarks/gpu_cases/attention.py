"""Attention of one query and of many, over plain and quantized caches.

decode_attention and prefill_attention stand beside torch's SDPA, the shared maximum beside the synchronised softmax.
"""

from __future__ import annotations

import functools
import unittest.mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_cases.case import LIMITS, Aim, Case, Place, Work, checked, normal, repeated
from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.expanded_attention import reference as expanded
from forebay.kernels.attention.expanded_attention.reference import RowCodes
from forebay.kernels.attention.scoring import SYNCHRONISED, Scoring, SoftmaxRange
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes

DTYPE = torch.bfloat16
DIM = 128
# phi, low and high under which every row of normal q and k shares the maximum.
SHARED = SoftmaxRange(0.0, -60.0, 60.0)


def whole_waves(place: Place, rows: int) -> list[int]:
    """Shares of each of so many sequences' heads that fill the GPU's multiprocessors with 1 to 8 programs each."""
    processors = 4 if place.tiny else torch.cuda.get_device_properties(place.device).multi_processor_count
    return sorted({max(1, each * processors // rows) for each in (1, 2, 3, 4, 6, 8)})[:: place.size(1, 3)]


def decode_work(place: Place, batch: int, heads: int, kv_heads: int, context: int, dim: int = DIM) -> Work:
    """Rows of more than 256 values are keys and values at once, as latents are."""
    from forebay.kernels.attention.decode_attention.gpu import bind_decode_attention_contiguous as launch

    batch, heads, kv_heads = place.size(batch, 2), place.size(heads, 4), place.size(kv_heads, 2)
    context = place.size(context, 150)
    parts = 1 if dim > 256 else 2
    nbytes = 2 * batch * dim * (parts * kv_heads * context + 2 * heads)
    made = repeated(lambda: normal(place, parts, batch, kv_heads, context, dim), place.copies(nbytes))
    caches = [(rows[0], rows[-1]) for rows in made]
    q, out = normal(place, batch, heads, dim), torch.empty(batch, heads, dim, dtype=DTYPE, device=place.device)
    start, scale = torch.full((batch,), context - 1, device=place.device), dim**-0.5

    def calls(softmax: SoftmaxRange) -> list[functools.partial]:
        return [launch(q, k, v, start, Scoring(scale), out, softmax) for k, v in caches]

    ours = calls(SHARED)
    candidates = {f"{splits} splits": [launch(q, k, v, start, Scoring(scale), out, SHARED, splits)
                                       for k, v in caches] for splits in whole_waves(place, batch * kv_heads)}
    rivals: dict[str, list] = {"synchronised": calls(SYNCHRONISED)}
    aims = [Aim("bandwidth", 0.85), Aim("synchronised", 1.1)] if context % 64 == 0 and parts == 2 else []
    if not place.tiny:
        # queries of a group are rows of one product: the fastest way to give torch grouped queries of one position
        grouped = q.view(batch, kv_heads, -1, dim)
        sdpa = functools.partial(scaled_dot_product_attention, scale=scale)
        rivals["SDPA"] = [functools.partial(sdpa, grouped, k, v) for k, v in caches]
        aims += [Aim("SDPA", 1.0)] if aims else []

    def want() -> torch.Tensor:
        return attention.reference(q[:, :, None], *caches[0], start, scale, dtype=torch.float32)[:, 0]

    return Work(f"B={batch} {heads}/{kv_heads} heads of {dim}, {context} positions", ours, checked(ours[0], out, want),
                LIMITS[DTYPE], nbytes, 4 * batch * heads * dim * context, rivals, tuple(aims), candidates)  # fmt: skip


def prefill_work(place: Place, heads: int, kv_heads: int, queries: int, window: int, softcap: float) -> Work:
    from forebay.kernels.attention.prefill_attention.gpu import bind_prefill_attention, loop_order

    heads, kv_heads, queries = place.size(heads, 4), place.size(kv_heads, 2), place.size(queries, 37)
    window = place.size(window, min(window, 11))
    nbytes = 4 * queries * DIM * (heads + kv_heads)
    count = min(4, place.copies(nbytes))
    qs = [q.transpose(1, 2) for q in repeated(lambda: normal(place, 1, queries, heads, DIM), count)]
    k, v = normal(place, 1, kv_heads, queries + 9, DIM), normal(place, 1, kv_heads, queries + 9, DIM, scale=0.5)
    start, scale = torch.zeros(1, dtype=torch.int64, device=place.device), DIM**-0.5
    out = torch.empty(1, queries, heads, DIM, dtype=DTYPE, device=place.device)
    scoring = Scoring(scale, window, softcap)
    ours = [bind_prefill_attention(q, k, v, start, scoring, out) for q in qs]
    with unittest.mock.patch(f"{loop_order.__module__}.loop_order", lambda *of: {**loop_order(*of), "AHEAD": False}):
        turns = [bind_prefill_attention(q, k, v, start, scoring, out) for q in qs]
    seen = sum(min(i + 1, window or queries) for i in range(queries))

    def want() -> torch.Tensor:
        return attention.reference(qs[0], k, v, start, scale, window, softcap, torch.float32)

    rivals = {}
    if not window and not softcap and not place.tiny:
        kept = [t[:, :, :queries].contiguous() for t in (k, v)]
        rivals["SDPA"] = [functools.partial(scaled_dot_product_attention, q, *kept, is_causal=True, scale=scale,
                                            enable_gqa=True) for q in qs]  # fmt: skip
    kind = f", window {window}" if window else ", softcap" if softcap else ""
    name = f"{heads}/{kv_heads} heads, {queries} queries{kind}"
    return Work(name, ours, checked(ours[0], out, want), LIMITS[DTYPE], nbytes, 4 * heads * DIM * seen, rivals,
                candidates={"tiles in turn": turns})  # fmt: skip


def attention_q_work(
    place: Place, bits: int, batch: int, heads: int, kv_heads: int, context: int, queries: int,
    dim: int = DIM,
) -> Work:  # fmt: skip
    """Rows of more than 256 values are keys and values at once, as latents are."""
    from forebay.kernels.attention.attention_q.gpu import attention_q as launch

    batch, heads, kv_heads = place.size(batch, 2), place.size(heads, 4), place.size(kv_heads, 2)
    queries, context = place.size(queries, min(queries, 13)), place.size(context, 90)
    group, row_nbytes = row_sizes.cache_group_size(dim, bits), row_sizes.cache_row_nbytes(dim, bits)
    parts = 1 if dim > 256 else 2
    nbytes = batch * (kv_heads * context * parts * row_nbytes + 2 * 2 * queries * heads * dim)
    start = torch.full((batch,), context - queries, device=place.device)
    x = normal(place, parts, 1, kv_heads, context, dim)
    made = repeated(lambda: kv_append_q.pack(x, bits, group).repeat(1, batch, 1, 1, 1), place.copies(nbytes))
    caches = [(rows[0], rows[-1]) for rows in made]
    q, scale = normal(place, batch, queries, heads, dim).transpose(1, 2), dim**-0.5
    out = torch.empty(batch, queries, heads, dim, dtype=DTYPE, device=place.device)
    ours = [functools.partial(launch, q, *cache, start, Scoring(scale), bits, group, out) for cache in caches]
    candidates = {f"{splits} splits": [functools.partial(launch, q, *cache, start, Scoring(scale), bits, group, out,
                                                         splits) for cache in caches]
                  for splits in (whole_waves(place, batch * kv_heads) if queries == 1 else ())}

    def want() -> torch.Tensor:
        k, v = (kv_append_q.unpack(cache, dim, bits, group) for cache in caches[0])
        return attention.reference(q, k, v, start, scale, dtype=torch.float32)

    flops = 4 * batch * heads * dim * sum(range(context - queries + 1, context + 1))
    return Work(f"B={batch} {heads}/{kv_heads} heads of {dim}, {queries} of {context}, kv{bits}", ours,
                checked(ours[0], out, want), LIMITS[DTYPE], nbytes, flops,
                aims=(Aim("bandwidth", 0.7),) if queries == 1 < parts else (), candidates=candidates)  # fmt: skip


def expanded_work(place: Place, heads: int, queries: int, bits: int, rank: int = 512, rotated: int = 64) -> Work:
    """Keys of 192 numbers and values of 128, made of rows of latents, as they are or packed; absorbed as a rival."""
    from forebay.kernels.attention.expanded_attention.gpu import bind_expanded_attention
    from forebay.kernels.attention.prefill_attention.gpu import bind_prefill_attention

    heads, queries, made, width = place.size(heads, 2), place.size(queries, 37), 128, rank + rotated
    codes = RowCodes(bits, row_sizes.cache_group_size(width, bits)) if bits else RowCodes()
    values = normal(place, 1, 1, queries, width)
    rows = kv_append_q.pack(values, *codes) if bits else values
    up = normal(place, heads, 2 * made, rank, scale=rank**-0.5)
    q = normal(place, 1, queries, heads, made + rotated).transpose(1, 2)
    start, scoring = torch.zeros(1, dtype=torch.int64, device=place.device), Scoring((made + rotated) ** -0.5)
    out = torch.empty(1, queries, heads, made, dtype=DTYPE, device=place.device)
    absorbed = normal(place, 1, queries, heads, width).transpose(1, 2)
    rival = bind_prefill_attention(absorbed, values, values, start, scoring, torch.empty_like(absorbed.transpose(1, 2)))
    ours = bind_expanded_attention(q, rows, rows, start, scoring, up, made, out, codes)

    def want() -> torch.Tensor:
        return expanded.reference(q, rows, rows, start, scoring, up, made, codes, torch.float32)

    flops = 2 * heads * queries * (rank * 2 * made + (queries + 1) // 2 * (2 * made + rotated))
    return Work(f"{heads} heads, {queries} queries, {f'kv{bits}' if bits else 'native'}", [ours],
                checked(ours, out, want), LIMITS[DTYPE], rows.nbytes + up.nbytes + q.nbytes + out.nbytes, flops,
                {"absorbed": [rival]})  # fmt: skip


def cases(tiny: bool) -> list[Case]:
    """Llama-3-8B at one and at 16 sequences, and OPT-30B, at 16384 positions; prompts of Llama-3-8B; last of each op,
    lengths and widths that fill no tile."""
    decode = functools.partial(decode_work, context=16384)
    prefill = functools.partial(prefill_work, heads=32, kv_heads=8, queries=2048)
    packed = functools.partial(attention_q_work, heads=32, kv_heads=8)
    kinds = ((0, 0.0), (512, 0.0), (0, 30.0))
    return [
        *(Case("decode_attention", functools.partial(decode, batch=b, heads=32, kv_heads=8)) for b in (1, 16)),
        Case("decode_attention", functools.partial(decode, batch=2, heads=56, kv_heads=56)),
        Case("decode_attention", functools.partial(decode_work, batch=3, heads=24, kv_heads=8, context=4099)),
        *(Case("decode_attention", functools.partial(decode, batch=1, heads=h, kv_heads=1, dim=576))
          for h in (128, 16)),
        *(Case("prefill_attention", functools.partial(prefill, window=w, softcap=c)) for w, c in kinds),
        Case("prefill_attention", functools.partial(prefill_work, heads=24, kv_heads=8, queries=2011, window=509,
                                                    softcap=0.0)),
        *(Case("attention_q", functools.partial(packed, bits=bits, batch=b, context=c, queries=s))
          for bits in row_sizes.BITS for b, c, s in ((1, 16384, 1), (16, 16384, 1), (1, 2048, 2048))),
        *(Case("attention_q", functools.partial(attention_q_work, bits=bits, batch=1, heads=h, kv_heads=1,
                                                context=16384, queries=1, dim=576))
          for bits in row_sizes.BITS for h in (128, 16)),
        *(Case("expanded_attention", functools.partial(expanded_work, heads=128, queries=2048, bits=bits))
          for bits in (0, 8)),
    ]  # fmt: skip
