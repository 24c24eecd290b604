"""sparse_attention: which values are read, what is made of them, by an independent definition, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forebay.kernels import operators
from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.attention.sparse_attention import cpu
from forebay.kernels.attention.sparse_attention.operator import SPARSE_ATTENTION
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes
from forebay.kernels.operator import Tensors

sparse_attention = SPARSE_ATTENTION.overload
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DIM = 20


def make(start: list[int], dtype: torch.dtype, bits: int = 0, group: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of six heads, caches of two that hold NaN behind each sequence, strided as in a staging slot."""
    torch.manual_seed(0)
    length = max(start) + 4
    width, kind, nothing = (DIM, dtype, torch.nan) if not bits else (
        row_sizes.row_nbytes(DIM, bits, group, row_sizes.CACHE_ALIGN), torch.uint8, 0xFF)
    k, v = (torch.full((len(start), length, 2, width + 4), nothing, dtype=kind).transpose(1, 2)[..., :width]
            for _ in range(2))
    for cache in (k, v):
        for b, position in enumerate(start):
            rows = torch.randn(2, position + 1, DIM)
            cache[b, :, : position + 1] = kv_append_q.pack(rows, bits, group) if bits else rows.to(dtype)
    q = torch.randn(len(start), 1, 6, DIM).to(dtype).transpose(1, 2)
    return q, k, v, torch.tensor(start)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float, kept: float
) -> Tensor:
    """Head by head and position by position, in Python's numbers."""
    found = torch.empty(q.shape[0], 1, q.shape[1], q.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        last = int(start[b])
        seen = list(range(max(0, attention.first_seen(last, window)), last + 1))
        for h in range(q.shape[1]):
            keys, values = (cache[b, h * k.shape[1] // q.shape[1]].double() for cache in (k, v))
            scores = [float(q[b, h, 0].double() @ keys[t]) * scale for t in seen]
            if softcap:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            total = sum(math.exp(score) for score in scores)
            order = sorted(range(len(seen) - 1), key=lambda i: (-scores[i], i))
            chosen = [*order[: math.ceil(kept * (len(seen) - 1))], len(seen) - 1]
            found[b, 0, h] = sum(math.exp(scores[i]) / total * values[seen[i]] for i in chosen)
    return found


@pytest.mark.parametrize("start", ([0], [1, 130], [5, 64, 63], [200, 0, 9]))
@pytest.mark.parametrize(("window", "softcap"), ((0, 0.0), (7, 2.0), (-6, 0.0)))
@pytest.mark.parametrize("kept", (0.1, 0.5, 1.0))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_newest_and_the_weightiest_values_are_read(
    path: str, start: list[int], window: int, softcap: float, kept: float, dtype: torch.dtype
) -> None:
    q, k, v, begin = make(start, dtype)
    wide = torch.full((len(start), 1, 6, DIM + 6), 7.0, dtype=dtype)
    out = wide[..., 2 : DIM + 2]
    cpu.bind_sparse_attention(q, k, v, begin, Scoring(0.3, window, softcap), kept, 0, 0, out)()
    want = by_definition(q, k, v, begin, 0.3, window, softcap, kept)
    assert (out.double() - want).abs().max() < TOLERANCE[dtype] * want.abs().max()
    assert (wide[..., :2] == 7).all() and (wide[..., DIM + 2 :] == 7).all()
    whole = attention.reference(q, k, v, begin, 0.3, window, softcap)
    assert kept < 1 or (out.double() - whole).abs().max() < TOLERANCE[dtype] * whole.abs().max()
    assert torch.equal(sparse_attention(q, k, v, begin, 0.3, window, softcap, kept), out)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_over_packed_rows(path: str, bits: int, dtype: torch.dtype) -> None:
    q, k, v, begin = make([3, 130, 64], dtype, bits)
    plain = [kv_append_q.unpack(cache, DIM, bits, 12) for cache in (k, v)]
    for window, kept in ((0, 0.2), (9, 0.5), (0, 1.0)):
        want = by_definition(q, *plain, begin, 0.3, window, 0.0, kept)
        found = sparse_attention(q, k, v, begin, 0.3, window, 0.0, kept, bits, 12)
        assert (found.double() - want).abs().max() < TOLERANCE[dtype] * want.abs().max()


def test_values_that_are_not_chosen_are_not_read(path: str) -> None:
    """NaN in them shows nowhere; in one that is chosen it does."""
    q, k, v, begin = make([99], torch.float32)
    q, k = q[:, :2], k.clone()
    k[0, :, :100] = 0.0
    k[0, :, [3, 40, 77]] = 0.5 * q[0, :, 0][:, None]
    v = v.clone()
    clean = v.clone()
    v[0, :, [i for i in range(99) if i not in (3, 40, 77)]] = torch.nan
    kept = 3 / 99
    found = sparse_attention(q, k, v, begin, 1.0, 0, 0.0, kept)
    assert torch.equal(found, sparse_attention(q, k, clean, begin, 1.0, 0, 0.0, kept)) and not found.isnan().any()
    assert sparse_attention(q, k, v, begin, 1.0, 0, 0.0, 4 / 99).isnan().any()


def test_of_equal_weights_the_first_are_chosen(path: str) -> None:
    q, k, v, begin = make([8], torch.float32)
    k = torch.zeros_like(k)
    found = sparse_attention(q, k, v, begin, 1.0, 0, 0.0, 0.25)
    want = v[0, :, [0, 1, 8]].sum(1) / 9
    assert torch.allclose(found[0, 0], want.repeat_interleave(3, 0), atol=1e-6)
    q.fill_(1.0)
    k[0, :, 6] = 0.1  # larger than the others: it is kept, and of those the first alone
    weights = (q[0, :, 0] @ k[0, 0, :9].mT).softmax(-1)
    found = sparse_attention(q, k, v, begin, 1.0, 0, 0.0, 0.25)
    want = (weights[0, [0, 6, 8], None] * v[0, :, [0, 6, 8]]).sum(1)
    assert torch.allclose(found[0, 0], want.repeat_interleave(3, 0), atol=1e-6)


@pytest.mark.parametrize("where", ("q", "k"))
def test_nan_among_the_scores_is_the_result(path: str, where: str) -> None:
    q, k, v, begin = make([70, 70], torch.float32)
    k = k.clone()
    (q if where == "q" else k)[0, :, 0] = torch.nan
    found = sparse_attention(q, k, v, begin, 0.3, 0, 0.0, 0.1)
    assert found[0].isnan().all() and not found[1].isnan().any()


def test_bound_calls_read_present_contents(path: str) -> None:
    q, k, v, begin = make([60, 80], torch.float32)
    k, v = k.nan_to_num(), v.nan_to_num()
    out = torch.empty(2, 1, 6, DIM)
    call = cpu.bind_sparse_attention(q, k, v, begin, Scoring(0.3), 0.2, 0, 0, out)
    for first in (0, 33, 80):
        begin.fill_(first)
        q.normal_()
        call()
        assert torch.equal(out, sparse_attention(q, k, v, begin, 0.3, 0, 0.0, 0.2))
    begin[1] = 84
    before = out.clone()
    with pytest.raises(ValueError, match="start must leave positions"):
        call()
    assert torch.equal(out, before)


def test_wrong_arguments_are_named() -> None:
    q, k, v, begin = make([5], torch.float32)
    for kept in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"sparse_attention: kept must be a share"):
            sparse_attention(q, k, v, begin, 1.0, 0, 0.0, kept)
    with pytest.raises(ValueError, match=r"sparse_attention: q must be of one query"):
        sparse_attention(q.expand(-1, -1, 2, -1), k, v, begin, 1.0, 0, 0.0, 0.5)
    with pytest.raises(ValueError, match=r"v must have k's shape"):
        sparse_attention(q, k, v[:, :, 1:], begin, 1.0, 0, 0.0, 0.5)


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_what_a_call_takes_is_what_it_says(threads: int) -> None:
    """Scratch has room for every thread's task, whatever number of threads was there when it was bound."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        q, k, v, begin = make([300, 20, 7], torch.float32)
        out = torch.empty(3, 1, 6, DIM)
        call = cpu.bind_sparse_attention(q, k, v, begin, Scoring(0.3), 0.3, 0, 0, out)
        torch.set_num_threads(3)
        call()
    finally:
        torch.set_num_threads(before)
    want = by_definition(q, k, v, begin, 0.3, 0, 0.0, 0.3)
    assert (out.double() - want).abs().max() < 3e-6 * want.abs().max()


def test_cost_counts_the_values_that_are_read() -> None:
    q, k, out = torch.empty(2, 4, 1, 8), torch.empty(2, 2, 101, 8), torch.empty(2, 1, 4, 8)
    v, start = torch.empty_like(k), torch.zeros(2, dtype=torch.int64)
    cost = SPARSE_ATTENTION.cost(Tensors((q, k, v, start, 1.0, 0, 0.0, 0.1), {}, (out,)))
    assert cost.read_nbytes == q.nbytes + k.nbytes + k.nbytes * 11 // 101 + start.nbytes
    assert cost.flops == 2 * 2 * 4 * 8 * (101 + 11)
    whole = SPARSE_ATTENTION.cost(Tensors((q, k, v, start, 1.0, 0, 0.0, 1.0), {}, (out,)))
    assert whole == operators.ATTENTION.cost(Tensors((q, k, v, start, 1.0, 0, 0.0), {}, (out,)))
