"""Attention over caches in host memory runs there, and only its operands and results cross."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from families import rewritten

from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import (
    ATTEND,
    COMPUTE,
    HOST,
    Copy,
    FileSlice,
    Launch,
    Program,
    Record,
    Release,
    Rows,
    Wait,
    tier_of,
)
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches

WORK = Workload(12, 30, 10)
Made = Callable[[BatchSchedule], tuple[Program, Plan, Pipeline]]


@pytest.fixture(scope="module")
def made() -> Made:
    lm = rewritten("llama")
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}

    def program(batching: BatchSchedule) -> tuple[Program, Plan, Pipeline]:
        graphs = step_graphs(lm, files, WORK, "llama", batching=batching)
        pipeline = Pipeline(graphs, WORK, Machine.default(), Switches())
        plan = pipeline.plan(Budget(1 << 24, 1 << 24), Options(prefill_chunk=20))
        return pipeline.program(plan, 1), plan, pipeline

    return program


def test_no_cache_of_the_host_crosses_in_a_decode_step(made: Made) -> None:
    """Operands and results alone: less for any length of the cache, and as the closed form counts them."""
    program, _, pipeline = made(BatchSchedule(MicroBatches(3, "zigzag"),
                                              CachePlacement("host", 16, 3, cpu_attention=True)))
    delegated = [item for item in program.step if isinstance(item, Launch) and item.stream == ATTEND]
    assert pipeline.needs.staged is not None
    assert len(delegated) == 2 * 3 * len(pipeline.needs.staged.layers)  # appends and attention
    crossing = [item for item in program.step if isinstance(item, Copy) and HOST in (tier_of(item.src), tier_of(
        item.dst))]
    assert crossing and not any(isinstance(end, Rows) for item in crossing for end in (item.src, item.dst))
    found: dict[tuple[str, str], int] = {}
    for item in crossing:
        link = tier_of(item.src), tier_of(item.dst)
        found[link] = found.get(link, 0) + item.dst.nbytes
    moves = pipeline.needs.staged.moves(WORK, 1)
    assert found == moves.nbytes and len(crossing) == moves.copies
    cached, _, other = made(BatchSchedule(MicroBatches(3, "zigzag"), CachePlacement("host", 16, 3)))
    assert other.needs.staged is not None
    assert sum(found.values()) < 0.5 * sum(other.needs.staged.moves(WORK, 1).nbytes.values())
    assert any(isinstance(end, Rows) for item in cached.step if isinstance(item, Copy) for end in (item.src,))


def test_operands_end_before_others_may_take_their_memory(made: Made) -> None:
    """A poisoned end that came after the record would hit what is copied there next."""
    program, _, _ = made(BatchSchedule(MicroBatches(2, "zigzag"), CachePlacement("host", 16, 3, cpu_attention=True)))
    items = [item for item in program.step if item.stream == ATTEND and not isinstance(item, Wait)]
    kinds = "".join({Launch: "L", Release: "R", Record: "E"}[type(item)] for item in items)  # type: ignore[index]
    assert re.fullmatch("(LR+E)+", kinds)


def test_the_device_computes_for_others_while_the_host_attends(made: Made) -> None:
    """In zigzag order all micro-batches come to attention before the first one's result is read."""
    program, _, _ = made(BatchSchedule(MicroBatches(4, "zigzag"), CachePlacement("host", 16, 3, cpu_attention=True)))
    labels = [(item.stream, item.label) for item in program.step if isinstance(item, Launch)]
    for layer in (0, 1):
        attended = [labels.index((ATTEND, f"layer{layer}_attention@{k}")) for k in range(4)]
        products = [i for i, (stream, label) in enumerate(labels)
                    if stream == COMPUTE and label.startswith(f"layer{layer}_") and label.endswith("@0")]
        behind = [i for i in products if i > attended[0]]
        assert behind and min(behind) > attended[3]
        between = labels[attended[0] : min(behind)]
        assert any(stream == COMPUTE and label.endswith("@2") for stream, label in between)


@pytest.mark.parametrize(("batching", "expected"), [
    (BatchSchedule(MicroBatches(2), CachePlacement("disk", 16, 3, cpu_attention=True)), 0),
    (BatchSchedule(MicroBatches(2), CachePlacement("host", 16, 3)), 0),
    (BatchSchedule(MicroBatches(2), CachePlacement("disk", 16, 3, 1, 2, True)), 2),
    (BatchSchedule(MicroBatches(2)), 0)])
def test_other_caches_are_left_alone(made: Made, batching: BatchSchedule, expected: int) -> None:
    program, plan, pipeline = made(batching)
    attending = [i for i in program.step if isinstance(i, Launch) and i.stream == ATTEND]
    assert len(attending) == 2 * expected
    prefill = pipeline.program(plan, plan.schedule.prefill_chunk)
    assert not any(isinstance(i, Launch) and i.stream == ATTEND for i in prefill.step)
    host = {b.name for b in plan.buffers if b.arena == HOST and b.kind == "io"}
    assert host == ({f"operands{k}" for k in range(2)} if expected else set())


def test_host_memory_for_operands_that_is_too_small_is_refused(made: Made) -> None:
    _, plan, pipeline = made(BatchSchedule(MicroBatches(2, "zigzag"),
                                           CachePlacement("host", 16, 3, cpu_attention=True)))
    sizes = [b.nbytes for b in plan.buffers if b.name == "operands0"]
    assert sizes and math.prod(sizes) > 0
    smaller = replace(plan, buffers=tuple(
        replace(b, nbytes=64) if b.name.startswith("operands") else b for b in plan.buffers))
    with pytest.raises(PlanError, match="operands of layer 0 take more than operands0 of 64 bytes"):
        pipeline.program(smaller, 1)
