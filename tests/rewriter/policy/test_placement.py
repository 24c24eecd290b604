"""The placement LP and its exact pass: feasible to the byte, bounded by the LP, never worse with more memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.published_runtime import UNPINNED, Runtime, running
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.policy.block_costs import BlockCosts, BlockModel, BlockShape
from forebay.rewriter.policy.placement import NO_CHECKPOINTS, Goal, items_of, place, round_placement, tensor_tiers
from forebay.rewriter.policy.policy_search import Problem
from forebay.rewriter.policy.shares import INDEX, TIERS, N, shares
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, PRESET_MODELS, ModelShape, decoder_shape

T4 = PRESETS["t4"]
FLEXGEN = running(Runtime("step", pinned_cache=False, one_hop_thread=True, fused=False), UNPINNED["t4"])
Runs = Callable[..., BlockModel]
FREE: frozenset[tuple[str, str]] = frozenset()


def decoder(layers: int, hidden: int, kv_heads: int, gated: bool) -> ModelShape:
    return decoder_shape("tiny", layers=layers, hidden=hidden, intermediate=3 * hidden, heads=8, kv_heads=kv_heads,
                         vocab=2 * hidden, gated=gated, tied=True)


models = st.builds(decoder, st.integers(24, 48), st.sampled_from([256, 512]), st.sampled_from([1, 2, 8]), st.booleans())
blocks = st.builds(BlockShape, st.integers(1, 8), st.integers(1, 4), host_attention=st.booleans())
runtimes: st.SearchStrategy[Runs] = st.sampled_from([BlockModel, FLEXGEN])
parts = st.floats(0.15, 1.1)


def costs_of(model: ModelShape, block: BlockShape, runs: Runs, device: float, host: float) -> BlockCosts:
    """Budgets as parts of what the whole problem takes on the device."""
    free = Problem(model, T4, 64, 16, runs=runs).costs(block)
    whole = float(free.memory["device"] @ shares((1, 0, 0), (1, 0, 0), (1, 0, 0)))
    return replace(free, capacity={"device": int(device * whole), "host": int(host * whole), "disk": int(2 * whole)})


@settings(max_examples=25, deadline=None)
@given(models, blocks, runtimes, parts, parts)
def test_rounded_is_feasible_and_near_the_bound(
    model: ModelShape, block: BlockShape, runs: Runs, device: float, host: float
) -> None:
    costs = costs_of(model, block, runs, device, host)
    bound = place(costs, closed=FREE)
    rounded = round_placement(costs, items_of(model, block.size, 80), closed=FREE)
    if bound is None:
        assert rounded is None
        return
    largest = 2 * max(t.elements for t in (*model.layers[0].attention, *model.layers[0].mlp, *model.outside))
    if rounded is None:  # only where a tensor is no small part of a budget
        assert largest > 0.02 * min(costs.capacity.values())
        return
    for tier in TIERS:
        assert float(costs.memory[tier] @ rounded.x) <= costs.capacity[tier]
    assert bound.time_s <= rounded.time_s * (1 + 1e-4)
    # A tensor of 2 % of the budget may be a tenth of all that streams, and what streams is the step: no whole
    # placement is within 5 % there (next test). Where whatever streams is many tensors, rounding costs less than 5 %,
    # or than two of them where these are more (of 22 that streamed, the best whole placement was 6.7 % over the bound).
    streamed = 2 * sum(k.count * k.elements(s) for k in model.layers for s in (ATTENTION, MLP)) * (
        1 - min(float(bound.x[INDEX[s, "device"]]) for s in (ATTENTION, MLP)))
    if largest <= min(0.02 * min(costs.capacity.values()), 0.05 * streamed):
        assert rounded.time_s <= max(1.05, 1 + 2 * largest / streamed) * bound.time_s


def test_the_best_whole_placement_may_be_a_twelfth_over_the_bound() -> None:
    """Tensors below 2 % of every budget, and still: the price is of whole tensors, not of how they are rounded."""
    model = decoder(37, 256, 1, False)
    runs = FLEXGEN
    costs = costs_of(model, BlockShape(1), runs, 0.8817, 1.024)
    largest = 2 * max(t.elements for t in (*model.layers[0].attention, *model.layers[0].mlp, *model.outside))
    assert largest <= 0.02 * min(costs.capacity.values())
    bound, rounded = place(costs, closed=FREE), round_placement(costs, items_of(model, 1, 80), closed=FREE)
    assert bound is not None and rounded is not None
    assert 1.05 * bound.time_s < rounded.time_s < 1.12 * bound.time_s


@pytest.mark.parametrize("device", [0.5, 0.65, 0.8, 0.95])
@pytest.mark.parametrize("runs", [BlockModel, FLEXGEN])
def test_no_whole_placement_is_better(device: float, runs: Runs) -> None:
    """Against every way to lay two layers, the embeddings, two cache blocks and an activation on two tiers."""
    model = decoder(2, 256, 1, False)
    block = BlockShape(1)
    free = Problem(model, T4, 24, 8, runs=runs).costs(block)
    whole = float(free.memory["device"] @ shares((1, 0, 0), (1, 0, 0), (1, 0, 0)))
    costs = replace(free, capacity={"device": int(device * whole), "host": int(2 * whole), "disk": 0})
    items = items_of(model, 1, 32)
    found = round_placement(costs, items, closed=NO_CHECKPOINTS)
    assert found is not None
    x = np.zeros((1, N + 1))
    x[:, N] = 1
    for item in items:
        if item.tensor != "checkpoint":
            ways = np.zeros((item.count + 1, N + 1))
            ways[:, INDEX[item.tensor, "device"]] = item.share * np.arange(item.count + 1)
            ways[:, INDEX[item.tensor, "host"]] = item.share * np.arange(item.count, -1, -1)
            x = (x[:, None] + ways[None]).reshape(-1, N + 1)
    fits = np.all([x @ costs.memory[t] <= costs.capacity[t] for t in TIERS], axis=0)
    times = sum(p.count * np.max([x[fits] @ row for row in p.rows()], axis=0) for p in costs.pieces)
    assert fits.sum() > 100
    assert float(np.min(times)) * (1 - 1e-9) <= found.time_s <= float(np.min(times)) * (1 + 2e-3)


@settings(max_examples=15, deadline=None)
@given(models, blocks, runtimes, parts, parts, st.sampled_from(["device", "host"]))
def test_more_memory_is_never_slower(
    model: ModelShape, block: BlockShape, runs: Runs, device: float, host: float, tier: str
) -> None:
    less = costs_of(model, block, runs, device, host)
    more = replace(less, capacity={**less.capacity, tier: int(1.3 * less.capacity[tier])})
    a, b = place(less, closed=FREE), place(more, closed=FREE)
    if a is not None:
        assert b is not None and b.time_s <= a.time_s * (1 + 1e-4)


@settings(max_examples=10, deadline=None)
@given(models, blocks, runtimes, parts, parts)
def test_whole_items_add_up(model: ModelShape, block: BlockShape, runs: Runs, device: float, host: float) -> None:
    costs = costs_of(model, block, runs, device, host)
    rounded = round_placement(costs, items_of(model, block.size, 80), closed=FREE)
    if rounded is None:
        return
    for tensor in ("attention", "mlp", "outside", "activation"):
        assert sum(rounded.x[INDEX[tensor, t]] for t in TIERS) == pytest.approx(1)
    assert sum(rounded.x[INDEX[tensor, t]] for tensor in ("kv", "checkpoint") for t in TIERS) == pytest.approx(1)
    tiers = tensor_tiers(rounded)
    assert len(tiers) == sum(k.count * (len(k.attention) + len(k.mlp)) for k in model.layers) + len(model.outside)
    for item, counts in rounded.items:
        if item.names:
            assert Counter(tiers[n] for n in item.names) == +Counter(dict(zip(TIERS, counts, strict=True)))


def test_lp_finds_the_exhaustive_optimum() -> None:
    """Against every placement on a grid of quarters, on a machine with three small tiers."""
    model = decoder(8, 256, 2, True)
    costs = costs_of(model, BlockShape(4, 2), BlockModel, 0.6, 0.3)
    found = place(costs, closed=NO_CHECKPOINTS)
    assert found is not None
    steps = [(a / 4, b / 4, (4 - a - b) / 4) for a in range(5) for b in range(5 - a)]
    best = np.inf
    for weights in steps:
        for cache in steps:
            for kept in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
                x = shares(weights, cache, kept)
                if all(float(costs.memory[t] @ x) <= costs.capacity[t] for t in TIERS):
                    best = min(best, costs.time_s(x))
    assert np.isfinite(best)
    assert found.time_s <= best * (1 + 1e-4)


def test_closed_shares_stay_empty() -> None:
    model = PRESET_MODELS["opt-30b"]
    costs = Problem(model, T4, 512, 32).costs(BlockShape(16, 4))
    closed = NO_CHECKPOINTS | {("kv", "device"), (ATTENTION, "disk"), (MLP, "disk")}
    for found in (place(costs, closed=closed), round_placement(costs, items_of(model, 64, 544), closed=closed)):
        assert found is not None
        assert all(found.x[INDEX[pair]] == 0 for pair in closed)


def test_ties_go_to_the_fastest_tier() -> None:
    costs = Problem(PRESET_MODELS["opt-6.7b"], T4, 512, 32).costs(BlockShape(2))
    found = place(costs)
    assert found is not None
    assert all(found.x[INDEX[tensor, "device"]] == pytest.approx(1) for tensor in ("attention", "mlp", "kv"))


def test_least_memory_within_a_time() -> None:
    model = PRESET_MODELS["opt-6.7b"]
    costs = Problem(model, T4, 512, 32).costs(BlockShape(2))
    fastest = place(costs)
    assert fastest is not None
    least = place(costs, goal=Goal("device"))
    within = place(costs, goal=Goal("device", 3 * fastest.time_s))
    assert least is not None and within is not None
    nbytes = [float(costs.memory["device"] @ p.x) for p in (least, within, fastest)]
    assert nbytes == sorted(nbytes) and nbytes[1] > 1.05 * nbytes[0]
    assert within.time_s <= 3 * fastest.time_s * (1 + 1e-4)
    assert place(costs, goal=Goal("device", 0.5 * fastest.time_s)) is None
