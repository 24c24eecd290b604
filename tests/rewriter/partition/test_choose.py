"""The mixed-integer choice against every combination tried, and what it says where nothing fits."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product

import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.partition.choose import (
    DECODE,
    PREFILL,
    PartitionError,
    PartitionProblem,
    choose,
    options_of,
    ways_here,
)
from forebay.rewriter.partition.collectives import mesh_of
from forebay.rewriter.partition.layouts import ChipLayout, outside_cost
from forebay.rewriter.partition.published_models import PUBLISHED_SHAPES
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import ModelError, ModelShape, decoder_shape

TPU = PRESETS["tpu-v4"]
TIMES = MachineEstimator(TPU)
TWO_KINDS = decoder_shape("two", layers=8, hidden=1024, intermediate=4096, heads=8, kv_heads=2, vocab=32000, gated=True,
                          window=64, windowed_layers=3, dtype="bfloat16")


def problem_of(model: ModelShape = TWO_KINDS, shape: tuple[int, ...] = (2, 2), capacity: float = 1e12,
               batch: int = 8) -> PartitionProblem:
    return PartitionProblem(model, mesh_of(TPU, shape), TIMES, capacity, batch, 96, 32)


def tried(problem: PartitionProblem) -> float:
    """Every combination of layouts of every kind and phase, one after the other; inf where none fits."""
    options, model = options_of(problem), problem.model
    fixed = [outside_cost(model, problem.mesh, problem.batch, TIMES)] * 2
    weights = fixed[0].weights_nbytes + sum(k.count * options[0].cost.weights_nbytes for k in model.layers)
    best = math.inf
    groups = [[o for o in options if (o.kind, o.phase) == key] for key in dict.fromkeys(
        (o.kind, o.phase) for o in options)]
    for taken in product(*groups):
        stored = {(o.kind, o.layout.wide) for o in taken}
        if len(stored) > len(model.layers):
            continue
        held = weights + sum(o.cache_nbytes for o in taken) + max(
            [o.cost.working_nbytes for o in taken] + [f.working_nbytes for f in fixed])
        if held <= problem.capacity_nbytes:
            best = min(best, sum(o.time_s for o in taken))
    return best + fixed[0].time_s * (1 + problem.new_tokens)


def test_what_runs_is_the_best_of_the_layouts_that_go_together() -> None:
    """One stationary layout in both phases, or prompts that gather what decode steps have in two dimensions. A chip's
    memory counts as for the choice: where heads that chips share take too much of it, sequences are divided."""
    shared = decoder_shape("shared", layers=8, hidden=1024, intermediate=4096, heads=8, kv_heads=1, vocab=32000,
                           gated=True, dtype="bfloat16")

    def together(first: ChipLayout, then: ChipLayout) -> bool:
        if first.gathered:
            return then.feedforward == "2d" and then.wide == first.wide and then.chunks == then.gather_chunks == 1 and (
                first.attention == then.attention == "batch")
        pieces = {"rows" if way.gather_chunks == 1 else "columns" for way in (first, then)
                  if (way.chunks, way.gather_chunks) != (1, 1)}
        return replace(first, chunks=then.chunks, gather_chunks=then.gather_chunks) == then and len(pieces) < 2

    for model, batch in ((TWO_KINDS, 64), (shared, 64), (shared, 4)):
        problem = problem_of(model, batch=batch)
        free, (runs, *slower) = choose(problem), ways_here(problem)
        assert all(runs.total_s <= way.total_s for way in slower) and together(runs.prefill, runs.decode)
        assert runs.total_s >= free.total_s * (1 - 1e-9)
        options = options_of(problem)
        ways = {(first, then) for first in {o.layout for o in options if o.phase == PREFILL}
                for then in {o.layout for o in options if o.phase == DECODE}
                if together(first, then)}
        taken = {way: sum(o.time_s for o in options if (o.phase, o.layout) in zip((PREFILL, DECODE), way, strict=True))
                 for way in ways}
        assert taken[runs.prefill, runs.decode] == pytest.approx(min(taken.values()))
    begin, then = (o for o in options_of(problem_of(shared, batch=64)) if o.layout == ChipLayout("1d", (), (), "heads"))
    needed = choose(problem_of(shared, batch=64)).weights_nbytes + then.cache_nbytes + begin.cost.working_nbytes
    tight = ways_here(problem_of(shared, capacity=0.999 * needed, batch=64))[0]
    assert tight.decode.attention == "batch"
    assert not ways_here(problem_of(shared, capacity=free.weights_nbytes, batch=64))


def test_the_choice_is_the_best_of_all() -> None:
    free = choose(problem_of(batch=64))
    assert free.total_s == pytest.approx(tried(problem_of(batch=64)), rel=1e-9) and free.gap < 1e-6
    seen = {free.total_s}
    for share in (0.95, 0.85, 0.3):  # of what the free choice holds
        tight = problem_of(capacity=free.nbytes * share, batch=64)
        best = tried(tight)
        if math.isinf(best):
            with pytest.raises(PartitionError):
                choose(tight)
            continue
        found = choose(tight)
        assert found.total_s == pytest.approx(best, rel=1e-9) and found.margin_nbytes >= 0
        seen.add(found.total_s)
    assert len(seen) == 3  # memory did bind


def test_both_phases_store_weights_alike_and_more_memory_never_costs_time() -> None:
    palm = PUBLISHED_SHAPES["palm-540b"]
    before = math.inf
    for capacity in (24e9, 27e9, 32e9, 64e9):
        problem = replace(problem_of(palm.model, (4, 4, 4), capacity, 64), prompt=1984, new_tokens=64, parallel=True)
        found = choose(problem)
        assert [w.wide for w in found.layouts[PREFILL]] == [w.wide for w in found.layouts[DECODE]]
        assert found.total_s <= before * (1 + 1e-9) and found.nbytes <= capacity
        before = found.total_s
    assert found.layouts[PREFILL][0].gathered and found.layouts[DECODE][0].feedforward == "2d"
    assert found.layouts[DECODE][0].attention == "batch"


def test_the_deficit_is_exact() -> None:
    """With as many bytes more as the message says it fits, with one less it does not."""
    capacity = 40e6
    with pytest.raises(PartitionError) as said:
        choose(problem_of(capacity=capacity))
    lacking = int(re.search(r"(\d+) bytes more", str(said.value))[1])  # type: ignore[index]
    assert choose(problem_of(capacity=capacity + lacking)).margin_nbytes < 1
    with pytest.raises(PartitionError):
        choose(problem_of(capacity=capacity + lacking - 8))


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ModelError, match="batch"):
        problem_of(batch=0)
    with pytest.raises(ModelError, match="memory"):
        problem_of(capacity=0.0)
