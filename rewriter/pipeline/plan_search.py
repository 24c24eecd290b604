"""The search for a plan: schedules that features propose, what the closed form says of each, the simulation of a few,
the choice, and what features better then. Of a job the number of slots is chosen so too."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.pipeline.plan_task import Planned, PlanTask
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.features.admission import admitted_at_once, slot_counts
from forebay.rewriter.planning.features.cache_placement import asked_shares, in_shares
from forebay.rewriter.planning.features.feature import Trial
from forebay.rewriter.planning.features.sparsity import NO_SCHEDULE
from forebay.rewriter.planning.features.table import FEATURES
from forebay.rewriter.planning.objective import latency_s, sequence_time_s
from forebay.rewriter.planning.options import MemoryTier, Options
from forebay.rewriter.planning.planner import make_plan, plan_fits

BATCHES = (1, 4, 16, 64, 256)  # between latency and throughput
MAX_CLOSED_FORM_RATIO = 1.5  # times the least of the closed form: what it finds slower is not simulated
MIN_SAVING = 0.02  # of the closed form's time, that more micro-batches must save to be simulated
# times the best of such ways, and of other kinds, by what the closed form errs at least
MAX_LIKELY_RATIO, MAX_LIKELY_RATIO_OTHERS = 1.25, 2.0
MAX_BLOCKS = 512  # layers times micro-batches that are simulated where fewer may do as well
MAX_OTHER_SHARES = 4  # other shares of a number of micro-batches that are simulated
MIN_STAGED_JOB_S = 60.0  # a shorter job is done before ways with caches on slower tiers are compared


def plan_batch(task: PlanTask) -> Planned:
    """The plan for (at least) the batch of the workload, and the pipeline of its Programs: see `ScheduleSearch`."""
    return ScheduleSearch(task).best()


def plan_answers(task: PlanTask) -> Planned:
    """The plan for sequences that need not all be computed at once. They are where their cache fits the device; else it
    is as `plan_slots` finds, unless an option says how many are."""
    options = task.options
    try:
        tier = options.cache_tier if options.admitted else options.cache_tier or "device"
        return plan_batch(replace(task, options=replace(options, cache_tier=tier)))
    except PlanError:
        if options.admitted or options.cache_tier in ("host", "disk") or options.micro_batches:
            raise
    return plan_slots(task)


def plan_slots(task: PlanTask, slots: int | None = None) -> Planned:
    """The plan for a job of as many sequences as the batch of the workload, and the pipeline of its Programs.

    Unless all find room at once, and no way with fewer slots is faster, its batch is a number of slots that sequences
    are admitted to and leave. The numbers of `slot_counts` are planned (or `slots` alone), and the one whose Programs
    are predicted to take least time a sequence is taken. With `rounds`, all that are computed begin together. Numbers
    whose cache the device cannot hold have it on slower tiers too, for a job that takes `MIN_STAGED_JOB_S` else: from
    the fewest on, as long as more are faster. Where none fits, the fewest are computed in rounds, which need less than
    slots that are admitted to. PlanError if these do not fit either.
    """
    count, options = task.workload.batch, task.options
    sizes = [min(slots, count)] if slots else slot_counts(count)

    def planned(size: int, tier: MemoryTier | None, rounds: bool = options.rounds) -> Planned:
        whole = size == count and not options.keeps_prompts  # what begins together computes what it begins with anew
        together = None if whole or rounds else options.admitted or admitted_at_once(size)
        return plan_batch(task.for_batch(size, cache_tier=tier, rounds=rounds, admitted=together or options.admitted))

    found: list[Planned] = []
    larger, refused = [], None
    for size in sizes:
        try:
            found.append(planned(size, options.cache_tier or "device"))
        except PlanError as error:
            refused = error
            larger.append(size)
    least = min((sequence_time_s(plan) for _, plan in found), default=math.inf)
    staging = options.cache_tier is None and least * count > MIN_STAGED_JOB_S
    for size in reversed(larger) if staging else ():
        try:
            found.append(planned(size, None))
        except PlanError as error:
            refused = error
            break
        if least <= (time_s := sequence_time_s(found[-1][1])):
            break
        least = time_s
    if not found:
        assert refused is not None
        if sizes[-1] == count or options.rounds or options.admitted:
            raise refused
        found.append(planned(sizes[-1], options.cache_tier, rounds=True))
    return min(found, key=lambda way: sequence_time_s(way[1]))


def plan_batches(task: PlanTask) -> list[Plan]:
    """Plans for the same prompts and answers, from one sequence at once to many; those that fit no budget are left out.
    """
    found = []
    for batch in BATCHES:
        with contextlib.suppress(PlanError):
            found.append(plan_batch(task.for_batch(batch))[1])
    return found


def finish(task: PlanTask, planned: Planned) -> Planned:
    """The plan of a batch that is chosen, after each feature tried what it may better then."""
    search = ScheduleSearch(replace(task, workload=planned[1].workload))
    return search.tried(planned, [feature.finish for feature in FEATURES])


class ScheduleSearch:
    """The search for the schedule of a batch within a budget: candidates, what the closed form says of them, the
    simulation of a few, and the choice."""

    def __init__(self, task: PlanTask) -> None:
        self.task = task
        self.planned: list[Planned] = []
        self.refused: list[tuple[Pipeline, PlanError]] = []

    def best(self) -> Planned:
        """Find the schedule whose Programs are predicted to take prompt and answer the least time, and its plan.

        A cache that fits the device stays there. For one that does not, micro-batches of several sizes are compared,
        each with several shares of its caches on faster tiers, by the closed form, and with a GPU each with attention
        to what lies in host memory on either side; of those a few near the best are simulated (`_try_near`). Then each
        feature tries what it may better (`ScheduleFeature.improve`).

        Raises:
            PlanError: None fits; it is that of the schedule that fits the smallest budget.
        """
        options = self.task.options
        for batching in self.task.schedules() if options.cache_tier in (None, "device") else ():
            self._simulated(self.task.pipeline(batching), options)
        if not self.planned:
            self._try_staged()
        if not self.planned:
            if not self.refused:
                raise PlanError(NO_SCHEDULE)
            if len(self.refused) == 1:
                raise self.refused[0][1]
            raise min(self.refused, key=lambda pair: _smallest_budget(pair[0], options))[1]
        best = min(self.planned, key=lambda pair: latency_s(pair[1]))
        return self.tried(best, [feature.improve for feature in FEATURES])

    def tried(
        self, best: Planned, features: Sequence[Callable[[Plan, Trial], Plan]], *, closed: bool = False
    ) -> Planned:
        """The best after each feature tried other schedules, whose Programs are simulated, or by the closed form."""
        task, (pipeline, plan) = self.task, best
        self.planned.append(best)
        trial = Trial(self.closed_form if closed else self.simulate, task.options, task.machine,
                      pipeline.needs.rates.bytes_per_s, task.graphs_of(task.workload, ALONE))
        for improve in features:
            plan = improve(plan, trial)
        return next(pair for pair in self.planned if pair[1] is plan)

    def simulate(self, batching: BatchSchedule, options: Options | None = None) -> Plan | None:
        """The plan of a schedule, whose Programs are simulated; None where there is none, or the model has no such
        steps."""
        try:
            pipeline = self.task.pipeline(batching)
        except PlanError:
            return None
        return self._simulated(pipeline, options or self.task.options)

    def closed_form(self, batching: BatchSchedule) -> Plan | None:
        """The plan of a schedule with staged caches by the closed form; None where there is none."""
        task = self.task
        with contextlib.suppress(PlanError):
            pipeline = task.pipeline(batching)
            staged = pipeline.needs.staged
            assert staged is not None
            needs = pipeline.needs.staging(staged.layers, batching, task.workload)
            self.planned.append((pipeline, make_plan(needs, task.budget, task.workload, task.options,
                                                     task.machine.name)))
            return self.planned[-1][1]
        return None

    def _simulated(self, pipeline: Pipeline, options: Options) -> Plan | None:
        try:  # layers that cannot share addresses take more than was known
            self.planned.append((pipeline, pipeline.plan(self.task.budget, options)))
        except PlanError as error:
            self.refused.append((pipeline, error))
            return None
        return self.planned[-1][1]

    def _try_staged(self) -> None:
        """Simulate the ways near the best of those with caches that come to the device for their turns."""
        ways: list[Way] = []
        options = self.task.options
        for batching in self.task.schedules(staged=True):
            pipeline = self.task.pipeline(batching)
            best: dict[tuple[int, bool, bool], Way] = {}
            for way in _in_shares(self.task, pipeline):
                cache = way.batching.cache
                at = cache.on_host, cache.cpu_attention, cache.in_place
                best[at] = min(best.get(at, way), way, key=lambda way: way.time_s)
            ways += best.values()
            if not best:
                self._simulated(pipeline.with_batching(asked_shares(batching, _layers(pipeline), options)), options)
        known: list[tuple[float, float]] = []  # seconds as simulated, and by the closed form
        for attends in (False, True):  # where the host attends, the closed form says less of what waits for what
            some = [way for way in ways if way.batching.cache.cpu_attention == attends]
            known += _try_near(some, known, lambda way: self._simulated(way.pipeline.with_batching(way.batching),
                                                                        options))


def _smallest_budget(pipeline: Pipeline, options: Options) -> float:
    """The least device budget in bytes that a schedule has a plan for; inf where none is enough."""
    try:
        return pipeline.smallest_budget(options)
    except PlanError:
        return math.inf


def closed_form_way(task: PlanTask, spill_nbytes: int) -> Way | None:
    """The way with its cache off the device that the closed form finds fastest, of few shares of each, and with at most
    so many bytes of it on the disk; None where none fits. For a model too large to lower each way that may be best."""
    ways = list[Way]()
    for batching in task.schedules(staged=True):
        with contextlib.suppress(PlanError):
            ways += _in_shares(task, task.pipeline(batching), (1, 1))
    return min((way for way in ways if way.spilled_nbytes <= spill_nbytes), key=lambda way: way.time_s, default=None)


def no_way(task: PlanTask) -> PlanError:
    """The reason why no cache off the device fits, of the way that fits the smallest budget."""
    refused: list[tuple[float, PlanError]] = []
    for batching in task.schedules(staged=True):
        pipeline = task.pipeline(batching)
        pipeline = pipeline.with_batching(asked_shares(batching, _layers(pipeline), task.options))
        try:
            make_plan(pipeline.needs, task.budget, pipeline.workload, task.options, task.machine.name)
        except PlanError as error:
            refused.append((_smallest_budget(pipeline, task.options), error))
    return min(refused, key=lambda pair: pair[0], default=(0.0, PlanError(NO_SCHEDULE)))[1]


@dataclass(frozen=True)
class Way:
    """A block to lower, the pipeline of one with as many micro-batches, and the closed form's plan."""

    plan: Plan
    pipeline: Pipeline
    batching: BatchSchedule

    @property
    def time_s(self) -> float:
        """Seconds of prompt and answer by the closed form."""
        return latency_s(self.plan)

    @property
    def spilled_nbytes(self) -> int:
        """Bytes of caches on the disk."""
        needs = self.pipeline.needs
        assert needs.staged is not None
        staged = needs.staging(needs.staged.layers, self.batching, self.pipeline.workload).staged
        return 0 if staged is None else sum(staged.homes.get("disk", {}).values())

    @property
    def stamps(self) -> int:
        """Block graphs that a step stamps."""
        staged = self.pipeline.needs.staged
        return self.batching.micro_batches.count * (1 if staged is None else len(staged.layers))


def _try_near(
    ways: Sequence[Way], known: Sequence[tuple[float, float]], simulate: Callable[[Way], Plan | None]
) -> list[tuple[float, float]]:
    """Simulate the ways that may be best: of those near the least of the closed form, which leaves waits out, the best
    of each number of micro-batches that saves `MIN_SAVING` over all smaller ones, as more of them take longer to plan;
    then other shares of the number that came out best. None that would be `MAX_LIKELY_RATIO` times as slow as the best
    if the closed form erred by as little as it did of any, or `MAX_LIKELY_RATIO_OTHERS` times as slow as the best of
    other ways, `known`; nor one of more than `MAX_BLOCKS` blocks to lower, where others may be best. Seconds as
    simulated, and by the closed form."""
    least_s = min((way.time_s for way in ways), default=0.0)
    near = sorted((w for w in ways if w.time_s <= MAX_CLOSED_FORM_RATIO * least_s), key=lambda way: way.time_s)
    near = [way for way in near if way.stamps <= MAX_BLOCKS] or near
    front: list[Way] = []
    for way in sorted(near, key=lambda way: way.batching.micro_batches.count):
        if not front or way.time_s < (1 - MIN_SAVING) * min(w.time_s for w in front):
            front = [w for w in front if w.batching.micro_batches.count < way.batching.micro_batches.count] + [way]
    found: list[tuple[float, float]] = []
    count = 0

    def try_each(some: Sequence[Way]) -> None:
        nonlocal count
        for way in some:
            if any(way.time_s * min(s / closed for s, closed in others) > slower * min(others)[0]
                   for others, slower in ((found, MAX_LIKELY_RATIO), (known, MAX_LIKELY_RATIO_OTHERS)) if others):
                continue
            if (plan := simulate(way)) is not None:
                found.append((latency_s(plan), way.time_s))
                if found[-1] == min(found):
                    count = way.batching.micro_batches.count

    try_each(sorted(front, key=lambda way: way.time_s))
    rest = [way for way in near if way not in front]
    try_each([way for way in rest if way.batching.micro_batches.count == count][:MAX_OTHER_SHARES] if found else rest)
    return found


def _in_shares(task: PlanTask, pipeline: Pipeline, parts: tuple[int, int] = (4, 2)) -> list[Way]:
    """The ways of a schedule with shares of its caches on faster tiers, in so many parts of each."""
    workload, needs, budget, options = pipeline.workload, pipeline.needs, task.budget, task.options
    assert needs.staged is not None
    layers = needs.staged.layers

    def fits(way: BatchSchedule) -> bool:
        off = way.recomputation.checkpoints or way.sparsity.blocks < 1
        return not (off and way.cache.on_device) and plan_fits(
            needs.staging(layers, way, workload), budget, workload, options)

    return [Way(make_plan(needs.staging(layers, way, workload), budget, workload, options, task.machine.name), pipeline,
                way)
            for way in in_shares(needs.batching, len(layers), options, task.machine, bool(budget.host), fits, parts,
                                 pipeline.graphs.rewindable and not pipeline.graphs.latents)]


def _layers(pipeline: Pipeline) -> int:
    """Layers whose caches are staged."""
    assert pipeline.needs.staged is not None
    return len(pipeline.needs.staged.layers)
