"""Weights that ranks gather before they are read: in which order, in which memory, and behind what."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import families
import pytest
from schedules import with_settings
from selection import without

from forebay.passes.lower.hoist_gathers import hoist_gathers
from forebay.read_mesh import read_mesh
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.draft import Arrive, Draft, Exchanged, Fetch, Free, Move
from forebay.rewriter.ir.gathers import GATHER_BUFFER
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Schedule, Workload
from forebay.rewriter.ir.program import COLLECT, COMPUTE, FileSlice, Launch, Program, Release, Span, Wait
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.gather_ahead import GatherAhead
from forebay.rewriter.machine.mesh_links import RING_STEPS, ExchangeLink, MeshLinks
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_ranks import plan_together, rank_planners
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.ranks import simulate_ranks
from forebay.rewriter.verify.program import ProgramError, verify_program

WORK, TOKENS = Workload(4, 8, 6), 8
LARGE = 4_500_000  # bytes in which of `large` some weights stay and others stream, beside what is gathered ahead
AT_ONCE = 2 * 256 * 512 * 4  # of its largest weight


@functools.cache
def model(family: str) -> CapturedModel:
    if family == "large":  # weights of more bytes than always stay
        return capture_model(families.llama(3, hidden_size=256, intermediate_size=512, head_dim=64))
    return families.captured(family)


@functools.cache
def ranks(family: str, mesh: str, budget: int = 8 << 20) -> list[tuple[Any, Plan]]:
    return planned(family, mesh, budget, Machine.default())


def planned(family: str, mesh: str, budget: int, machine: Machine) -> list[tuple[Any, Plan]]:
    captured, at, files = model(family), 0, {}
    for name, spec in captured.weights.items():
        files[name] = FileSlice("/nothing", at, spec.nbytes)
        at += spec.nbytes
    planners = rank_planners(captured, "", files, read_mesh(mesh), Budget(budget, 0), WORK,
                             Options(prefill_chunk=TOKENS), machine)
    return plan_together([planner for _, planner in planners])


def program(family: str, mesh: str, budget: int = 8 << 20, tokens: int = TOKENS) -> Program:
    pipeline, plan = ranks(family, mesh, budget)[0]
    found: Program = pipeline.program(plan, tokens)
    return found


def gathers(step: Program) -> list[Launch]:
    return [item for item in step.step if isinstance(item, Launch) and "all_gather" in item.op and item.layer >= 0]


def as_early(step: Program) -> int:
    """Gathers of weights that a step makes before the layer before theirs has ended."""
    found = layer = 0
    for item in step.step:
        if isinstance(item, Launch) and item.stream == COMPUTE and item.layer >= 0:
            layer = item.layer
        found += item in gathers(step) and item.layer > layer  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(("family", "mesh"), without([
    ("llama", "tensor=2,layout=xyz"), ("llama", "tensor=2x2,layout=x"), ("opt", "tensor=2x2,layout=xyz"),
    ("gpt2", "tensor=2,layout=xyz"), ("gpt_neox", "tensor=2x2,layout=x")], [
    ("llama", "tensor=2,layout=xyz"), ("opt", "tensor=2x2,layout=xyz"), ("gpt2", "tensor=2,layout=xyz"),
    ("gpt_neox", "tensor=2x2,layout=x")]))
def test_the_next_layers_weights_are_gathered_while_one_computes(family: str, mesh: str) -> None:
    """As many as when each is gathered where it is read, of the same bytes."""
    once, ahead = (program(family, f"{mesh},gather_buffers={n}") for n in (0, 2))
    assert sorted((g.label, g.writes[0].nbytes) for g in gathers(once)) == sorted(
        (g.label, g.writes[0].nbytes) for g in gathers(ahead))
    assert as_early(once) == 0 < as_early(ahead)
    early = [g for g in gathers(ahead) if g.writes[0].buffer.startswith(GATHER_BUFFER)]
    assert {g.reads[0].buffer for g in early} == {g.reads[0].buffer for g in gathers(ahead) if "weight" in
                                                  g.reads[0].buffer or "bias" in g.reads[0].buffer}
    first = next(i for i, item in enumerate(ahead.step) if item is early[0])
    assert not any(isinstance(item, Launch) for item in ahead.step[:first]), "the first waits for nothing"


@pytest.mark.parametrize(("family", "mesh", "buffers"), without([
    ("llama", "tensor=2x2,layout=x", 0), ("llama", "tensor=2x2,layout=x", 2), ("opt", "tensor=2x2,layout=x", 1),
    ("opt", "tensor=2,layout=xyz", 2), ("large", "tensor=2,layout=xyz", 0), ("large", "tensor=2,layout=xyz", 2)], [
    ("llama", "tensor=2x2,layout=x", 0), ("llama", "tensor=2x2,layout=x", 2), ("opt", "tensor=2,layout=xyz", 2),
    ("large", "tensor=2,layout=xyz", 2)]))
def test_every_wait_is_needed(family: str, mesh: str, buffers: int) -> None:
    """But that of the first gather for what computed before: a step of another kind, which no proof of this one
    sees."""
    large = family == "large"
    step = program(family, f"{mesh},gather_buffers={buffers}", LARGE + buffers * AT_ONCE if large else 8 << 20)
    fetched = [item for item in step.step if isinstance(item, Launch) and item.stream == COLLECT
               and item.reads[0].buffer.startswith("slot")]
    assert bool(fetched) is large
    waits = [i for i, item in enumerate(step.step) if isinstance(item, Wait) and item.stream in (COMPUTE, COLLECT)]
    first = next(i for i, item in enumerate(step.step) if isinstance(item, Launch))
    for i in waits:
        if buffers and i < first and step.step[i].stream == COLLECT and step.step[i - 1].stream == COMPUTE:
            continue
        with pytest.raises(ProgramError):
            verify_program(replace(step, step=(*step.step[:i], *step.step[i + 1 :])))


def test_steps_over_one_token_and_plans_without_memory_are_as_they_were() -> None:
    mesh = "tensor=2,layout=xyz"
    assert program("llama", f"{mesh},gather_buffers=2", tokens=1).step == program(
        "llama", f"{mesh},gather_buffers=0", tokens=1).step or gathers(program("llama", mesh, tokens=1)) == []
    draft = Draft("step", [Exchanged("a")])
    hoist_gathers(draft, _plan(0))
    assert draft.items == [Exchanged("a")]


@pytest.mark.all
def test_of_ranks_whose_links_work_by_themselves_prompts_take_less_time() -> None:
    """So the planner gives gathers memory; not where products wait as long as exchanges take."""
    links, mesh = tuple(ExchangeLink(kind, 2, 5e9, 1e-6) for kind in RING_STEPS), "tensor=2,layout=xyz"
    for overlap_penalty, taken in ((0.0, 2), (1.0, 0)):
        machine = replace(Machine.default(), mesh=MeshLinks(2, "gloo", "", links, overlap_penalty=overlap_penalty))
        took = []
        for asked in (f"{mesh},gather_buffers=0", f"{mesh},gather_buffers=2", mesh):
            found = planned("large", asked, 64 << 20, machine)
            took.append(simulate_ranks([pipeline.program(plan, TOKENS) for pipeline, plan in found], machine)[0].time_s)
        assert found[0][1].schedule.batching.gathering.buffers == taken
        assert took[1] < 0.8 * took[0] if taken else took[1] == pytest.approx(took[0])
        assert took[2] == pytest.approx(took[1])


def test_models_that_gather_nothing_and_other_layouts_are_refused() -> None:
    with pytest.raises(PlanError, match="leave gather_buffers out"):
        read_mesh("tensor=2x2,layout=2d,gather_buffers=2")
    with pytest.raises(PlanError, match="gather_buffers two must be"):
        read_mesh("tensor=2,layout=xyz,gather_buffers=two")
    pipeline, plan = ranks("llama", "tensor=2,layout=xyz,gather_buffers=2")[0]
    with pytest.raises(PlanError, match=r"gathering\.buffers: the model is to run with 2"):
        pipeline.replay(with_settings(plan, gathering={"buffers": 1}))
    small = tuple(replace(b, nbytes=b.nbytes // 2) if b.name == GATHER_BUFFER else b for b in plan.buffers)
    with pytest.raises(PlanError, match=GATHER_BUFFER):
        pipeline.replay(replace(plan, buffers=small))


def _plan(buffers: int) -> Plan:
    schedule = Schedule(1, 1, 1, (8,), False, BatchSchedule(gathering=GatherAhead(buffers)))
    return replace(ranks("llama", "tensor=2,layout=xyz,gather_buffers=2")[0][1], schedule=schedule)


def _gather(number: int, offset: int, nbytes: int, read: str = "w") -> Launch:
    return Launch(COLLECT, "all_gather", (), {}, (), (Span("device", 0, 8, read),),
                  (Span("device", offset, nbytes, f"{GATHER_BUFFER}:{number}"),), f"g{number}")


def _read(number: int) -> Launch:
    return Launch(COMPUTE, "linear", (), {}, (), (), (), f"p{number}")


def test_a_gather_comes_behind_the_last_reader_of_its_memory_with_what_it_reads() -> None:
    """Of three in turn the third lies where the first did; its operand is fetched, which moves with it."""
    given = [_gather(i, 64 * (i % 2), 64, "slot0:0" if i == 2 else "w") for i in range(3)]
    ends = [Release(COMPUTE, g.writes[0]) for g in given]
    fetched = [Fetch(0), Arrive(0, COLLECT), given[2], Free(0, COLLECT)]
    items = [x for i in range(3) for x in (
        *(fetched if i == 2 else [given[i]]), Exchanged(f"g{i}"), _read(i), ends[i])]
    source = Span("device", 0, 8, "w")
    draft = Draft("step", list(items), [Move("m", source, 0, Span("device", 0, 8, "slot0:0"), (0, 0))])
    hoist_gathers(draft, _plan(2))
    assert draft.items == [given[0], given[1], Exchanged("g0"), items[2], ends[0], *fetched, Exchanged("g1"), items[6],
                           ends[1], Exchanged("g2"), items[-2], ends[2]]
    other = [Fetch(1), Free(1)]  # a move of the step's before it: moves keep their order
    draft.items = [*items[:7], *other, *items[7:]]
    draft.moves.append(Move("n", source, 0, Span("device", 0, 8, "slot0:1"), (0, 0)))
    hoist_gathers(draft, _plan(2))
    assert draft.items.index(other[1]) < draft.items.index(fetched[0])


def test_memory_that_is_too_small_is_refused() -> None:
    one, two = _gather(0, 0, 64), _gather(1, 32, 64)
    draft = Draft("step", [one, two, Exchanged("g0"), Exchanged("g1"), _read(0), Release(COMPUTE, one.writes[0]),
                           Release(COMPUTE, two.writes[0])])
    with pytest.raises(PlanError, match=r"plan\.schedule\.batching\.gathering\.buffers: g1 is read while"):
        hoist_gathers(draft, _plan(2))
