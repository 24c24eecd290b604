"""Decode attention in Triton, interpreted, against the definition in float64."""

from __future__ import annotations

import math
import os
from dataclasses import replace

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from selection import ALL

pytest.importorskip("triton")

from filled_caches import LIMIT, FilledCache, decode, native_cache, packed_cache, relative_error

from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.decode_attention import decode_shares, gpu
from forebay.kernels.attention.scoring import HELD, SYNCHRONISED, Scoring, SoftmaxRange
from forebay.kernels.gpu_support.scratch import scratch_of

RANGE = {dtype: SoftmaxRange(0.0, *held) for dtype, held in HELD.items()}
SAFE = SYNCHRONISED


def filled(
    ends: tuple[int, ...], kv_heads: int, dim: int, dtype: torch.dtype, bits: int, strength: float = 1.0
) -> FilledCache:
    if bits:
        return packed_cache(ends, kv_heads, dim, bits, strength=strength)
    return native_cache(ends, kv_heads, dim, dtype, strength)


SHAPES = [(0, 5, 1, 80, 137), (0, 4, 2, 64, 41), (8, 3, 1, 80, 73), (4, 4, 2, 64, 137), (4, 2, 2, 24, 41)]
# each kind of rows with both dtypes; FOREBAY_TEST_ALL=1: each shape
CASES = [(*shape, dtype) for i, shape in enumerate(SHAPES) for k, dtype in enumerate((torch.float16, torch.bfloat16))
         if ALL or i == 2 or i % 2 == k]


@pytest.mark.parametrize(("bits", "heads", "kv_heads", "dim", "length", "dtype"), CASES)
def test_matches_the_definition(
    bits: int, heads: int, kv_heads: int, dim: int, length: int, dtype: torch.dtype
) -> None:
    cache = filled((length, 5), kv_heads, dim, dtype, bits)
    q = cache.queries(heads, dtype)
    ranges = ((RANGE[dtype], 0, 0.0), (SAFE, 0, 0.0), (RANGE[dtype], 11, 3.0), (RANGE[dtype], -10, 0.0))
    first = CASES.index((bits, heads, kv_heads, dim, length, dtype)) % 2  # the next case has the other two
    for scores, window, softcap in ranges if ALL else ranges[first::2]:
        found = decode(cache, q, scores, window, softcap)
        assert relative_error(found, cache.expected(q, window, softcap)) <= LIMIT[dtype]


@pytest.mark.parametrize(
    ("bits", "dim", "heads", "dtype", "same"),
    [(0, 576, 70, torch.bfloat16, True), (0, 576, 5, torch.float16, False), (0, 288, 17, torch.float16, True),
     (0, 512, 3, torch.bfloat16, False), (8, 576, 17, torch.bfloat16, True), (4, 576, 3, torch.float16, True),
     (8, 288, 3, torch.float16, True), (4, 320, 5, torch.bfloat16, False)],
)
def test_rows_of_more_than_256_values(bits: int, dim: int, heads: int, dtype: torch.dtype, same: bool) -> None:
    """Of one part and of two, and latents, which are keys and values; what nobody wrote, NaN, follows each sequence.
    Packed rows have groups of 64, 32 and 60 values."""
    cache = filled((37, 5), 1, dim, dtype, bits)
    cache = replace(cache, v=cache.k) if same else cache
    q = cache.queries(heads, dtype)
    window, softcap = (11, 0.0) if same else (0, 3.0)
    found = decode(cache, q, RANGE[dtype], window, softcap, splits=2)
    assert relative_error(found, cache.expected(q, window, softcap)) <= LIMIT[dtype]


def test_shares_of_latents_keep_every_multiprocessor_busy_and_are_counted() -> None:
    """Their results are large beside the rows: by the rule of other rows one sequence would have a share or two."""
    dim, heads = 576, 128
    product = decode_shares.product(dim, dim, 0, 2, heads, amd=False)
    for batch, capacity, wanted in ((1, 16384, 66), (1, 1024, 8), (1, 60, 1), (8, 16384, 8), (200, 16384, 1)):
        shape = decode_shares.DecodeShape(batch, capacity, 2 * dim, heads, dim, 1024, 2, 0)
        assert decode_shares.share_count(shape, product, 132) == wanted
        counted = decode_shares.workspace_nbytes(batch, heads, 1, capacity, dim, 2, 132)
        assert counted - decode_shares.counters_nbytes(batch, heads) == batch * wanted * heads * 4 * (dim + 2)


def test_many_query_heads_and_a_single_share() -> None:
    cache = native_cache((37,), 1, 32, torch.float16)
    q = cache.queries(71, torch.float16)
    assert relative_error(decode(cache, q, RANGE[torch.float16], splits=1), cache.expected(q)) <= 1e-3


@pytest.mark.parametrize(("bits", "dim"), [(0, 32), (4, 32), (4, 64)], ids=["native", "dequantized", "codes"])
def test_scores_out_of_range_are_computed_again(bits: int, dim: int) -> None:
    """Scores up to about 120, where exp in fp16 is infinite from 11.1 on; some rows and shares, not all, overflow."""
    cache = filled((150, 70), 1, dim, torch.float16, bits, strength=30.0)
    q = cache.queries(4, torch.float16)
    q[:, 1] *= 0.01
    found = decode(cache, q, SoftmaxRange(0.0, -9.0, 11.0))
    # A rounding of q, which is rotated, or of K moves scores of 120 by 0.03.
    assert relative_error(found, cache.expected(q, values=torch.float16)) <= (6e-3 if bits else 1e-3)
    with_the_range_ignored = decode(cache, q, SoftmaxRange(0.0, -1e4, 1e4))
    assert not with_the_range_ignored[:, 0].isfinite().all(), "the inputs do not overflow: the test shows nothing"
    assert torch.equal(with_the_range_ignored[:, 1], found[:, 1])


@pytest.mark.parametrize("bits", [0, 4])
def test_scores_far_below_the_maximum_are_computed_again(bits: int) -> None:
    """phi = 40 above every score: exp(x - phi) is 0 in fp16."""
    cache = filled((100,), 1, 64, torch.float16, bits)
    q = cache.queries(2, torch.float16)
    assert relative_error(decode(cache, q, SoftmaxRange(40.0, -9.0, 11.0)), cache.expected(q)) <= 1e-3
    assert not decode(cache, q, SoftmaxRange(40.0, -1e4, 1e4)).abs().max() > 0, "without the check the sums underflow"


def test_a_row_is_computed_again_alone() -> None:
    """Rows inside the range have the same bits whether or not their neighbours leave it."""
    cache = native_cache((100,), 1, 32, torch.float16)
    q = cache.queries(3, torch.float16)
    calm = decode(cache, q, RANGE[torch.float16])
    q[:, 2] *= 1000
    assert torch.equal(decode(cache, q, RANGE[torch.float16])[:, :2], calm[:, :2])


@pytest.mark.covering(1)
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
    gpu.bind_decode_attention_contiguous(q, k, v, torch.tensor([39]), Scoring(0.25), out, scores, splits=2)()
    wanted = attention.reference(q[:, :, None], k, v, torch.tensor([39]), 0.25, dtype=torch.float32)[:, 0]
    assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.isposinf(), wanted.isposinf())
    assert torch.equal(out.isneginf(), wanted.isneginf())
    finite = wanted.isfinite()
    assert torch.allclose(out[finite].float(), wanted[finite], atol=0.02)


def test_an_empty_sequence_gives_zeros() -> None:
    cache = native_cache((20, 0), 1, 16, torch.float16)
    found = decode(cache, cache.queries(2, torch.float16), RANGE[torch.float16])
    assert found[0].isfinite().all() and not found[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_contiguous_caches_of_any_strides(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(2, 50, 2, 24, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))
    q = torch.randn(2, 24, 6, generator=generator).to(dtype).mT.contiguous()
    start = torch.tensor([49, 0])
    for window in (0, 13):
        out = torch.full_like(q, math.nan)
        gpu.bind_decode_attention_contiguous(q, k, v, start, Scoring(0.3, window), out)()
        wanted = attention.reference(q[:, :, None], k, v, start, 0.3, window)[:, 0]
        assert relative_error(out, wanted) <= LIMIT[dtype]


def test_bad_arguments_are_named_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "bind_view", lambda *args: pytest.fail("launched"))
    cache = native_cache((20,), 2, 16, torch.float16)
    good = cache.queries(4, torch.float16)

    def call(q: torch.Tensor = good, out: torch.Tensor | None = None, **changed: torch.Tensor) -> None:
        values = {"k": cache.k, "v": cache.v, "start": cache.start} | changed
        out = torch.empty_like(q) if out is None else out
        gpu.bind_decode_attention_contiguous(q, *values.values(), Scoring(1.0), out)()

    for name, wrong in (
        ("k", lambda: call(good.bfloat16())),
        ("q", lambda: call(good[0])),
        ("q", lambda: call(good.mT.contiguous().mT)),
        ("q", lambda: call(good.new_zeros(1, 4, 641))),
        ("q", lambda: call(good.new_zeros(1, 4, 257).float())),
        ("kv_heads", lambda: call(good[:, :3])),
        ("start", lambda: call(start=cache.start.int())),
        ("start", lambda: call(start=cache.start[:0])),
        ("k", lambda: call(k=cache.k[0])),
        ("v", lambda: call(v=cache.v[:, :, 1:])),
        ("out", lambda: call(out=good[:, :3])),
    ):
        with pytest.raises(ValueError, match=f"^attention: {name} "):
            wrong()


def test_shares_are_no_shorter_than_their_results_allow() -> None:
    assert decode_shares.split_count(8, 16384, 64, decode_shares.part_nbytes(4, 128), 512, 132) * 8 >= 132
    assert decode_shares.split_count(1, 100, 64, decode_shares.part_nbytes(1, 64), 256, 132) == 1
    assert decode_shares.split_count(4096, 16384, 64, decode_shares.part_nbytes(1, 128), 512, 132) == 1


def test_one_sequence_fills_the_chip_as_far_as_its_shares_pay() -> None:
    part = decode_shares.part_nbytes(4, 128)
    for capacity, wanted in ((1024, 15), (2048, 16), (4096, 32), (8192, 33), (16384, 33)):  # of 8 KV heads: 264
        assert decode_shares.split_count(8, capacity, 64, part, 512, 132, 2) == wanted
        assert 2 * wanted * part * 8 <= capacity * 512
    assert decode_shares.split_count(64, 2048, 64, part, 512, 132, 2) == 8, "eight sequences"


@pytest.mark.parametrize(("bits", "position_nbytes", "resident"), [(0, 512, 2), (4, 160, 3), (8, 288, 2)])
@pytest.mark.parametrize("rows", [1, 8, 64, 128, 300])
def test_shares_fill_waves_of_programs(bits: int, position_nbytes: int, resident: int, rows: int) -> None:
    """The longest row of programs reads no more than with the shares that pay in more waves than one."""
    part = decode_shares.part_nbytes(4, 128)
    assert decode_shares.resident_programs(128, 128, 2, bits) == resident

    def tiles(capacity: int, splits: int) -> int:
        waves = -(-rows * splits // (resident * 132))
        return waves * (-(-capacity // 64 // splits) + 1)

    for capacity in (64, 500, 2048, 4096, 16384, 100_000):
        found = decode_shares.split_count(rows, capacity, 64, part, position_nbytes, 132, resident)
        alone = max(1, min(-(-8 * 132 // rows), capacity // max(256, 48 * part // position_nbytes)))
        assert tiles(capacity, found) <= tiles(capacity, alone)
        assert 16 * part * found <= capacity * position_nbytes or found == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("scores", [SAFE, RANGE[torch.float16]], ids=["synchronised", "unified"])
@pytest.mark.parametrize("splits", [13, 20], ids=["by the last share", "by a kernel"])
def test_shares_are_merged_and_counters_left_as_they_were_found(scores: SoftmaxRange, splits: int) -> None:
    """More shares than are taken at a time, of unequal sequences, several runs over one scratch."""
    cache = native_cache((300, 3), 1, 16, torch.float16)
    q = cache.queries(65, torch.float16)  # more programs than one to a share
    held = scratch_of(torch.device("cpu"), 0)
    for window in (0, 30):
        assert relative_error(decode(cache, q, scores, window, splits=splits), cache.expected(q, window)) <= 1e-3
    assert held.counters.numel() >= 2 * 65 and not held.counters.any()
    emptied = replace(cache, ends=(300, 0))
    assert not decode(emptied, q, scores, splits=splits)[1].any()
