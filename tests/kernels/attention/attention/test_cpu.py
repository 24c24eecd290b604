"""attention: native and torch paths against float64, over lengths, groups, windows and soft caps."""

from __future__ import annotations

import re

import pytest
import torch
from allocated import peak_allocated
from torch import Tensor

from forebay.kernels import operators
from forebay.kernels.attention.attention import cpu as module
from forebay.kernels.attention.attention.cpu import attention_out, bind_attention, workspace_nbytes
from forebay.kernels.attention.attention.operator import ATTENTION
from forebay.kernels.attention.attention.reference import reference
from forebay.kernels.attention.scoring import AttentionExtras
from forebay.kernels.build.compile import compiler
from forebay.kernels.cpu_support import native

attention = ATTENTION.overload
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(
    start: list[int], queries: int, heads: int = 6, kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Strided q and caches; everything beyond a sequence's end is NaN, which no result may show."""
    torch.manual_seed(1)
    batch, length = len(start), max(start) + queries + 3
    q = torch.randn(batch, queries, heads, dim).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, batch, kv_heads, length + 5, dim).to(dtype)[:, :, :, :length].unbind()
    for b, begin in enumerate(start):
        k[b, :, begin + queries :] = torch.nan
        v[b, :, begin + queries :] = torch.nan
    return q, k, v, torch.tensor(start)


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("start", "queries"),
    (([0], 1), ([70], 1), ([5, 130, 64], 1), ([0, 0], 7), ([0], 200), ([9, 9], 33), ([3, 0, 65], 20)),
)
@pytest.mark.parametrize(("window", "softcap"), ((0, 0.0), (5, 0.0), (0, 2.0), (64, 1.5), (-5, 0.0), (-64, 1.5)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_matches_float64(
    path: str, start: list[int], queries: int, window: int, softcap: float, dtype: torch.dtype
) -> None:
    q, k, v, begin = make(start, queries, dtype=dtype)
    want = reference(q, k, v, begin, 0.3, window, softcap)
    wide = torch.full((len(start), queries, 6, 20), 7.0, dtype=dtype)
    out = wide[..., 2:18]
    out.fill_(torch.nan)
    attention_out(q, k, v, begin, 0.3, window, softcap, out)
    assert not want.isnan().any()
    assert (out.double() - want).abs().max() < TOLERANCE[dtype]
    assert (wide[..., :2] == 7).all() and (wide[..., 18:] == 7).all()
    assert torch.equal(attention(q, k, v, begin, 0.3, window, softcap), out)


@pytest.mark.parametrize("start", ([519, 30], [1800], [255], [256, 512, 700]))
@pytest.mark.parametrize(("queries", "window", "softcap"), ((1, 0, 0.0), (1, 300, 2.0), (3, 0, 0.0), (5, -512, 0.0)))
@pytest.mark.parametrize("token_by_token", (False, True))
def test_parts_of_long_sequences(
    start: list[int], queries: int, window: int, softcap: float, token_by_token: bool
) -> None:
    """Few heads: the positions are cut into parts, of unequal numbers for unequal lengths, and put together."""
    q, k, v, begin = make(start, queries, 6, 2, 24)
    if token_by_token:
        k, v = (torch.empty(t.shape[0], t.shape[2], 2, 24).transpose(1, 2).copy_(t) for t in (k, v))
    assert module.parts_of(len(start), 6, 2, queries, k.shape[2]) == k.shape[2] // module.PART or len(start) > 1
    k[:, :, 9] *= 40  # the largest scores, of either sign, in the first part
    want, found = reference(q, k, v, begin, 0.3, window, softcap), torch.empty(len(start), queries, 6, 24)
    attention_out(q, k, v, begin, 0.3, window, softcap, found)
    assert (found - want).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_sinks_take_their_share(path: str, dtype: torch.dtype) -> None:
    """One query, many, and parts of long sequences; of sinks far below, among and far above the scores."""
    for start, queries in (([70], 1), ([5, 130, 64], 3), ([0], 200), ([1800], 1)):
        q, k, v, begin = make(start, queries, dtype=dtype)
        for low, (window, softcap) in ((0.0, (0, 0.0)), (4.0, (5, 1.5)), (-300.0, (0, 0.0)), (200.0, (64, 0.0))):
            sinks = (torch.randn(6) + low).to(dtype)
            want = reference(q, k, v, begin, 0.3, window, softcap, extras=AttentionExtras(sinks))
            found = attention(q, k, v, begin, 0.3, window, softcap, 0.0, 0.0, 0.0, sinks)
            assert (found.double() - want).abs().max() < TOLERANCE[dtype], (start, low)
            if low == 4:
                assert (want - reference(q, k, v, begin, 0.3, window, softcap)).abs().max() > 3 * TOLERANCE[dtype]
    with pytest.raises(ValueError, match="sinks must be"):
        attention(q, k, v, begin, 0.3, 0, 0.0, 0.0, 0.0, 0.0, sinks[:2])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_queries_of_a_group_see_each_other(path: str, dtype: torch.dtype) -> None:
    """Each query sees as far as it is told, what is beyond the step is never read, and one query sees itself."""
    for start, queries in (([5, 0, 64], 9), ([0], 150), ([7, 3], 1)):
        q, k, v, begin = make(start, queries, dtype=dtype)
        own = begin[:, None] + torch.arange(1, queries + 1)
        until = torch.maximum(own, (begin + min(6, queries))[:, None]) if queries < 100 else own // 8 * 8 + 8
        until = torch.minimum(until, own[:, -1:])
        for window, softcap in ((0, 0.0), (5, 1.5), (0, 1.5)):
            want = reference(q, k, v, begin, 0.3, window, softcap, extras=AttentionExtras(until=until))
            found = attention(q, k, v, begin, 0.3, window, softcap, 0.0, 0.0, 0.0, None, until)
            assert (found.double() - want).abs().max() < TOLERANCE[dtype], (start, window)
            causal = reference(q, k, v, begin, 0.3, window, softcap)
            assert queries == 1 or (want - causal).abs().max() > 3 * TOLERANCE[dtype]
    q, k, v, begin = make([5, 0], 3)
    own = begin[:, None] + torch.arange(1, 4)
    for wrong in (own - 1, own + 1):
        with pytest.raises(ValueError, match="until must be after a query's own position, and within"):
            attention(q, k, v, begin, 0.3, 0, 0.0, 0.0, 0.0, 0.0, None, wrong)
    with pytest.raises(ValueError, match="until must be int64 of shape"):
        attention(q, k, v, begin, 0.3, 0, 0.0, 0.0, 0.0, 0.0, None, own[:1])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    ((1, 1, 1), (71, 1, 64), (8, 8, 80), (4, 2, 37), (3, 1, 128), (40, 1, 576), (2, 1, 1030)),
)
def test_head_shapes(path: str, heads: int, kv_heads: int, dim: int) -> None:
    for start, queries in (([66, 2], 1), ([4], 9)):
        q, k, v, begin = make(start, queries, heads, kv_heads, dim)
        out = torch.full((len(start), queries, heads, dim), torch.nan)
        attention_out(q, k, v, begin, dim**-0.5, 0, 0.0, out)
        assert (out - reference(q, k, v, begin, dim**-0.5)).abs().max() < TOLERANCE[torch.float32]


def test_large_scores(path: str) -> None:
    """Scores of some thousands neither overflow nor lose the largest, whatever its place."""
    q, k, v, begin = make([150], 3)
    want = reference(q, k, v, begin, 500.0)
    out = torch.empty(1, 3, 6, 16)
    attention_out(q, k, v, begin, 500.0, 0, 0.0, out)
    # Scores of 4000 are known to 2.4e-4 in fp32, and so are the weights.
    assert (out - want).abs().max() < 1e-2


def test_nan_shows_only_where_it_is_read(path: str) -> None:
    q, k, v, begin = make([4, 4], 1)
    k[0, 1, 2] = torch.nan
    out = attention(q, k, v, begin, 0.3, 0, 0.0)
    assert out[0, 0, 3:].isnan().all() and not out[0, 0, :3].isnan().any() and not out[1].isnan().any()
    assert not attention(q, k, v, begin, 0.3, 2, 0.0).isnan().any()


def test_last_dimension_with_a_stride() -> None:
    q, k, v, begin = make([4, 9], 2)
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert (attention(q, k, v, begin, 0.3, 0, 0.0) - reference(q, k, v, begin, 0.3)).abs().max() < 3e-6


def test_bound_call_reads_present_contents(path: str) -> None:
    q, k, v, start = make([40, 40], 1)
    k.nan_to_num_(0.5)
    v.nan_to_num_(0.5)
    out = torch.empty(2, 1, 6, 16)
    call = bind_attention(q, k, v, start, 0.3, 0, 0.0, out)
    for begins in ([40, 40], [0, 41], [7, 7]):
        start.copy_(torch.tensor(begins))
        q.normal_()
        call()
        assert (out - reference(q, k, v, start, 0.3)).abs().max() < 3e-6
    start.fill_(44)
    before = out.clone()
    with pytest.raises(ValueError, match="attention: start"):
        call()
    assert torch.equal(out, before)


@pytest.mark.parametrize(
    ("start", "queries", "softcap"), (([300] * 4, 1, 0.0), ([100] * 2, 200, 0.0), ([200, 30], 130, 5.0))
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_workspace_bound_holds(path: str, start: list[int], queries: int, softcap: float, dtype: torch.dtype) -> None:
    """The peak of what torch's CPU allocator hands out during a call stays within workspace_nbytes."""
    q, k, v, begin = make(start, queries, dtype=dtype)
    out = torch.empty(len(start), queries, 6, 16, dtype=dtype)
    call = bind_attention(q, k, v, begin, 0.3, 0, softcap, out)
    call()
    peak = peak_allocated(call)
    bound = workspace_nbytes(len(start), 6, 2, queries, k.shape[2], 16, dtype, softcap)
    assert peak <= bound
    if path == "torch" and queries > 1:
        assert peak > 0  # the measure sees what the torch path allocates
    if path == "native":
        assert peak == 0


def test_stack_of_the_native_kernel_is_what_is_stated() -> None:
    folder = native.sources.KERNELS
    headers = ("attend_rows.h", "softmax_rows.h", "softmax_rounded.h")
    sources = [folder / "attention/attention/attention.cpp", *(folder / "cpu_support" / name for name in headers)]
    text = "".join(path.read_text() for path in sources)
    names = ("ROWS", "ROW_FLOATS", "SEGMENT", "SEGMENT_STEP", "ROUNDED_STEP")
    rows, floats, part, keys, rounded = (int(re.search(rf"\b{name} = (\d+)", text)[1]) for name in names)  # type: ignore[index]
    panel, held = 4096, 8 * (256 + 16)  # of panels.h, the same for all lengths of vectors or smaller
    rounded_rows = rows * (rounded + (2 * rounded + 64) // 4 + 16 + 32)  # scores, probabilities, sums, room
    assert 4 * (2 * floats + rows * keys + panel + held) == module.NATIVE_NBYTES
    assert 4 * (floats + floats // 2 + rounded_rows + panel) == module.NATIVE_BF16_NBYTES
    assert part == module.PART and floats // 512 > 0


@pytest.mark.parametrize(
    ("argument", "change"),
    (
        ("q", {"q": torch.zeros(2, 6, 16)}),
        ("q", {"q": torch.zeros(2, 6, 1, 16, dtype=torch.float64)}),
        ("k", {"k": torch.zeros(2, 2, 8, 16).half()}),
        ("k", {"k": torch.zeros(2, 4, 8, 16)}),
        ("k", {"k": torch.zeros(2, 2, 8, 15)}),
        ("v", {"v": torch.zeros(2, 2, 7, 16)}),
        ("start", {"start": torch.zeros(2)}),
        ("start", {"start": torch.tensor([0, 8])}),
        ("start", {"start": torch.tensor([-1, 0])}),
        ("out", {"out": torch.zeros(2, 6, 1, 16)}),
        ("out", {"out": torch.zeros(2, 1, 6, 16).half()}),
    ),
)
def test_refuses_by_name(path: str, argument: str, change: dict[str, Tensor]) -> None:
    given: dict[str, Tensor] = {
        "q": torch.zeros(2, 6, 1, 16),
        "k": torch.zeros(2, 2, 8, 16),
        "v": torch.zeros(2, 2, 8, 16),
        "start": torch.zeros(2, dtype=torch.int64),
        "out": torch.full((2, 1, 6, 16), 7.0),
    }
    given.update(change)
    before = given["out"].clone()
    with pytest.raises(ValueError, match=f"attention: {argument} "):
        attention_out(**given, scale=1.0, window=0, softcap=0.0)
    assert torch.equal(given["out"], before)


@pytest.mark.parametrize(("start", "queries"), (([2, 5], 1), ([0, 0], 3)))
def test_opcheck(start: list[int], queries: int) -> None:
    torch.library.opcheck(operators.ATTENTION.overload, (*make(start, queries), 0.3, 4, 2.0))


def test_a_negative_window_is_a_chunk(path: str) -> None:
    """A query sees no position of an earlier chunk, and every one of its own up to itself."""
    q, k, v, start = make([3], 9)
    out = attention(q, k, v, start, 0.3, -4, 0.0)
    for s in range(9):
        position = 3 + s
        seen = slice(position // 4 * 4, position + 1)
        alone = reference(q[:, :, s : s + 1], k[:, :, seen], v[:, :, seen], torch.tensor([position % 4]), 0.3)
        assert (out[:, s : s + 1] - alone).abs().max() < TOLERANCE[torch.float32], position


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ((6, 3, 16), (8, 8, 37), (4, 2, 128), (30, 2, 24), (40, 40, 8)))
@pytest.mark.parametrize(("queries", "window", "softcap"), ((1, 0, 0.0), (1, 70, 1.5), (3, 0, 0.0), (40, -64, 0.0)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.skipif(compiler() is None, reason="torch's products, which serve without a compiler, differ by strides")
def test_token_by_token_is_as_head_by_head(
    heads: int, kv_heads: int, dim: int, queries: int, window: int, softcap: float, dtype: torch.dtype
) -> None:
    """To the bit, for as many sequences as give each thread tasks of several heads, of unequal lengths."""
    start = [(37 * i) % 201 for i in range(4 * torch.get_num_threads() + 3)]
    q, k, v, begin = make(start, queries, heads, kv_heads, dim, dtype)
    beside = torch.stack((k, v), 1).permute(0, 3, 1, 2, 4).contiguous()  # [B, L, 2, Hkv, D]
    tokens = [beside[:, :, side].transpose(1, 2) for side in (0, 1)]
    found = [torch.full((len(start), queries, heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    for out, caches in zip(found, ((k, v), tokens), strict=True):
        attention_out(q, *caches, begin, 0.3, window, softcap, out)
    assert torch.equal(*found) and not found[0].isnan().any()
