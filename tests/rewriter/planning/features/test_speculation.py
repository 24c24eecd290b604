"""Whether steps check drafts, and over how many tokens: where that costs nothing, and never where it costs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from families import rewritten
from selection import without

from forebay.rewriter.capture.step_graphs import StepGraphs, step_graphs
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload, validate
from forebay.rewriter.ir.program import Copy, FileSlice
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import finish, plan_batch
from forebay.rewriter.pipeline.plan_shared_draft import checking_drafts
from forebay.rewriter.pipeline.plan_task import PlanTask
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.features.speculation import VERIFY_SIZES
from forebay.rewriter.planning.options import Options, check_choices
from forebay.rewriter.switches import Switches

pytestmark = pytest.mark.usefixtures("planned_with_our_kernels")
WORK = Workload(1, 40, 24)


@functools.cache
def pipeline(work: Workload = WORK, batching: BatchSchedule = ALONE, family: str = "llama") -> Pipeline:
    lm = rewritten(family)
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    return Pipeline(step_graphs(lm, files, work, family, batching=batching), work, Machine.default(), Switches())


def speculated(made: Pipeline, plain: Plan, budget: Budget, options: Options) -> tuple[Pipeline, Plan]:
    """What comes of a plan without such steps, or of its pipeline, where a number of drafted tokens is asked for."""
    if isinstance(options.prompt_lookup_num_tokens, int):
        checking = checking_drafts(made, options)
        return checking, checking.plan(budget, options)

    def graphs_of(work: Workload, batching: BatchSchedule) -> StepGraphs:
        return pipeline(work, batching).graphs

    return finish(PlanTask(graphs_of, budget, made.workload, options, made.machine, made.switches), (made, plain))


def planned(room: int, options: Options, work: Workload = WORK, batching: BatchSchedule = ALONE) -> tuple[Plan, Plan,
                                                                                                        Pipeline]:
    """The plan without and with what is decided here, `room` bytes above the least budget."""
    made = pipeline(work, batching)
    budget = Budget(made.smallest_budget(options) + room)
    plain = made.plan(budget, options)
    found, plan = speculated(made, plain, budget, options)
    return plain, plan, found


@pytest.mark.parametrize(("free", "loss"), [(1.5, 1.5), (1.2, 1.3), (1.05, 1.02)])
def test_steps_that_cost_little_check_drafts_by_themselves(
    free: float, loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside weights as few as a tiny model's the memory of drafts is much; with these bounds some pay."""
    import forebay.rewriter.planning.features.speculation as module

    monkeypatch.setattr(module, "MAX_VERIFY_RATIO", free)
    monkeypatch.setattr(module, "MAX_DECODE_REGRESSION", loss)
    plain, plan, found = planned(150_000, Options(prompt_lookup_num_tokens="auto"))
    assert set(plan.schedule.speculative_steps) <= set(VERIFY_SIZES)
    assert all(t <= free * plain.prediction.decode_time_s for t in plan.prediction.speculative_times_s)
    assert plan.prediction.decode_time_s <= loss * plain.prediction.decode_time_s
    assert plan.budget == plain.budget and sum(plan.prediction.peak_nbytes.values()) <= plan.budget.device
    assert plan.schedule.speculative_steps or free < 1.5, "none was found to pay whatever it may cost"
    for tokens in plan.schedule.speculative_steps:
        program = found.program(plan, tokens)
        assert program.outputs["out0"].shape == (1, tokens, 199)
        assert program.moved_nbytes() == found.program(plan, 1).moved_nbytes(), "a step brings other weights"


def test_where_nothing_is_asked_for_the_plan_stays() -> None:
    plain, plan, _ = planned(100_000, Options())
    assert plan is plain and not plan.schedule.speculative_steps


def test_dearer_steps_are_taken_where_they_are_forced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import forebay.rewriter.planning.features.speculation as module

    monkeypatch.setattr(module, "MAX_VERIFY_RATIO", 0.5)
    plain, plan, _ = planned(100_000, Options(prompt_lookup_num_tokens="auto"))
    assert plan is plain
    _, plan, _ = planned(100_000, Options(prompt_lookup_num_tokens=6))
    assert plan.schedule.speculative_steps == (7, 4, 2)


def test_memory_that_would_make_decoding_slower_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import forebay.rewriter.planning.features.speculation as module

    monkeypatch.setattr(module, "MAX_DECODE_REGRESSION", 0.5)
    plain, plan, _ = planned(100_000, Options(prompt_lookup_num_tokens="auto"))
    assert plan is plain


def test_a_budget_without_room_for_them_has_no_such_steps() -> None:
    options = Options(prompt_lookup_num_tokens="auto", prefill_chunk=1)
    made = pipeline(Workload(4, 2, 60))
    budget = Budget(made.smallest_budget(options))
    plain = made.plan(budget, options)
    assert speculated(made, plain, budget, options)[1] is plain
    with pytest.raises(PlanError, match="cannot work"):
        speculated(made, plain, budget, replace(options, prompt_lookup_num_tokens=40))


def test_caches_off_the_device_keep_their_shares_in_such_steps() -> None:
    """Caches of layers that lie on the device, and of those that come to it; both in host memory, which has room for
    what the largest step has the host attend to."""
    work, options = Workload(2, 40, 24), Options(prompt_lookup_num_tokens=3)
    shared = BatchSchedule(MicroBatches(2, "zigzag"), CachePlacement("disk", 16, 3, 1, 2))
    for batching in (shared, BatchSchedule(MicroBatches(2, "zigzag"), CachePlacement("host", 16, 3)),
                     BatchSchedule(MicroBatches(2, "zigzag"), CachePlacement("host", 16, 3, cpu_attention=True))):
        made = pipeline(work,
                        replace(batching,
                                cache=replace(batching.cache, on_device=0, on_host=0))).with_batching(batching)
        budget = Budget(made.smallest_budget(options) + 200_000, 1 << 22)
        plain = made.plan(budget, options)
        found, plan = speculated(made, plain, budget, options)
        assert plan.schedule.batching == replace(batching, speculation=replace(batching.speculation, steps=(4, 2)))
        assert found.needs.staged is not None
        rooms = [{b.name: b.nbytes for b in p.buffers if b.name.startswith("operands")} for p in (plain, plan)]
        assert bool(rooms[0]) == batching.cache.cpu_attention and rooms[0].keys() == rooms[1].keys()
        assert all(rooms[1][name] > 2 * nbytes for name, nbytes in rooms[0].items())
        loads = [item for item in found.program(plan, 4).step
                 if isinstance(item, Copy) and item.label.startswith("load cache")]
        tiers = [tier for homes in batching.cache_homes(len(found.needs.staged.layers)) for tier in homes]
        staged = sum(tier == "disk" or (tier == "host" and not batching.cache.cpu_attention) for tier in tiers)
        assert len(loads) == staged


@pytest.mark.parametrize("batching",
                         [BatchSchedule(MicroBatches(1), admission=Admission(1)),
                          BatchSchedule(MicroBatches(2), admission=Admission(2))])
def test_steps_over_all_places_check_drafts_where_sequences_enter(batching: BatchSchedule) -> None:
    """They are decode steps, of all slots; a prompt's are of those that enter, whose rows alone are staged."""
    work = Workload(4, 40, 24)
    _, plan, made = planned(300_000, Options(prompt_lookup_num_tokens=3, prefill_chunk=16), work, batching)
    assert plan.schedule.speculative_steps == (4, 2)
    each = work.batch // batching.micro_batches.count
    for tokens, rows in ((1, each), (4, each), (2, each), (16, batching.admitted)):
        step = made.graphs.step(tokens)
        ids = next(n for n in step.graph.find_nodes(op="placeholder") if n.target == "input_ids").meta["val"]
        assert ids.shape == (rows, tokens)
        taken = [launch.label for launch in made.program(plan, tokens).launches() if "_take_" in (launch.label or "")]
        assert bool(taken) == (tokens == 16)


CHUNKS = [(prompt, drafted) for prompt in (3, 4, 16, 17, 40) for drafted in ("auto", 1, 3, 15)] + [(2, "auto")]
# A step over 2, 4 or 16 tokens beside a chunk of as many, of one less and of one more.
BESIDE = [(3, 1), (16, 15), (17, 15), (40, "auto"), (2, "auto")]


@pytest.mark.parametrize(("prompt", "drafted"), without(CHUNKS, [each for each in CHUNKS if each not in BESIDE]))
def test_the_shortest_chunk_is_no_step_that_checks(prompt: int, drafted: Any) -> None:
    """Where sequences enter it is over 16 tokens, or as many as the prompt has; a budget without room says so."""
    work, options = Workload(2, prompt, 24), Options(prompt_lookup_num_tokens=drafted)
    made = pipeline(work, BatchSchedule(admission=Admission(1)))
    budget = Budget(made.smallest_budget(options))
    plain = made.plan(budget, options)
    try:
        _, plan = speculated(made, plain, budget, options)
    except PlanError as error:
        assert drafted != "auto" and ("cannot work" in str(error) or "leave none for a prompt" in str(error))
    else:
        assert plan is plain or not set(plan.schedule.speculative_steps) & set(plan.schedule.prefill_chunks)
        assert plan is plain or drafted != "auto" or plan.prediction.decode_time_s <= 1.02 * (
            plain.prediction.decode_time_s)
    wide = Budget(budget.device + 1_000_000)
    _, plan = speculated(made, made.plan(wide, options), wide, options)
    assert plan.schedule.speculative_steps or drafted == "auto"


def test_pieces_as_large_as_without_such_steps_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a little less memory the planner may take others, with which a decode step takes more than is allowed."""
    made, options, larger = pipeline(), Options(prompt_lookup_num_tokens="auto"), 0
    for room in range(300_000, 312_000, 4_000):
        budget = Budget(made.smallest_budget(options) + room)
        plain = made.plan(budget, options)
        with monkeypatch.context() as patch:
            patch.setattr("forebay.rewriter.planning.features.speculation._in_slots_of", lambda *_: None)
            without = speculated(made, plain, budget, options)[1].schedule.speculative_steps
        plan = speculated(made, plain, budget, options)[1]
        assert set(plan.schedule.speculative_steps) >= set(without)
        assert plan.prediction.decode_time_s <= 1.02 * plain.prediction.decode_time_s
        larger += plan.schedule.speculative_steps != without
    assert larger >= 2


def test_one_token_leaves_nothing_to_draft() -> None:
    with pytest.raises(PlanError, match="steps over 2 tokens compute the prompt, in chunks of as many"):
        planned(100_000, Options(prompt_lookup_num_tokens=1, prefill_chunk=2), Workload(1, 40, 24))
    with pytest.raises(PlanError, match="leaves nothing to draft"):
        planned(100_000, Options(prompt_lookup_num_tokens=3), Workload(1, 40, 1))
    with pytest.raises(PlanError, match="prompt_lookup_num_tokens must be at least 1"):
        check_choices(WORK, Options(prompt_lookup_num_tokens=0))


@pytest.mark.parametrize("prompt", [4, 8, 16, 36])
def test_chunks_have_other_sizes(prompt: int) -> None:
    _, plan, _ = planned(150_000, Options(prompt_lookup_num_tokens=15), Workload(2, prompt, 30))
    assert plan.schedule.speculative_steps and not set(plan.schedule.speculative_steps) & set(
        plan.schedule.prefill_chunks)
    assert plan.schedule.prefill_chunk == prompt, "the prompt runs in smaller chunks for the sake of drafts"


def test_no_budget_is_sought_where_the_chunk_is_a_step_that_checks() -> None:
    made = pipeline(Workload(1, 4, 24)).with_speculative((4, 2))
    with pytest.raises(PlanError, match=r"prefill_chunk: steps over \(4, 2\) tokens check drafts"):
        made.smallest_budget(Options(prefill_chunk=32))


@pytest.mark.parametrize(("drafted", "steps"), [(3, (4, 2)), (1, (2,))])
@pytest.mark.parametrize("prompt", [1, 2])
def test_a_short_prompt_that_enters_is_computed_by_a_prefill_step(
    prompt: int, drafted: int, steps: tuple[int, ...]
) -> None:
    """A prefill step has at least 3 tokens: steps over one decode, and those over two may check drafts."""

    def graphs_of(work: Workload, batching: BatchSchedule) -> Any:
        return pipeline(work, batching).graphs

    work, options = Workload(1, prompt, 24), Options(prompt_lookup_num_tokens=drafted, admitted=1)
    _, plan = plan_batch(PlanTask(graphs_of, Budget(1 << 24), work, options, Machine.default(), Switches()))
    assert plan.schedule.speculative_steps == steps and plan.schedule.prefill_chunk == 3


@pytest.mark.parametrize(("steps", "message"), [
    ((4, 8), "the largest first"), ((8, 1), "none below 2"), ((40, 4), "none a prefill's"), ((100,), "has room for")])
def test_contradictions_are_refused_by_name(steps: tuple[int, ...], message: str) -> None:
    _, plan, _ = planned(150_000, Options(prompt_lookup_num_tokens=7))
    with pytest.raises(PlanError, match=f"plan.schedule.batching.speculation.steps.*{message}"):
        batching = replace(plan.schedule.batching, speculation=replace(plan.schedule.batching.speculation, steps=steps))
        validate(replace(plan, schedule=replace(plan.schedule, batching=batching)))


def test_a_model_that_cannot_says_so() -> None:
    graphs: Any = pipeline().graphs
    assert graphs.speculating(()) is graphs
    with pytest.raises(PlanError, match="logits of one token only"):
        replace(graphs, speculate=None).speculating((4,))
    assert graphs.speculating((4,)).batching.speculation.steps == (4,)
