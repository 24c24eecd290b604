"""expanded_attention: equal to keys and values written out, and to attention over the rows with matrices absorbed."""

from __future__ import annotations

import math

import pytest
import torch
from selection import at_length
from torch import Tensor

from forebay.kernels.attention.attention.operator import ATTENTION
from forebay.kernels.attention.expanded_attention import cpu
from forebay.kernels.attention.expanded_attention.operator import EXPANDED_ATTENTION
from forebay.kernels.attention.expanded_attention.reference import RowCodes, reference
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q.reference import pack, unpack
from forebay.kernels.formats import row_sizes
from forebay.kernels.operator import Tensors

expanded_attention = EXPANDED_ATTENTION.overload
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
SIZES = {"small": (3, 24, 16, 8, 12), "odd": (2, 37, 11, 6, 9), "deepseek": (2, 512, 128, 64, 128)}


def make(
    start: list[int], queries: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, rows that hold NaN behind each sequence and lie as in a staging slot, starts, matrices."""
    torch.manual_seed(0)
    heads, rank, plain, rotated, value = sizes
    rows = torch.full((len(start), max(start) + queries + 3, 1, rank + rotated + 5), torch.nan, dtype=dtype)
    rows = rows.transpose(1, 2)[..., : rank + rotated]
    for b, begin in enumerate(start):
        rows[b, :, : begin + queries] = torch.randn(begin + queries, rank + rotated).to(dtype)
    q = torch.randn(len(start), queries, heads, plain + rotated).to(dtype).transpose(1, 2)
    up = (torch.randn(heads, plain + value, rank) / math.sqrt(rank)).to(dtype)
    return q, rows, torch.tensor(start), up


def by_definition(q: Tensor, rows: Tensor, start: Tensor, up: Tensor, plain: int, how: Scoring) -> Tensor:
    """Query by query, with each head's keys and values written out in float64."""
    batch, heads, queries, _ = q.shape
    rank, found = up.shape[2], torch.empty(batch, queries, heads, up.shape[1] - plain, dtype=torch.float64)
    for b in range(batch):
        for s in range(queries):
            last = int(start[b]) + s
            first = max(0, last - how.window + 1) if how.window > 0 else 0
            seen = rows[b, 0, first : last + 1].double()
            for h in range(heads):
                keys = torch.cat((seen[:, :rank] @ up[h, :plain].double().T, seen[:, rank:]), 1)
                scores = keys @ q[b, h, s].double() * how.scale
                if how.softcap:
                    scores = how.softcap * torch.tanh(scores / how.softcap)
                found[b, s, h] = scores.softmax(0) @ (seen[:, :rank] @ up[h, plain:].double().T)
    return found


def error(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("start", "queries"), [([0], 1), ([0, 5], 7), ([3, 0, 290], 13), ([254, 1], 3)])
def test_keys_and_values_are_those_of_each_head(
    path: str, start: list[int], queries: int, sizes: str, dtype: torch.dtype
) -> None:
    q, rows, begin, up = make(start, queries, SIZES[sizes], dtype)
    plain = SIZES[sizes][2]
    for how in (Scoring(0.2), Scoring(0.2, 5, 3.0)):
        wide = torch.full((*q.shape[:1], queries, q.shape[1], up.shape[1] - plain + 6), 7.0, dtype=dtype)
        out = wide[..., 2:-4]
        cpu.bind_expanded_attention(q, rows, rows, begin, how, up, plain, out)()
        want = by_definition(q, rows, begin, up, plain, how)
        assert error(out, want) < TOLERANCE[dtype]
        assert (wide[..., :2] == 7).all() and (wide[..., -4:] == 7).all()
        assert error(reference(q, rows, rows, begin, how, up, plain), want) < 1e-9
        assert torch.equal(expanded_attention(q, rows, rows, begin, *how, up, plain), out)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_rows_are_those_that_they_stand_for(path: str, sizes: str, bits: int, dtype: torch.dtype) -> None:
    q, rows, start, up = make([3, 0, 290], 13, SIZES[sizes], dtype)
    width, plain = rows.shape[-1], SIZES[sizes][2]
    group = row_sizes.cache_group_size(width, bits)
    packed = torch.full((*rows.shape[:3], row_sizes.cache_row_nbytes(width, bits)), 0xFF, dtype=torch.uint8)
    for b, begin in enumerate(start.tolist()):
        packed[b, :, : begin + 13] = pack(rows[b, :, : begin + 13], bits, group)
    found = expanded_attention(q, packed, packed, start, 0.2, 0, 0.0, up, plain, bits, group)
    want = by_definition(q, unpack(packed, width, bits, group), start, up, plain, Scoring(0.2))
    assert error(found, want) < TOLERANCE[dtype]
    assert error(reference(q, packed, packed, start, Scoring(0.2), up, plain, RowCodes(bits, group)), want) < 1e-9
    with pytest.raises(ValueError, match="k must be"):
        expanded_attention(q, rows, rows, start, 0.2, 0, 0.0, up, plain, bits, group)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("queries", [1, 17, 88, 200, at_length(600)])
@pytest.mark.parametrize("begin", [0, 64, 300, at_length(1500)])
def test_it_is_attention_over_the_rows(path: str, threads: int, queries: int, begin: int) -> None:
    """At any number of blocks of rows and of tasks, with sequences of unequal length."""
    _, rank, plain, *_ = SIZES["small"]
    q, rows, start, up = make([begin, begin // 3], queries, SIZES["small"], torch.float32)
    absorbed = torch.cat((torch.einsum("bhsp,hpr->bhsr", q[..., :plain], up[:, :plain]), q[..., plain:]), -1)
    sums = ATTENTION.overload(absorbed, rows, rows, start, 0.2, 0, 0.0)[..., :rank]
    want = torch.einsum("bshr,hvr->bshv", sums, up[:, plain:])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = expanded_attention(q, rows, rows, start, 0.2, 0, 0.0, up, plain)
    finally:
        torch.set_num_threads(before)
    assert error(found, want.double()) < 2e-5


def test_tasks_of_few_rows_give_the_same(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, rows, start, up = make([40, 0], 150, SIZES["small"], torch.bfloat16)
    whole = expanded_attention(q, rows, rows, start, 0.2, 0, 0.0, up, 16)
    monkeypatch.setattr(cpu, "MOST_ROWS", 32)
    monkeypatch.setattr(cpu, "LOT", 48)
    monkeypatch.setattr(cpu, "QUERY_STEP", 19)
    monkeypatch.setattr(cpu, "TORCH_EXPANDED", 33)
    assert error(expanded_attention(q, rows, rows, start, 0.2, 0, 0.0, up, 16), whole.double()) < 1e-2


def test_workspace_does_not_grow_with_the_cache(path: str) -> None:
    """But for the lot that is expanded at a time."""
    def nbytes(length: int, queries: int) -> int:
        q, rows = torch.empty(1, 4, queries, 24, device="meta"), torch.empty(1, 1, length, 40, device="meta")
        up, start = torch.empty(4, 28, 32, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
        return EXPANDED_ATTENTION.workspace_nbytes(Tensors((q, rows, rows, start, 0.2, 0, 0.0, up, 16), {}, ()), "cpu")
    assert nbytes(2000, 64) == nbytes(200_000, 64) < nbytes(2000, 2000)
    assert nbytes(2000, 2048) == nbytes(2000, 1 << 14) or path == "torch"


@pytest.mark.parametrize(("change", "message"), [
    (dict(v=torch.zeros(1, 1, 9, 40)), "v must be k"), (dict(k=torch.zeros(1, 2, 9, 40)), "k must be"),
    (dict(up=torch.zeros(3, 28, 32)), "up must have q's 4 heads"), (dict(up=torch.zeros(4, 28, 32).half()), "up must"),
    (dict(start=torch.tensor([0, 1])), "start must be int64"), (dict(start=torch.tensor([5])), "start must leave"),
    (dict(plain=0), "up must have")], ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_arguments_are_named(path: str, change: dict, message: str) -> None:
    rows = change.get("k", torch.zeros(1, 1, 9, 40))
    given = dict(q=torch.zeros(1, 4, 5, 24), k=rows, v=rows, start=torch.tensor([0]), scale=0.2, window=0, softcap=0.0,
                 up=torch.zeros(4, 28, 32), plain=16) | change
    with pytest.raises(ValueError, match=message):
        expanded_attention(*given.values())


def test_what_is_behind_a_sequence_is_not_read_and_counts_no_bytes() -> None:
    q, rows, start, up = make([30], 4, SIZES["small"], torch.float32)
    cost = EXPANDED_ATTENTION.cost(Tensors((q, rows, rows, start, 0.2, 0, 0.0, up, 16), {}, ()))
    heads, rank, plain, rotated, value = SIZES["small"]
    length, queries = rows.shape[2], 4
    pairs = queries * (2 * length - queries + 1) / 2
    assert cost.flops == 2 * heads * pairs * (plain + rotated + value) + 2 * heads * length * rank * (plain + value)
    assert cost.read_nbytes == sum(t.numel() * t.element_size() for t in (q, rows, start, up))
