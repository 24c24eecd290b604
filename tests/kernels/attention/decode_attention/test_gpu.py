"""Decode attention in Triton, interpreted, against the definition in float64."""

from __future__ import annotations

import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")

from kernels_blocks import LIMIT, FilledCache, fill_cache, relative_error

from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.decode_attention import decode_shares, gpu
from forebay.kernels.attention.decode_attention import reference as decode_attention
from forebay.kernels.attention.scoring import SYNCHRONISED, Scoring, SoftmaxRange
from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.gpu_support.scratch import scratch_of

RANGE = {torch.float16: SoftmaxRange(0.0, -9.0, 11.0), torch.bfloat16: SoftmaxRange(0.0, -60.0, 60.0)}
SAFE = SYNCHRONISED


def run(
    cache: FilledCache, q: torch.Tensor, scores: SoftmaxRange = SAFE, window: int = 0,
    softcap: float = 0.0, splits: int | None = 3,
) -> torch.Tensor:  # fmt: skip
    out = torch.full_like(q, math.nan)
    scale = q.shape[-1] ** -0.5
    scoring = Scoring(scale, window, softcap)
    gpu.decode_attention(q, cache.pool, cache.table, cache.lengths, cache.layout, scoring, scores, out, splits)
    return out


def expected(cache: FilledCache, q: torch.Tensor, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5
    return decode_attention.reference(q, cache.pool, cache.table, cache.lengths, cache.layout, scale, window, softcap)


def queries(cache: FilledCache, heads: int, seed: int = 1) -> torch.Tensor:
    shape = (len(cache.lengths), heads, cache.layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(cache.layout.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("format", "heads", "kv_heads", "dim", "tokens"),
    [("native", 5, 1, 80, 64), ("native", 4, 2, 64, 16), ("block8", 3, 1, 80, 32), ("block4", 4, 2, 64, 64),
     ("block4", 2, 2, 24, 16)],
)  # fmt: skip
def test_matches_the_definition(
    dtype: torch.dtype, format: str, heads: int, kv_heads: int, dim: int, tokens: int
) -> None:
    cache = fill_cache(BlockLayout(tokens, kv_heads, dim, format, dtype), [2 * tokens + 9, 5])
    q = queries(cache, heads)
    ranges = ((RANGE[dtype], 0, 0.0), (SAFE, 0, 0.0), (RANGE[dtype], 11, 3.0), (RANGE[dtype], -10, 0.0))
    for scores, window, softcap in ranges:
        found = run(cache, q, scores, window, softcap)
        assert relative_error(found, expected(cache, q, window, softcap)) <= LIMIT[dtype]


def test_many_query_heads_and_a_single_share() -> None:
    cache = fill_cache(BlockLayout(16, 1, 32, "native", torch.float16), [37])
    q = queries(cache, 71)
    assert relative_error(run(cache, q, RANGE[torch.float16], splits=1), expected(cache, q)) <= 1e-3


@pytest.mark.parametrize("format", ["native", "block4"])
def test_scores_out_of_range_are_computed_again(format: str) -> None:
    """Scores up to about 120, where exp in fp16 is infinite from 11.1 on; some rows and shares, not all, overflow."""
    cache = fill_cache(BlockLayout(64, 1, 32, format, torch.float16), [150, 70], strength=30.0)
    q = queries(cache, 4)
    q[:, 1] *= 0.01
    found = run(cache, q, SoftmaxRange(0.0, -9.0, 11.0))
    # Beside K and V in the dtype they are multiplied in: a rounding of K moves scores of 120 by 0.03.
    k, v = paged.read(cache.pool, cache.layout, cache.table, torch.float16)
    wanted = attention.reference(q[:, :, None], k, v, cache.lengths - 1, 32**-0.5)[:, 0]
    assert relative_error(found, wanted) <= 1e-3
    with_the_range_ignored = run(cache, q, SoftmaxRange(0.0, -1e4, 1e4))
    assert not with_the_range_ignored[:, 0].isfinite().all(), "the inputs do not overflow: the test shows nothing"
    assert torch.equal(with_the_range_ignored[:, 1], found[:, 1])


def test_scores_far_below_the_maximum_are_computed_again() -> None:
    """phi = 40 above every score: exp(x - phi) is 0 in fp16."""
    cache = fill_cache(BlockLayout(64, 1, 32, "native", torch.float16), [100])
    q = queries(cache, 2)
    assert relative_error(run(cache, q, SoftmaxRange(40.0, -9.0, 11.0)), expected(cache, q)) <= 1e-3
    assert not run(cache, q, SoftmaxRange(40.0, -1e4, 1e4)).abs().max() > 0, "without the check the sums underflow"


def test_a_row_is_computed_again_alone() -> None:
    """Rows inside the range have the same bits whether or not their neighbours leave it."""
    cache = fill_cache(BlockLayout(64, 1, 32, "native", torch.float16), [100])
    q = queries(cache, 3)
    calm = run(cache, q, RANGE[torch.float16])
    q[:, 2] *= 1000
    assert torch.equal(run(cache, q, RANGE[torch.float16])[:, :2], calm[:, :2])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("scores", [SAFE, RANGE[torch.bfloat16]], ids=["synchronised", "unified"])
def test_nan_and_infinity_do_as_torch(value: float, where: str, scores: SoftmaxRange) -> None:
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(1, 1, 40, 16, generator=generator).bfloat16() for _ in range(2))
    q = torch.rand(1, 2, 16, generator=generator).bfloat16() + 0.1  # positive: q . inf has one sign
    if where == "q":
        q[0, 0, 3] = value
        k[..., 3] = k[..., 3].abs() + 0.1
    else:
        (k if where == "k" else v)[0, 0, 7, 5] = value
    out = torch.full_like(q, 7.0)
    gpu.decode_attention_contiguous(q, k, v, torch.tensor([39]), Scoring(0.25), out, scores, splits=2)
    wanted = attention.reference(q[:, :, None], k, v, torch.tensor([39]), 0.25, dtype=torch.float32)[:, 0]
    assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.isposinf(), wanted.isposinf())
    assert torch.equal(out.isneginf(), wanted.isneginf())
    finite = wanted.isfinite()
    assert torch.allclose(out[finite].float(), wanted[finite], atol=0.02)


def test_an_empty_sequence_gives_zeros() -> None:
    cache = fill_cache(BlockLayout(16, 1, 16, "native", torch.float16), [20, 3])
    cache.lengths[1] = 0
    found = run(cache, queries(cache, 2), RANGE[torch.float16])
    assert found[0].isfinite().all() and not found[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_contiguous_caches_of_any_strides(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(2, 50, 2, 24, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))
    q = torch.randn(2, 24, 6, generator=generator).to(dtype).mT.contiguous()
    start = torch.tensor([49, 0])
    for window in (0, 13):
        out = torch.full_like(q, math.nan)
        gpu.decode_attention_contiguous(q, k, v, start, Scoring(0.3, window), out)
        wanted = attention.reference(q[:, :, None], k, v, start, 0.3, window)[:, 0]
        assert relative_error(out, wanted) <= LIMIT[dtype]


def test_bad_arguments_are_named_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = fill_cache(BlockLayout(16, 2, 16, "native", torch.float16), [20])
    monkeypatch.setattr(gpu, "bind_view", lambda *args: pytest.fail("launched"))
    good = queries(cache, 4)

    def call(q: torch.Tensor = good, **changed: object) -> None:
        values = {"pool": cache.pool, "table": cache.table, "lengths": cache.lengths, "layout": cache.layout} | changed
        gpu.decode_attention(q, *values.values(), Scoring(1.0), SAFE, torch.empty_like(q))  # type: ignore[arg-type]

    for name, wrong in (
        ("q", lambda: call(good.bfloat16())),
        ("q", lambda: call(good[0])),
        ("q", lambda: call(good.mT.contiguous().mT)),
        ("kv_heads", lambda: call(good[:, :3])),
        ("lengths", lambda: call(lengths=cache.lengths.int())),
        ("table", lambda: call(table=cache.table.long())),
        ("pool", lambda: call(pool=cache.pool[:, :-16])),
        ("block_tokens", lambda: call(layout=BlockLayout(8, 2, 16, "native", torch.float16))),
        ("format", lambda: call(layout=BlockLayout(16, 2, 16, "kv2", torch.float16))),
    ):
        with pytest.raises(ValueError, match=f"^decode_attention: {name} "):
            wrong()


def test_shares_are_no_shorter_than_their_results_allow() -> None:
    assert decode_shares.split_count(8, 16384, 64, decode_shares.part_nbytes(4, 128), 512, 132) * 8 >= 132
    assert decode_shares.split_count(1, 100, 64, decode_shares.part_nbytes(1, 64), 256, 132) == 1
    assert decode_shares.split_count(4096, 16384, 64, decode_shares.part_nbytes(1, 128), 512, 132) == 1


def test_one_sequence_fills_the_chip_as_far_as_its_shares_pay() -> None:
    part = decode_shares.part_nbytes(4, 128)
    for capacity, wanted in ((1024, 6), (2048, 12), (4096, 16), (8192, 32)):  # of 8 KV heads; 256 positions in the last
        assert decode_shares.split_count(8, capacity, 64, part, 512, 132) == wanted
        assert wanted > 16 or 2 * wanted * part * 20 <= capacity * 512
    assert 8 * 16 <= 132 < 8 * 17
    assert decode_shares.split_count(64, 2048, 64, part, 512, 132) == 8, "eight sequences"


@pytest.mark.parametrize("scores", [SAFE, RANGE[torch.float16]], ids=["synchronised", "unified"])
@pytest.mark.parametrize("splits", [13, 20], ids=["by the last share", "by a kernel"])
def test_shares_are_merged_and_counters_left_as_they_were_found(scores: SoftmaxRange, splits: int) -> None:
    """More shares than are taken at a time, of unequal sequences, several runs over one scratch."""
    cache = fill_cache(BlockLayout(16, 1, 16, "native", torch.float16), [300, 3])
    q = queries(cache, 65)  # more programs than one to a share
    held = scratch_of(torch.device("cpu"), 0)
    for window in (0, 30):
        assert relative_error(run(cache, q, scores, window, splits=splits), expected(cache, q, window)) <= 1e-3
    assert held.counters.numel() >= 2 * 65 and not held.counters.any()
    cache.lengths[1] = 0
    assert not run(cache, q, scores, splits=splits)[1].any()
