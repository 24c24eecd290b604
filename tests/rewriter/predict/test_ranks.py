"""Predicted steps of ranks: exchanges cost what was measured, who waits for whom, and what meets nobody is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import families
import pytest

from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import Budget, Plan, Workload
from forebay.rewriter.ir.program import COLLECT, COMPUTE, FileSlice, Launch, Program, Record, Wait
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.ir.share import RankShare
from forebay.rewriter.machine.mesh_links import RING_STEPS, ExchangeLink, MeshLinks
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_ranks import plan_together, rank_planners
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.shard_captured import shard_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.ranks import beside_readers, simulate_ranks
from forebay.rewriter.predict.simulate import simulate
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.virtual import ItemCost
from forebay.runtime.devices.virtual_ranks import run_ranks

WORK = Workload(batch=6, prompt=8, new_tokens=4)
FREE = 1e18  # bytes per second


def machine(latency_s: float, slowed: float = 1.0) -> Machine:
    links = tuple(ExchangeLink(kind, 2, FREE, latency_s) for kind in RING_STEPS)
    return replace(Machine.default(), mesh=MeshLinks(2, "gloo", "", links, slowed, slowed))


@cache
def programs(tensor: int, stages: int, batching: BatchSchedule = BatchSchedule()) -> tuple[Program, ...]:  # noqa: B008
    """A decode step of each rank of an OPT of two layers."""
    whole, found = families.captured("opt"), []
    for rank in range(tensor * stages):
        part = rewrite_captured(shard_captured(whole, RankShare((tensor,), rank, stages), Switches())[0], Switches())
        files = {name: FileSlice("weights", 64 * i, spec.nbytes) for i, (name, spec) in enumerate(part.weights.items())}
        pipeline = Pipeline(step_graphs(part, files, WORK, f"opt {rank} of {tensor} {stages}", batching=batching), WORK,
                            Machine.default(), Switches())
        found.append(pipeline.program(pipeline.plan(Budget(device=2 << 20)), 1))
    return tuple(found)


def alone_s(program: Program) -> float:
    return simulate(program, machine(0.0)).time_s


def test_an_exchange_takes_what_was_measured_of_it() -> None:
    (one, _) = programs(2, 1)
    count = sum(isinstance(i, Launch) and i.stream == COLLECT for i in one.step)
    assert count == 5  # two of each layer, and logits
    assert simulate(one, machine(1e-3)).time_s == pytest.approx(alone_s(one) + count * 1e-3)
    slow = replace(machine(0.0), mesh=MeshLinks(2, "gloo", "", tuple(
        ExchangeLink(kind, 2, 1e6, 0.0) for kind in RING_STEPS)))
    moved = sum(s.nbytes for i in one.step if isinstance(i, Launch) and i.stream == COLLECT for s in i.writes)
    assert simulate(one, slow).time_s == pytest.approx(alone_s(one) + moved / 1e6)
    guessed = simulate(one, Machine.default()).time_s
    assert guessed > alone_s(one) + count * 5e-4, "unmeasured ones are guessed cautiously, not free"


def test_ranks_that_share_a_layer_take_as_long_as_one_of_them() -> None:
    both = programs(2, 1)
    lines = simulate_ranks(both, machine(1e-3))
    for line, program in zip(lines, both, strict=True):
        assert line.time_s == pytest.approx(alone_s(program) + 5e-3, rel=0.01)
        assert line.exchange_s == pytest.approx(5e-3) and line.waiting_s == pytest.approx(5e-3, rel=0.01)
    slowed = simulate_ranks(both, machine(1e-3, slowed=3.0))
    assert slowed[0].compute_s == pytest.approx(3 * lines[0].compute_s, rel=0.02)


def test_ranks_slow_each_other_as_far_as_they_compute_at_the_same_time() -> None:
    """Stages that take turns but for what stands before the layers, and in micro-batches most of the time."""
    pair, thirds = programs(1, 2), programs(1, 2, BatchSchedule(MicroBatches(3, "zigzag")))
    for ranks, least, most in ((pair, 1.0, 1.3), (thirds, 1.5, 2.7)):
        free, slowed = (simulate_ranks(ranks, machine(0.0, slowed=by)) for by in (1.0, 3.0))
        for one, other in zip(free, slowed, strict=True):
            assert least <= other.compute_s / one.compute_s <= most


@pytest.mark.parametrize(("ranks", "measured", "slowed"), [(2, 2, 2.0), (4, 2, 4.0), (2, 4, 2.0)])
def test_plans_of_ranks_know_that_all_read_one_disk(ranks: int, measured: int, slowed: float) -> None:
    """A rank by itself is predicted to take as long as all of them together, where reads bind them; those of a
    disk that gives a constant rate, as ranks measured it."""
    disk = 2e6  # bytes per second
    alone = machine(0.0)
    alone = replace(alone, links=tuple(replace(link, bandwidth_bytes_per_s=disk) if link.src == "disk" else link
                                       for link in alone.links))
    known = replace(alone, mesh=replace(alone.mesh, ranks=measured, reads_slowed=float(measured)))
    assert beside_readers(known, ranks).link("disk", "device").bandwidth_bytes_per_s == pytest.approx(disk / slowed)
    assert beside_readers(alone, ranks) == alone == beside_readers(alone, 1)
    whole = families.captured("opt")
    files = {spec.name: FileSlice("/nothing", i << 24, spec.nbytes) for i, spec in enumerate(whole.weights.values())}

    def plans(nbytes: int) -> list[tuple[Pipeline, Plan]]:
        planners = rank_planners(whole, "", files, RankShare((ranks,), 0), Budget(nbytes, 0), WORK, Options(), known)
        return plan_together([planner for _, planner in planners])

    planned = plans(max(pipeline.smallest_budget() for pipeline, _ in plans(1 << 24)))
    prediction = planned[0][1].prediction
    assert prediction.streamed_nbytes > 0
    found = simulate_ranks([pipeline.program(plan, 1) for pipeline, plan in planned], replace(
        known, mesh=replace(known.mesh, reads_slowed=slowed)))
    assert prediction.decode_time_s == pytest.approx(found[0].time_s, rel=0.15)
    assert prediction.decode_time_s > 0.9 * slowed * prediction.streamed_nbytes / disk


def test_the_slower_rank_is_waited_for() -> None:
    """One that computes three times as long, with the other as it is."""
    one, other = programs(2, 1)
    slow = Program(**{f: getattr(other, f) for f in other.__dataclass_fields__} | {"step": tuple(
        again for item in other.step for again in ([item] * 3 if isinstance(item, Launch) and item.stream != COLLECT
                                                   else [item]))})
    lines = simulate_ranks((one, slow), machine(1e-3))
    assert alone_s(slow) > 1.5 * alone_s(one)
    assert lines[0].time_s == pytest.approx(lines[1].time_s, rel=0.01)
    assert lines[1].time_s == pytest.approx(alone_s(slow) + 5e-3, rel=0.01)
    assert lines[0].waiting_s == pytest.approx(lines[1].waiting_s + alone_s(slow) - alone_s(one), rel=0.05)


def test_stages_follow_one_another_and_overlap_in_micro_batches() -> None:
    pair = programs(1, 2)
    lines = simulate_ranks(pair, machine(1e-3))
    together = alone_s(pair[0]) + alone_s(pair[1]) + 2e-3
    assert [line.time_s for line in lines] == [pytest.approx(together, rel=0.02)] * 2
    thirds = programs(1, 2, BatchSchedule(MicroBatches(3, "zigzag")))
    apart = alone_s(thirds[0]) + alone_s(thirds[1])
    overlapped = simulate_ranks(thirds, machine(0.0))[0].time_s
    assert max(map(alone_s, thirds)) < overlapped < 0.85 * apart
    four = simulate_ranks(programs(2, 2), machine(1e-3))
    assert len({round(line.time_s, 6) for line in four}) == 1


def test_ranks_that_never_meet_are_refused() -> None:
    one, other = programs(2, 1)
    less = Program(**{f: getattr(other, f) for f in other.__dataclass_fields__} | {"step": tuple(
        i for i in other.step if not (isinstance(i, Launch) and i.stream == COLLECT and i.layer == 1))})
    with pytest.raises(ValueError, match="do not exchange alike"):
        simulate_ranks((one, less), machine(1e-3))


def test_what_is_computed_beside_an_exchange_is_held_up_by_it() -> None:
    """One of 2 ms between two launches, of which nobody waits for it until both are done."""
    def launch(stream: str, label: str) -> Launch:
        return Launch(stream, "all_reduce", ("ranks:0,1",), {}, (), (), (), label, 0)

    step = (launch(COMPUTE, "before"), Record(COMPUTE, 1), Wait(COLLECT, 1), launch(COLLECT, "sums"),
            Record(COLLECT, 2), launch(COMPUTE, "beside"), Wait(COMPUTE, 2), launch(COMPUTE, "behind"))
    program = Program("step", step, (), {}, {}, {}, {})
    seconds = {"before": 1e-3, "sums": 2e-3, "beside": 3e-3, "behind": 1e-3}
    for penalty, beside_s, expected in ((0.0, 3e-3, 5e-3), (0.5, 3e-3, 6e-3), (1.0, 3e-3, 7e-3), (1.0, 5e-4, 4.5e-3),
                                        (0.0, 5e-4, 4e-3)):
        took = seconds | {"beside": beside_s}
        ran = run_ranks([program] * 2, [lambda item, took=took: ItemCost(took[item.label])] * 2, 1, [0.0] * 2, penalty)
        assert [ends[-1] for ends, _ in ran] == [pytest.approx(expected)] * 2, (penalty, beside_s)
