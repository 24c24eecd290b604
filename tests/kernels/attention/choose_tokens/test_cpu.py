"""choose_tokens, and attention among the tokens that it chose, against definitions in plain Python."""

from __future__ import annotations

import itertools

import pytest
import torch
from allocated import peak_allocated
from torch import Tensor

from forebay.kernels.attention.attention.reference import reference as attention
from forebay.kernels.attention.choose_tokens import cpu
from forebay.kernels.attention.costs import gathered_nbytes
from forebay.kernels.attention.scoring import AttentionExtras
from forebay.kernels.cache.kv_append_q import reference as packed_rows
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import row_sizes
from forebay.kernels.operator import Tensors
from forebay.kernels.operators import ATTENTION, ATTENTION_Q, CHOOSE_TOKENS

HEADS, DIM, LENGTH, WIDTH = 24, 16, 40, 32  # so many heads that no two tokens have a score of 0


def by_definition(q: Tensor, weights: Tensor, keys: Tensor, position: int, count: int) -> list[int]:
    """The positions that one query q [H, D] has of keys [L, D]."""
    scores = {t: sum(float(w) * max(0.0, float(head.double() @ keys[t].double()))
                     for head, w in zip(q, weights, strict=True)) for t in range(position + 1)}
    best = sorted(sorted(scores, key=lambda t: -scores[t])[:count])
    return best + [-1] * (count - len(best))


def made_for(queries: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, weights, new keys, keys and starts of three sequences; the first begins."""
    made = torch.Generator().manual_seed(seed)
    start = torch.randint(0, LENGTH - queries + 1, (3,), generator=made)
    start[0] = 0
    return (torch.randn(3, queries, HEADS, DIM, generator=made), torch.randn(3, queries, HEADS, generator=made),
            torch.randn(3, queries, DIM, generator=made).to(dtype),
            torch.randn(3, 1, LENGTH, DIM, generator=made).to(dtype), start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("count", [3, 12, LENGTH + 5])
def test_the_tokens_of_the_largest_scores(
    dtype: torch.dtype, queries: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "SCORES", 4 * HEADS * LENGTH)  # some queries at once, and the last ones alone
    q, weights, k, keys, start = made_for(queries, dtype, count)
    want = keys.clone()
    for b, begin in enumerate(start.tolist()):
        want[b, 0, begin : begin + queries] = k[b]
    found = CHOOSE_TOKENS.overload(q, weights, k, keys, start, count)
    assert torch.equal(keys, want)
    for b, s in itertools.product(range(3), range(queries)):
        assert found[b, s].tolist() == by_definition(q[b, s], weights[b, s], keys[b, 0], int(start[b]) + s, count)
    assert torch.equal(CHOOSE_TOKENS.reference(q, weights, k, want, start, count), found)


def test_positions_outside_of_the_state_write_nothing() -> None:
    q, weights, k, keys, start = made_for(5, torch.float32, 1)
    before = keys.clone()
    for wrong in (LENGTH - 4, -1):
        start[2] = wrong
        with pytest.raises(ValueError, match="not all within a state of 40"):
            CHOOSE_TOKENS.overload(q, weights, k, keys, start, 4)
        assert torch.equal(keys, before)
    with pytest.raises(ValueError, match="do not go together"):
        CHOOSE_TOKENS.overload(q, weights[:, :, 1:], k, keys, start, 4)


def test_no_more_memory_than_is_said() -> None:
    for queries, length in ((1, 3000), (40, 700)):
        q, weights = torch.randn(1, queries, 8, 32), torch.randn(1, queries, 8)
        k, keys, start = torch.randn(1, queries, 32), torch.randn(1, 1, length, 32), torch.tensor([length - queries])
        out = start.new_empty(1, queries, 64)
        call = cpu.bind_choose_tokens(q, weights, k, keys, start, 64, out)
        assert peak_allocated(call) <= cpu.workspace_nbytes(q, keys) < 8 * peak_allocated(call)


@pytest.fixture(params=("C++", "torch"))
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What attends to the rows that were gathered."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no C++ compiler")
    return str(request.param)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_among_chosen_tokens(
    by: str, dtype: torch.dtype, error: float, queries: int, kv_heads: int
) -> None:
    *indexed, start = made_for(queries, dtype, queries)
    chosen = CHOOSE_TOKENS.overload(*indexed, start, 7)
    made = torch.Generator().manual_seed(kv_heads)
    q = torch.randn(3, 6, queries, WIDTH, generator=made).to(dtype)
    k, v = (torch.randn(3, kv_heads, LENGTH, WIDTH, generator=made).to(dtype) for _ in range(2))
    sinks = torch.randn(6, generator=made).to(dtype)
    every = [t for b in range(3) for s in range(queries) for t in chosen[b, s].tolist()]
    assert -1 in every and len(set(every)) > 8
    for values, extra in ((v, None), (k, sinks)):
        found = ATTENTION.overload(q, k, values, start, 0.2, 0, 0.0, 0.0, 0.0, 0.0, extra, None, chosen)
        want = attention(q, k, values, start, 0.2, extras=AttentionExtras(extra, None, chosen))
        assert (found.double() - want).abs().max() < error
    group = row_sizes.cache_group_size(WIDTH, 8)
    rows = packed_rows.pack(k, 8, group)
    stand_for = packed_rows.unpack(rows, WIDTH, 8, group)
    found = ATTENTION_Q.overload(q, rows, rows, start, 0.2, 0, 0.0, 8, group, 0.0, 0.0, 0.0, chosen)
    want = attention(q, stand_for, stand_for, start, 0.2, extras=AttentionExtras(chosen=chosen))
    assert (found.double() - want).abs().max() < error


def test_what_is_wrong_is_named() -> None:
    q, rows, start = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 8, 16), torch.tensor([2])
    chosen = torch.zeros(1, 3, 2, dtype=torch.int64)

    def attend(chosen: Tensor, window: int = 0) -> Tensor:
        found: Tensor = ATTENTION.overload(q, rows, rows, start, 0.2, window, 0.0, 0.0, 0.0, 0.0, None, None, chosen)
        return found

    with pytest.raises(ValueError, match=r"chosen must be int64 \[1, 3, n\]"):
        attend(chosen[:, :2])
    with pytest.raises(ValueError, match="chosen leaves no place for a window"):
        attend(chosen, 4)
    start[0] = 6
    with pytest.raises(ValueError, match="not all within a cache of 8"):
        attend(chosen)


def test_rows_of_a_query_are_what_attention_costs() -> None:
    """Two queries over 1000 rows of which each sees 10."""
    q, rows = torch.empty(1, 4, 2, 64), torch.empty(1, 1, 1000, 64)
    start, chosen = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, 10, dtype=torch.int64)
    given = q, rows, rows, start, 0.1, 0, 0.0, 0.0, 0.0, 0.0, None, None, chosen
    use = Tensors(given, {}, (torch.empty(1, 2, 4, 64),))
    cost = ATTENTION.cost(use)
    assert cost.flops == 2 * 4 * 10 * 64 * 4
    assert cost.read_nbytes == 2 * 10 * 64 * 4 + q.nbytes + start.nbytes + chosen.nbytes
    assert gathered_nbytes(use) == 2 * 10 * 64 * 4
