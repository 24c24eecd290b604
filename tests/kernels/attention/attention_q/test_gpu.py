"""Attention over packed rows in Triton, interpreted, against the definition in float64."""

from __future__ import annotations

import math
import os
import random

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from selection import ALL
from torch import Tensor

pytest.importorskip("triton")

from filled_caches import LIMIT, native_cache, packed_cache, relative_error

from forebay.kernels import operators
from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.attention_q import gpu
from forebay.kernels.attention.attention_q import reference as attention_q
from forebay.kernels.attention.attention_q.operator import ATTENTION_Q
from forebay.kernels.attention.costs import gpu_workspace_nbytes
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes
from forebay.kernels.gpu_support import cache_rows
from forebay.kernels.operator import Tensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def made(ends: list[int], kv_heads: int, dim: int, bits: int, group: int) -> tuple[Tensor, Tensor]:
    cache = packed_cache(tuple(ends), kv_heads, dim, bits, group)
    return cache.k, cache.v


def queries(ends: list[int], heads: int, new: int, dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(heads + new)
    return torch.randn(len(ends), new, heads, dim, generator=generator).to(dtype).transpose(1, 2)


def run(q: Tensor, k: Tensor, v: Tensor, start: Tensor, window: int, softcap: float, bits: int, group: int) -> Tensor:
    batch, heads, new, dim = q.shape
    wide = torch.full((batch, new, heads, dim + 6), 7.0, dtype=q.dtype)
    out = wide[..., :dim].fill_(math.nan)
    gpu.attention_q(q, k, v, start, Scoring(dim**-0.5, window, softcap), bits, group, out)
    assert (wide[..., dim:] == 7).all()
    return out


SHAPES = [(6, 2, 64, 4, 32, 0, 0.0), (2, 1, 128, 8, 64, 0, 0.0), (2, 2, 80, 4, 40, 19, 4.0), (4, 1, 64, 8, 64, 13, 0.0),
          (2, 1, 128, 4, 32, 0, 5.0), (3, 1, 96, 8, 48, 0, 0.0), (2, 2, 37, 4, 12, 0, 0.0), (2, 1, 64, 4, 32, -7, 0.0),
          (4, 2, 64, 8, 64, -40, 2.0)]
# each shape with both numbers of new tokens, the first with each dtype, others with one; FOREBAY_TEST_ALL=1: all
CASES = [(*shape, new, dtype) for i, shape in enumerate(SHAPES) for k, new in enumerate((1, 11)) for dtype in (
    DTYPES if i == 0 or ALL else [DTYPES[(i + k) % 3]])]


@pytest.mark.parametrize("splits", (1, 3, 18))
def test_a_sequence_in_any_number_of_shares(splits: int) -> None:
    """Merged by the last share to arrive, or by a kernel; shares without a tile give nothing."""
    q, (k, v), start = queries([85, 1], 6, 1, 64, torch.float16), made([85, 1], 2, 64, 4, 32), torch.tensor([84, 0])
    out = torch.full((2, 1, 6, 64), math.nan, dtype=torch.float16)
    gpu.attention_q(q, k, v, start, Scoring(0.125), 4, 32, out, splits)
    assert relative_error(out, attention_q.reference(q, k, v, start, 0.125, 0, 0.0, 4, 32)) <= LIMIT[torch.float16]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "bits", "group", "window", "softcap", "new", "dtype"), CASES
)  # fmt: skip
def test_matches_the_definition(
    heads: int, kv_heads: int, dim: int, bits: int, group: int, window: int, softcap: float, new: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    ends = [85, new]
    q, (k, v) = queries(ends, heads, new, dim, dtype), made(ends, kv_heads, dim, bits, group)
    start = torch.tensor(ends) - new
    found = run(q, k, v, start, window, softcap, bits, group)
    wanted = attention_q.reference(q, k, v, start, dim**-0.5, window, softcap, bits, group)
    assert not wanted.isnan().any()
    assert relative_error(found, wanted) <= LIMIT[dtype]


@pytest.mark.parametrize(("dim", "group", "windows"), [(64, 32, (0, 90, -300)), (80, 40, (90,))])
def test_a_long_sequence_is_split(dim: int, group: int, windows: tuple[int, ...]) -> None:
    """The shares of a sequence, each of rotated rows, merged; the second sequence leaves some without a position."""
    ends = [1100, 200]
    q, (k, v) = queries(ends, 2, 1, dim, torch.float16), made(ends, 1, dim, 4, group)
    start = torch.tensor(ends) - 1
    assert gpu.decode_attention.decode_shares.split_count(2, k.shape[2], 64, 4 * 2 * (dim + 2), 2 * k.shape[3], 132) > 1
    for window in windows:
        found = run(q, k, v, start, window, 0.0, 4, group)
        wanted = attention_q.reference(q, k, v, start, dim**-0.5, window, 0.0, 4, group)
        assert relative_error(found, wanted) <= LIMIT[torch.float16]


@pytest.mark.parametrize("hopper", (True, False))
@pytest.mark.parametrize(("bits", "dim"), [(8, 192), (4, 192), (8, 160), (4, 160), (8, 144)])
def test_rows_of_three_chunks(bits: int, dim: int, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, heads, windows, limits of scores and shares by chance, as Hopper and GPUs before it take them."""
    draw, group = random.Random(dim + bits + hopper), row_sizes.cache_group_size(dim, bits)
    monkeypatch.setattr(gpu.decode_attention, "before_hopper", lambda device: not hopper)
    dtype, kv_heads, group_heads = draw.choice(DTYPES[:2]), draw.choice((1, 2)), draw.choice((5, 12, 17))
    assert gpu.decode_attention.decode_shares.product(dim, group, bits, 2, group_heads, False, hopper).wide
    ends = [draw.randint(1, 12), draw.randint(60, 160)]
    window, softcap = draw.choice((0, draw.randint(1, 150), -draw.randint(1, 150))), draw.choice((0.0, 3.0))
    k, v = made(ends, kv_heads, dim, bits, group)
    q, start = queries(ends, kv_heads * group_heads, 1, dim, dtype), torch.tensor(ends) - 1
    wanted = attention_q.reference(q, k, v, start, dim**-0.5, window, softcap, bits, group)
    for splits in (None, draw.randint(1, 8)):
        out = torch.full((2, 1, q.shape[1], dim), math.nan, dtype=dtype)
        gpu.attention_q(q, k, v, start, Scoring(dim**-0.5, window, softcap), bits, group, out, splits)
        assert relative_error(out, wanted) <= LIMIT[dtype], (ends, group_heads, window, softcap, splits)


@pytest.mark.covering(1)
@pytest.mark.parametrize("new", (1, 20))
@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("where", ("q", "k", "v"))
def test_nan_and_infinity_do_as_torch(where: str, value: float, new: int) -> None:
    """Infinity that was stored reads as NaN, as does what shares its block of a rotation."""
    ends = [20]
    q, (k, v) = queries(ends, 1, new, 64, torch.bfloat16), made(ends, 1, 64, 4, 32)
    if where == "q":
        q[0, 0, -1, 5] = value
    else:
        x = torch.randn(64)
        x[5] = value
        (k if where == "k" else v)[0, 0, 7] = kv_append_q.pack(x, 4, 32)
    start = torch.tensor(ends) - new
    found = run(q, k, v, start, 0, 0.0, 4, 32)
    unpacked = (kv_append_q.unpack(cache, 64, 4, 32) for cache in (k, v))
    wanted = attention.reference(q, *unpacked, start, 64**-0.5, dtype=torch.float32)
    # What a query does not see is multiplied by 0 or not at all, as the tiles fall: torch's kernels differ there too.
    seen = slice(7, None) if where == "v" and new > 1 else slice(None)
    assert torch.equal(found[:, seen].isnan(), wanted[:, seen].isnan()) and wanted.isnan().any()
    finite = wanted.isfinite()
    assert torch.allclose(found[finite].float(), wanted[finite], atol=0.03)


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_rows_of_latents(value: float) -> None:
    """Several queries attend to rows that are unpacked before; a row that is not finite reaches those that see it."""
    ends, (dim, bits, group) = [20, 4], (284, 8, 60)  # rows whose values are no multiple of 16 bytes
    k, _ = made(ends, 1, dim, bits, group)
    q, start = queries(ends, 3, 4, dim, torch.bfloat16), torch.tensor([16, 0])
    wanted = attention_q.reference(q, k, k, start, dim**-0.5, 0, 0.0, bits, group)
    assert relative_error(run(q, k, k, start, 0, 0.0, bits, group), wanted) <= LIMIT[torch.bfloat16]
    other = k.clone()  # keys and values apart
    assert relative_error(run(q, k, other, start, 0, 0.0, bits, group), wanted) <= LIMIT[torch.bfloat16]
    k[0, 0, 18] = kv_append_q.pack(torch.full((dim,), value), bits, group)
    assert run(q, k, k, start, 0, 0.0, bits, group)[0, 2:].isnan().all()
    one = run(q[:, :, :1], k, k, torch.tensor([18, 2]), 0, 0.0, bits, group)
    assert one[0].isnan().all() and one[1].isfinite().all()


@pytest.mark.parametrize(("dim", "bits", "new"), [(64, 4, 1), (128, 8, 1), (112, 4, 1), (80, 8, 1), (576, 8, 1),
                                                  (576, 4, 1), (576, 8, 5), (288, 8, 5), (192, 8, 1),
                                                  (192, 4, 1)])
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_what_a_call_takes_is_counted(
    monkeypatch: pytest.MonkeyPatch, dim: int, bits: int, new: int, dtype: torch.dtype
) -> None:
    """Shares of a decode step, or values of latent rows."""
    if dim > 256 and dtype == torch.float32:
        pytest.skip("rows of more than 256 values are in 16 bits")
    group, row = row_sizes.cache_group_size(dim, bits), row_sizes.cache_row_nbytes(dim, bits)
    heads = 12 if dim == 192 else 4
    q, cache = torch.zeros(1, heads, new, dim, dtype=dtype), torch.zeros(1, 1, 2048, row, dtype=torch.uint8)
    call = gpu.bind_attention_q(q, cache, cache, torch.zeros(1, dtype=torch.int64), Scoring(1.0), bits, group,
                                torch.empty(1, new, heads, dim, dtype=dtype))  # fmt: skip
    taken, empty = [], torch.empty

    def counted(*shape: int, **options: object) -> Tensor:
        taken.append(empty(*shape, **options))  # type: ignore[call-overload]
        return taken[-1]

    monkeypatch.setattr(torch, "empty", counted)
    call()
    monkeypatch.undo()
    nbytes = sum(t.nbytes for t in taken)
    assert nbytes > 4 * heads * (dim + 2)  # more than one share
    assert nbytes <= gpu_workspace_nbytes(Tensors((q, cache, cache), {}, ()), bits, group) <= nbytes + (64 << 10)


def test_loads_are_as_wide_as_rows_permit() -> None:
    def unit(dim: int, bits: int) -> int:
        rows = torch.empty(2, 3, 5, row_sizes.cache_row_nbytes(dim, bits), dtype=torch.uint8)
        return cache_rows.packed_view(rows, rows, dim, bits, row_sizes.cache_group_size(dim, bits)).unit

    assert [unit(dim, 4) for dim in (64, 80, 128, 256)] == [8, 16, 16, 16]
    assert [unit(dim, 8) for dim in (64, 80, 128, 256)] == [4, 8, 8, 16]


@pytest.mark.parametrize("new", (1, 3))
@pytest.mark.parametrize(
    ("index", "argument", "wrong"),
    [(0, "q", lambda x: x.double()), (0, "q", lambda x: torch.stack((x, x), -1)[..., 0]),
     (1, "k_cache", lambda x: x[..., :-4]),
     (2, "v_cache", lambda x: x[:, :, 1:]), (3, "start", lambda x: x.int()),
     (1, "k_cache", lambda x: x.new_zeros(x.numel() + 2)[2:].view(x.shape)), (7, "out", lambda x: x[:, :, :1])],
)  # fmt: skip
def test_bad_arguments_are_named_before_a_launch(index: int, argument: str, wrong: object, new: int) -> None:
    k, v = made([9], 2, 64, 4, 32)
    q = queries([9], 4, new, 64, torch.float16)
    args: list = [q, k, v, torch.tensor([5]), Scoring(1.0), 4, 32, torch.empty(1, new, 4, 64, dtype=q.dtype)]
    args[index] = wrong(args[index])  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"^attention_q: {argument} "):
        gpu.bind_attention_q(*args)


@pytest.mark.parametrize("bits", (0, 4))
def test_a_range_reaches_the_kernel(bits: int) -> None:
    """By phi = 40, with nothing computed again, sums underflow to zero; with a range that holds, the result is that of
    the synchronised softmax. Many queries take no heed of it."""
    cache = packed_cache((40,), 1, 64, 4) if bits else native_cache((40,), 1, 64, torch.float16)
    for new in (1, 3):
        q = queries([40], 2, new, 64, torch.float16)
        start, out = torch.tensor([40 - new]), torch.empty(1, new, 2, 64, dtype=torch.float16)
        scores = (0.125, 0, 0.0, *((4, cache.group) if bits else ()))
        found = []
        for softmax in ((), (0.0, 0.0, 0.0), (0.0, -9.0, 11.0), (40.0, -1e4, 1e4)):
            operator = ATTENTION_Q if bits else operators.ATTENTION
            operator.bind["cuda"](Tensors((q, cache.k, cache.v, start, *scores, *softmax), {}, (out,)))()
            found.append(out.clone())
        assert torch.equal(found[0], found[1]) and relative_error(found[2], found[0]) <= 1e-3
        assert found[3].any() == (new > 1)
