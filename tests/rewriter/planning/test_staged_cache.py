"""What staged caches take and move, beside what their Programs do."""

from __future__ import annotations

from collections import Counter

import pytest
from families import rewritten
from hypothesis import given
from hypothesis import strategies as st

from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.cache_layout import StagedLayer
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.ir.program import Copy, FileSlice, Rows, copy_nbytes, place_of, tier_of
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.staged_cache import staged_cache
from forebay.rewriter.predict.closed_form import CacheMoves, Rates
from forebay.rewriter.switches import Switches

WORK = Workload(6, 50, 30)


@given(st.integers(1, 7), st.integers(1, 6), st.sampled_from(["row", "zigzag"]), st.sampled_from(["host", "disk"]),
       st.data())
def test_caches_live_where_they_are_counted_spread_over_the_turns(
    layers: int, count: int, order: str, tier: str, data: st.DataObject
) -> None:
    total = layers * count
    device = data.draw(st.integers(0, total))
    host = 0 if tier == "host" else data.draw(st.integers(0, total - device))
    batching = BatchSchedule(MicroBatches(count, order), CachePlacement(tier, 16, 3, device, host))  # type: ignore[arg-type]
    homes = batching.cache_homes(layers)
    turns = [homes[layer][k] for layer in range(layers) for k in range(count)] if order == "zigzag" else [
        homes[layer][k] for k in range(count) for layer in range(layers)]
    wanted = Counter({"device": device, "host": host})
    wanted[tier] += total - device - host
    assert Counter(turns) == +wanted
    for share in wanted:
        for first in range(total):  # no stretch of turns is off its share by two
            for end in range(first + 1, total + 1):
                assert abs(turns[first:end].count(share) - wanted[share] * (end - first) / total) <= 2


def pipeline(batching: BatchSchedule) -> Pipeline:
    lm = rewritten("gemma2")
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    return Pipeline(step_graphs(lm, files, WORK, "gemma2", batching=batching), WORK, Machine.default(), Switches())


@pytest.mark.parametrize(("order", "shares"), [("zigzag", (0, 0)), ("row", (1, 2)), ("zigzag", (2, 1))])
def test_what_a_step_is_counted_to_move_is_what_its_program_usually_moves(order: str, shares: tuple[int, int]) -> None:
    """Of layers that see a window, no more than it."""
    made = pipeline(BatchSchedule(MicroBatches(3, order), CachePlacement("disk", 16, 3, *shares)))  # type: ignore[arg-type]
    plan = made.plan(Budget(1 << 24, 1 << 20), Options(prefill_chunk=20))
    staged = made.needs.staged
    assert staged is not None
    for tokens in (1, 20):
        found: Counter[tuple[str, str]] = Counter()
        copies = 0
        for item in made.program(plan, tokens).step:
            ends = [end for end in (item.src, item.dst) if isinstance(end, Rows)] if isinstance(item, Copy) else []
            if isinstance(item, Copy) and ends and not isinstance(place_of(item.src), FileSlice):
                found[tier_of(item.src), tier_of(item.dst)] += ends[0].typical * copy_nbytes(item)
                copies += 1
        moves = staged.moves(WORK, tokens)
        assert moves.nbytes == pytest.approx(dict(found)) and moves.copies == copies
    windows = {layer.window for layer in staged.layers.values()}
    assert len(windows) > 1
    by_layer = {window: max(staged.moves(WORK, 1).nbytes.values()) for window in windows}
    assert all(by_layer.values())


def test_more_caches_than_there_are_cannot_lie_on_faster_tiers() -> None:
    layers = {i: StagedLayer(2, 4, 4096, 128) for i in range(3)}
    shared = BatchSchedule(MicroBatches(2, "zigzag"), CachePlacement("disk", 16, 3, 4, 2))
    assert staged_cache(layers, shared).host_nbytes == 2 * layers[0].nbytes
    with pytest.raises(PlanError, match=r"cache.on_device, on_host: 7 cannot lie on faster tiers; 3 layers of 2"):
        _ = staged_cache(layers, BatchSchedule(MicroBatches(2, "zigzag"), CachePlacement("disk", 16, 3, 4, 3)))


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 40), st.floats(1e-3, 1), st.floats(0, 1e9))
def test_no_step_is_faster_for_moving_more_of_its_cache(
    loaded: float, more: float, copies: int, compute: float, weights: float
) -> None:
    def step_s(nbytes: float, stored: float) -> float:
        moves = CacheMoves({("disk", "device"): nbytes, ("device", "disk"): stored}, copies, 3)
        rates = Rates(1e9, 1e-4, 1e-5, 1.5, 1.2, lambda tokens: compute, moves=lambda tokens: moves,
                      cache_byte_s={("disk", "device"): 1e-9, ("device", "disk"): 3e-9})
        return rates.step_time_s(1, weights, 4 if weights else 0, 2 if weights else 0)

    assert step_s(loaded, 0.0) <= step_s(loaded + more, 0.0) * 1.0001
    assert step_s(loaded, 0.0) <= step_s(loaded, more) * 1.0001
    if copies:
        assert step_s(1e9, 0.0) >= 1.0  # no faster than the link
