"""kv_append_q and attention_q: bits of the packed rows, attention against float64, and what they must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from forebay.kernels import attention, attention_q, kv_append_q, native, packing

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@pytest.fixture(params=(pytest.param("native", marks=needs_compiler), "torch"))
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which kernel does the work: C++, or torch as where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    else:
        assert native.load() is not None
    yield request.param


def make(start: list[int], new: int, bits: int, dim: int = 20, group: int = 20, dtype: torch.dtype = torch.float32):
    """Strided caches of 0xff, whose scales are NaN, and new K and V as a runtime has them: [B, S, H, D] transposed."""
    torch.manual_seed(0)
    batch, heads, length = len(start), 2, max(start) + new + 3
    nbytes = packing.row_nbytes(dim, bits, group, packing.CACHE_ALIGN)
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
        args[2][0, 0, 0, 1:] = args[2][0, 0, 0, 0]  # a constant group
        want = kv_append_q.reference(*args)
        kv_append_q.kv_append_q(*args)
        assert torch.equal(args[0], want[0]) and torch.equal(args[1], want[1])
        read = kv_append_q.unpack(args[0], dim, bits, group)
        for b, begin in enumerate(start):
            k, got = args[2][b].float(), read[b, :, begin : begin + new]
            scale = packing.unpack_rows(args[0][b, :, begin : begin + new], dim, bits, group, torch.float16)[1]
            step = scale.float().repeat_interleave(group, -1)[..., :dim]
            assert ((got - k).abs() <= step * (0.5 + 1e-4) + 1e-6).all()


def test_what_cannot_be_held_reads_back_as_nan(path: str) -> None:
    args = make([0], 4, 8, dim=8, group=4)
    k = args[2]
    k[0, 0, 0, 1], k[0, 0, 1, 2], k[0, 1, 2, 5], k[0, 1, 3, 0] = torch.nan, torch.inf, -torch.inf, 1e30
    kv_append_q.kv_append_q(*args)
    lost = kv_append_q.unpack(args[0][:, :, :4], 8, 8, 4).isnan().view(2, 4, 2, 4).all(-1)
    assert lost.nonzero().tolist() == [[0, 0, 0], [0, 1, 0], [1, 2, 1], [1, 3, 0]]


@pytest.mark.parametrize(
    ("start", "queries"), (([0], 1), ([70], 1), ([5, 130, 64], 1), ([0, 0], 7), ([9, 9], 33), ([3, 0, 65], 20))
)
@pytest.mark.parametrize(("window", "softcap"), ((0, 0.0), (5, 2.0)))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_attention_matches_float64(
    path: str, start: list[int], queries: int, window: int, softcap: float, bits: int, dtype: torch.dtype
) -> None:
    """Positions beyond a sequence's end hold NaN scales, which no result may show."""
    k_cache, v_cache, _, _, begin, _, group = make(start, queries, bits, 20, 12)
    for cache in (k_cache, v_cache):
        for b, first in enumerate(start):
            cache[b, :, : first + queries] = kv_append_q.pack(torch.randn(2, first + queries, 20), bits, group)
    q = torch.randn(len(start), queries, 6, 20).to(dtype).transpose(1, 2)
    wide = torch.full((len(start), queries, 6, 26), 7.0, dtype=dtype)
    out = wide[..., 2:22]
    out.fill_(torch.nan)
    attention_q.bind_attention_q(q, k_cache, v_cache, begin, 0.3, window, softcap, bits, group, out)()
    k, v = (kv_append_q.unpack(cache, 20, bits, group) for cache in (k_cache, v_cache))
    want = attention.reference(q, k, v, begin, 0.3, window, softcap)
    assert not want.isnan().any()
    # The torch path rounds the unpacked cache to q's dtype, too.
    assert (out.double() - want).abs().max() < TOLERANCE[dtype] * (2 if path == "torch" else 1)
    assert (wide[..., :2] == 7).all() and (wide[..., 22:] == 7).all()
    assert torch.equal(attention_q.attention_q(q, k_cache, v_cache, begin, 0.3, window, softcap, bits, group), out)


def test_bound_calls_read_present_contents(path: str) -> None:
    k_cache, v_cache, k, v, start, bits, group = make([40, 40], 1, 8)
    q, out = torch.randn(2, 6, 1, 20), torch.empty(2, 1, 6, 20)
    append = kv_append_q.bind_kv_append_q(k_cache, v_cache, k, v, start, bits, group)
    attend = attention_q.bind_attention_q(q, k_cache, v_cache, start, 0.3, 0, 0.0, bits, group, out)
    for position in range(3):
        start.fill_(position)
        k.normal_()
        v.normal_()
        q.normal_()
        append()
        attend()
        want = attention_q.reference(q, k_cache, v_cache, start, 0.3, 0, 0.0, bits, group)
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
        kv_append_q.kv_append_q(*args)


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
        attention_q.attention_q(**given, scale=1.0, window=0, softcap=0.0, bits=8, group=20)


def test_usual_groups_divide_heads_and_waste_little() -> None:
    for dim in range(1, 300):
        group = packing.cache_group_size(dim)
        assert group % 4 == 0 and group <= 64
        assert packing.group_count(dim, group) == packing.group_count(dim, 64)
    assert [packing.cache_row_nbytes(64, bits) for bits in (4, 8)] == [36, 68]
    assert [packing.cache_row_nbytes(128, bits) for bits in (4, 8)] == [72, 136]


@pytest.mark.parametrize("bits", (4, 8))
def test_opcheck(bits: int) -> None:
    args = make([2, 5], 1, bits)
    torch.library.opcheck(torch.ops.forebay.kv_append_q.default, args)
    for cache in args[:2]:
        cache.copy_(kv_append_q.pack(torch.randn(*cache.shape[:3], 20), bits, 20))
    q = torch.randn(2, 6, 1, 20)
    torch.library.opcheck(torch.ops.forebay.attention_q.default, (q, *args[:2], args[4], 0.3, 4, 2.0, bits, 20))


def test_stack_of_the_native_kernel_is_what_is_stated() -> None:
    source = (native.SOURCE_FOLDER / "quantized_cache.cpp").read_text()
    rows, keys, dim = (int(source.split(f"{name} = ")[1].split(";")[0]) for name in ("ROWS", "KEYS", "MAX_HEAD_DIM"))
    assert 4 * (2 * rows * dim + rows * keys + keys * dim) == attention_q.NATIVE_NBYTES
