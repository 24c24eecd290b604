"""kv_append_q and attention_q: bits of the packed rows, attention against float64, and what they must refuse."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from torch import Tensor

from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.attention_q import cpu as attention_q_cpu
from forebay.kernels.attention.attention_q import operator as attention_q_operator
from forebay.kernels.attention.attention_q import reference as attention_q_reference
from forebay.kernels.attention.attention_q.operator import ATTENTION_Q
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q import cpu as kv_append_q_cpu
from forebay.kernels.cache.kv_append_q import operator as kv_append_q_operator
from forebay.kernels.cache.kv_append_q import reference as kv_append_q_reference
from forebay.kernels.cache.kv_append_q.operator import KV_APPEND_Q
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.quantization.quantize import reference as quantize

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(start: list[int], new: int, bits: int, dim: int = 20, group: int = 20, dtype: torch.dtype = torch.float32):
    """Strided caches of 0xff, whose scales are NaN, and new K and V as a runtime has them: [B, S, H, D] transposed."""
    torch.manual_seed(0)
    batch, heads, length = len(start), 2, max(start) + new + 3
    nbytes = row_sizes.row_nbytes(dim, bits, group, row_sizes.CACHE_ALIGN)
    caches = torch.full((2, batch, heads, length + 2, nbytes), 0xFF, dtype=torch.uint8)[:, :, :, :length]
    k, v = torch.randn(2, batch, new, heads, dim).to(dtype).transpose(2, 3)
    return *caches.unbind(), k, v, torch.tensor(start), bits, group


@pytest.mark.parametrize("start", ([0], [4, 4, 4], [0, 7, 3]))
@pytest.mark.parametrize("new", (1, 3))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_append_writes_the_bits_of_the_reference(
    path: str, start: list[int], new: int, bits: int, dtype: torch.dtype
) -> None:
    for dim, group in ((20, 20), (37, 12), (64, 64), (3, 4)):
        args = make(start, new, bits, dim, group, dtype)
        args[2][0, 0, 0] = 0  # a constant group, rotated or not
        want = kv_append_q_reference.reference(*args)
        kv_append_q_operator.KV_APPEND_Q.overload(*args)
        assert torch.equal(args[0], want[0]) and torch.equal(args[1], want[1])
        for b, begin in enumerate(start):
            k = args[2][b].float() @ rotation(dim)
            found = packing.unpack_rows(args[0][b, :, begin : begin + new], dim, bits, group, torch.float16)
            got = quantize.dequantize_reference(*found, bits, group, -1, dim)
            step = found[1].float().repeat_interleave(group, -1)[..., :dim]
            if bits == 8:
                assert ((got - k).abs() <= step * (0.5 + 1e-4) + 1e-6).all()
            plain = quantize.reference(k.reshape(-1, dim), bits, group, 1, torch.float16)
            bound = (quantize.dequantize_reference(*plain, bits, group, 1, dim) - k.reshape(-1, dim)).square()
            left = (got.reshape(-1, dim) - k.reshape(-1, dim)).square()
            for i in range(0, dim, group):
                assert (left[:, i : i + group].sum(1) <= bound[:, i : i + group].sum(1) * (1 + 1e-4) + 1e-9).all()


def rotation(dim: int) -> Tensor:
    """What a row is multiplied by before it is quantized: a Hadamard matrix, scaled, in every block."""
    size = next(s for s in (32, 16, 8, 4, 2, 1) if dim % s == 0)
    factor = {1: 1.0, 2: 0.5, 4: 0.5, 8: 0.25, 16: 0.25, 32: 0.125}[size]
    block = torch.from_numpy(scipy.linalg.hadamard(size)).float() * factor
    return torch.block_diag(*[block] * (dim // size))


@pytest.mark.parametrize("dim", (1, 6, 12, 40, 64, 80, 96, 112, 128, 256))
def test_rows_are_rotated_by_orthogonal_blocks(path: str, dim: int) -> None:
    """8-bit rows read back near the original, so what `unpack` undoes is what the rows hold."""
    group = row_sizes.cache_group_size(dim, 8)
    args = make([2], 3, 8, dim, group)
    kv_append_q_operator.KV_APPEND_Q.overload(*args)
    rows = args[1][0, :, 2:5]
    held = quantize.dequantize_reference(*packing.unpack_rows(rows, dim, 8, group, torch.float16), 8, group, -1, dim)
    assert (held - args[3][0] @ rotation(dim)).abs().max() < 0.02
    assert (kv_append_q_reference.unpack(rows, dim, 8, group) - args[3][0]).abs().max() < 0.1


def test_four_bits_bear_a_channel_ten_times_as_large(path: str) -> None:
    """The error of the other channels stays within 0.6 of what groups of plain rows leave, and fitting lowers it."""
    args = make([0], 64, 4, 64, 32)
    k = args[2]
    k[..., [5, 40]] += 12.0
    kv_append_q_operator.KV_APPEND_Q.overload(*args)

    def error(read: Tensor) -> float:
        return (read.view(-1, 64) - k.reshape(-1, 64)).square().mean().item()

    def rounded(x: Tensor) -> Tensor:
        parts = quantize.reference(x.reshape(-1, 64), 4, 32, 1, torch.float16)
        return quantize.dequantize_reference(*parts, 4, 32, 1, 64)

    turn = rotation(64)
    found = error(kv_append_q_reference.unpack(args[0][:, :, :64], 64, 4, 32))
    rotated = error(rounded(k @ turn) @ turn.inverse())
    assert found < 0.6 * error(rounded(k)) and found < 0.95 * rotated


def test_what_cannot_be_held_reads_back_as_nan(path: str) -> None:
    """A rotation spreads it over its block of 32."""
    args = make([0], 4, 8, dim=64, group=32)
    k = args[2]
    k[0, 0, 0, 1], k[0, 0, 1, 2], k[0, 1, 2, 45], k[0, 1, 3, 0] = torch.nan, torch.inf, -torch.inf, 1e30
    kv_append_q_operator.KV_APPEND_Q.overload(*args)
    lost = kv_append_q_reference.unpack(args[0][:, :, :4], 64, 8, 32).isnan().view(2, 4, 2, 32)
    assert torch.equal(lost.all(-1), lost.any(-1))
    assert lost.all(-1).nonzero().tolist() == [[0, 0, 0], [0, 1, 0], [1, 2, 1], [1, 3, 0]]


@pytest.mark.parametrize(
    ("start", "queries"), (([0], 1), ([70], 1), ([5, 130, 64], 1), ([0, 0], 7), ([9, 9], 33), ([3, 0, 65], 20))
)
@pytest.mark.parametrize(("window", "softcap"), ((0, 0.0), (5, 2.0), (-6, 0.0)))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_attention_matches_float64(
    path: str, start: list[int], queries: int, window: int, softcap: float, bits: int, dtype: torch.dtype
) -> None:
    """Positions beyond a sequence's end hold NaN scales, which no result may show."""
    k_cache, v_cache, _, _, begin, _, group = make(start, queries, bits, 20, 12)
    for cache in (k_cache, v_cache):
        for b, first in enumerate(start):
            written = torch.randn(2, first + queries, 20)
            cache[b, :, : first + queries] = kv_append_q_reference.pack(written, bits, group)
    q = torch.randn(len(start), queries, 6, 20).to(dtype).transpose(1, 2)
    wide = torch.full((len(start), queries, 6, 26), 7.0, dtype=dtype)
    out = wide[..., 2:22]
    out.fill_(torch.nan)
    attention_q_cpu.bind_attention_q(q, k_cache, v_cache, begin, Scoring(0.3, window, softcap), bits, group, out)()
    k, v = (kv_append_q_reference.unpack(cache, 20, bits, group) for cache in (k_cache, v_cache))
    want = attention.reference(q, k, v, begin, 0.3, window, softcap)
    assert not want.isnan().any()
    # The torch path rounds the unpacked cache to q's dtype, too.
    assert (out.double() - want).abs().max() < TOLERANCE[dtype] * (2 if path == "torch" else 1)
    assert (wide[..., :2] == 7).all() and (wide[..., 22:] == 7).all()
    found = attention_q_operator.ATTENTION_Q.overload(q, k_cache, v_cache, begin, 0.3, window, softcap, bits, group)
    assert torch.equal(found, out)


@pytest.mark.parametrize(("dim", "heads", "queries"), ((576, 5, 1), (288, 3, 40), (1000, 2, 3)))
@pytest.mark.parametrize("bits", (4, 8))
def test_rows_of_latents_are_keys_and_values(path: str, dim: int, heads: int, queries: int, bits: int) -> None:
    """One cache of wide rows, appended once and read once; rows of 1000 numbers go through torch."""
    group, begin = row_sizes.cache_group_size(dim, bits), torch.tensor([3, 70])
    rows, _, new, _, *_ = make([3, 70], queries, bits, dim, group)
    rows, new = rows[:, :1], new[:, :1]
    before = torch.randn(2, 1, 70, dim)
    rows[:, :, :70] = kv_append_q_reference.pack(before, bits, group)
    want, _ = kv_append_q_reference.reference(rows, rows, new, new, begin, bits, group)
    kv_append_q_cpu.bind_kv_append_q(rows, rows, new, new, begin, bits, group)()
    assert torch.equal(rows, want)
    q = torch.randn(2, heads, queries, dim)
    out = torch.empty(2, queries, heads, dim)
    attention_q_cpu.bind_attention_q(q, rows, rows, begin, Scoring(0.1), bits, group, out)()
    assert (out - attention_q_reference.reference(q, rows, rows, begin, 0.1, 0, 0.0, bits, group)).abs().max() < 1e-5
    apart = torch.empty_like(out)
    attention_q_cpu.bind_attention_q(q, rows, rows.clone(), begin, Scoring(0.1), bits, group, apart)()
    assert torch.equal(out, apart)


def test_bound_calls_read_present_contents(path: str) -> None:
    k_cache, v_cache, k, v, start, bits, group = make([40, 40], 1, 8)
    q, out = torch.randn(2, 6, 1, 20), torch.empty(2, 1, 6, 20)
    append = kv_append_q_cpu.bind_kv_append_q(k_cache, v_cache, k, v, start, bits, group)
    attend = attention_q_cpu.bind_attention_q(q, k_cache, v_cache, start, Scoring(0.3), bits, group, out)
    for position in range(3):
        start.fill_(position)
        k.normal_()
        v.normal_()
        q.normal_()
        append()
        attend()
        want = attention_q_reference.reference(q, k_cache, v_cache, start, 0.3, 0, 0.0, bits, group)
        assert (out - want).abs().max() < 3e-6
    start.fill_(k_cache.shape[2])
    before = k_cache.clone(), out.clone()
    with pytest.raises(ValueError, match="kv_append_q: start"):
        append()
    with pytest.raises(ValueError, match="attention_q: start"):
        attend()
    assert torch.equal(k_cache, before[0]) and torch.equal(out, before[1])


@pytest.mark.parametrize(
    ("index", "argument", "bad"),
    (
        (0, "k_cache", torch.zeros(1, 2, 4, 23, dtype=torch.uint8)),
        (1, "v_cache", torch.zeros(1, 2, 3, 24, dtype=torch.uint8)),
        (2, "k", torch.zeros(1, 2, 1, 20, dtype=torch.float64)),
        (3, "v", torch.zeros(1, 2, 2, 20)),
        (4, "start", torch.zeros(1, dtype=torch.int32)),
        (5, "bits", 3),
        (6, "group", 6),
    ),
)
def test_append_refuses_by_name(index: int, argument: str, bad: Tensor | int) -> None:
    args: list = list(make([0], 1, 8))
    args[index] = bad
    with pytest.raises(ValueError, match=f"kv_append_q: {argument}"):
        kv_append_q_operator.KV_APPEND_Q.overload(*args)


@pytest.mark.parametrize(
    ("argument", "bad"),
    (
        ("q", torch.zeros(1, 6, 20)),
        ("k_cache", torch.zeros(1, 4, 8, 24, dtype=torch.uint8)),
        ("k_cache", torch.zeros(1, 2, 8, 24)),
        ("v_cache", torch.zeros(1, 2, 7, 24, dtype=torch.uint8)),
        ("start", torch.zeros(1)),
        ("start", torch.tensor([8])),
    ),
)
def test_attention_refuses_by_name(path: str, argument: str, bad: Tensor) -> None:
    given = {
        "q": torch.zeros(1, 6, 1, 20),
        "k_cache": torch.zeros(1, 2, 8, 24, dtype=torch.uint8),
        "v_cache": torch.zeros(1, 2, 8, 24, dtype=torch.uint8),
        "start": torch.zeros(1, dtype=torch.int64),
    }
    given[argument] = bad
    with pytest.raises(ValueError, match=f"attention_q: {argument} "):
        attention_q_operator.ATTENTION_Q.overload(**given, scale=1.0, window=0, softcap=0.0, bits=8, group=20)


def test_usual_groups_divide_heads_and_waste_little() -> None:
    for dim in range(1, 300):
        four, eight = (row_sizes.cache_group_size(dim, bits) for bits in (4, 8))
        assert four % 4 == eight % 4 == 0 and four <= 48 and eight <= 64
        assert row_sizes.group_count(dim, eight) == row_sizes.group_count(dim, 64)
        assert row_sizes.cache_row_nbytes(dim, 4) <= 0.625 * dim + 20
    assert [row_sizes.cache_row_nbytes(64, bits) for bits in (4, 8)] == [40, 68]
    assert [row_sizes.cache_row_nbytes(128, bits) for bits in (4, 8)] == [80, 136]
    assert [row_sizes.cache_row_nbytes(dim, 4) for dim in (80, 96, 256)] == [48, 60, 160]


@pytest.mark.parametrize("bits", (4, 8))
def test_opcheck(bits: int) -> None:
    args = make([2, 5], 1, bits)
    torch.library.opcheck(KV_APPEND_Q.overload, args)
    for cache in args[:2]:
        cache.copy_(kv_append_q_reference.pack(torch.randn(*cache.shape[:3], 20), bits, 20))
    q = torch.randn(2, 6, 1, 20)
    torch.library.opcheck(ATTENTION_Q.overload, (q, *args[:2], args[4], 0.3, 4, 2.0, bits, 20))


def test_stack_of_the_native_kernel_is_what_is_stated() -> None:
    source = "".join((native.sources.KERNELS / name).read_text() for name in (
        "attention/attention_q/attention_q.cpp", "cpu_support/cache_rows.h"))
    rows, keys, dim = (int(source.split(f"{name} = ")[1].split(";")[0]) for name in ("ROWS", "KEYS", "MAX_HEAD_DIM"))
    assert 4 * (2 * rows * dim + rows * keys + keys * dim) == attention_q_cpu.stack_nbytes(dim)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize(("heads", "queries", "window"), ((4, 1, 0), (2, 3, 70), (30, 1, -64)))
def test_token_by_token_is_as_head_by_head(bits: int, heads: int, queries: int, window: int) -> None:
    """To the bit, for as many sequences as give each thread tasks of several heads, of unequal lengths."""
    start = [(37 * i) % 201 for i in range(4 * torch.get_num_threads() + 3)]
    new = max(start) + queries
    k_cache, v_cache, k, v, _, bits, group = make([0] * len(start), new, bits, 32, 32)
    begin = torch.zeros(len(start), dtype=torch.int64)
    kv_append_q_operator.KV_APPEND_Q.overload(k_cache, v_cache, k, v, begin, bits, group)
    q = torch.randn(len(start), queries, heads, 32).transpose(1, 2)
    beside = torch.stack((k_cache, v_cache), 1).permute(0, 3, 1, 2, 4).contiguous()  # [B, L, 2, Hkv, R]
    tokens = [beside[:, :, side].transpose(1, 2) for side in (0, 1)]
    found = [torch.full((len(start), queries, heads, 32), torch.nan) for _ in range(2)]
    for out, caches in zip(found, ((k_cache, v_cache), tokens), strict=True):
        attention_q_cpu.bind_attention_q(q, *caches, torch.tensor(start), Scoring(0.3, window), bits, group, out)()
    assert torch.equal(*found) and not found[0].isnan().any()
