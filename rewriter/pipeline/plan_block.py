"""Choose how a batch is cut into micro-batches, and where its cache lies, by plans made for each way."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.cache_layout import cache_buffers
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.ir.schedule.sparsity import Sparsity
from forebay.rewriter.ir.schedule.speculation import Speculation
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_speculation import forced_sizes
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.features.feature import Trial
from forebay.rewriter.planning.features.recomputation import with_checkpoints
from forebay.rewriter.planning.features.table import FEATURES
from forebay.rewriter.planning.objective import latency_s
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import make_plan, plan_fits
from forebay.rewriter.switches import Switches

MICRO_BATCH_SIZES = (1, 4, 8, 12, 16, 24, 32, 64)  # of micro-batches; those near the best take a plan and its Programs
BLOCK_TOKENS = (8, 16, 32, 64)  # of a cache block
MAX_PADDING = 1 / 8  # of a token's bytes
BATCHES = (1, 4, 16, 64, 256)  # between latency and throughput
MAX_CLOSED_FORM_RATIO = 1.5  # times the least of the closed form: what it finds slower is not simulated
MIN_SAVING = 0.02  # of the closed form's time, that more micro-batches must save to be simulated
# times the best of such ways, and of other kinds, by what the closed form errs at least
MAX_LIKELY_RATIO, MAX_LIKELY_RATIO_OTHERS = 1.25, 2.0
MAX_BLOCKS = 512  # layers times micro-batches that are simulated where fewer may do as well
MAX_OTHER_SHARES = 4  # other shares of a number of micro-batches that are simulated

GraphsOf = Callable[[Workload, BatchSchedule], StepGraphs]
PlanChoice = Callable[[GraphsOf, Budget, Workload, Options, Machine, Switches], tuple[Pipeline, Plan]]


def plan_block(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, options: Options, machine: Machine, switches: Switches
) -> tuple[Pipeline, Plan]:
    """The plan for (at least) the batch of `workload`, and the pipeline of its Programs: see `ScheduleSearch`."""
    return ScheduleSearch(graphs_of, budget, workload, options, machine, switches).best()


class ScheduleSearch:
    """The search for the schedule of a batch within a budget: candidates, what the closed form says of them, the
    simulation of a few, and the choice."""

    def __init__(self, graphs_of: GraphsOf, budget: Budget, workload: Workload, options: Options, machine: Machine,
                 switches: Switches) -> None:
        self.graphs_of, self.budget, self.workload, self.options = graphs_of, budget, workload, options
        self.machine, self.switches = machine, switches
        self.planned: list[tuple[Pipeline, Plan]] = []
        self.refused: list[tuple[Pipeline, PlanError]] = []

    def best(self) -> tuple[Pipeline, Plan]:
        """Find the schedule whose Programs are predicted to take prompt and answer the least time, and its plan.

        A cache that fits the device stays there. For one that does not, micro-batches of several sizes are compared,
        each with several shares of its caches on faster tiers, by the closed form, and with a GPU each with attention
        to what lies in host memory on either side; of those a few near the best are simulated (`_try_near`). Then each
        feature tries what it may better (`ScheduleFeature.improve`).

        Raises:
            PlanError: None fits; it is that of the schedule that fits the smallest budget.
        """
        options, workload = self.options, self.workload
        if options.entering and options.prefill_chunk == 1:
            raise PlanError("prefill_chunk: 1 is a step that decodes for all places; where sequences enter them, a "
                            "chunk has at least 2 tokens")
        plain, forced = options.batching(workload.batch), Speculation()
        if isinstance(options.prompt_lookup_num_tokens, int):
            forced = Speculation(forced_sizes(self.graphs_of(workload, ALONE), _whole(workload, plain), options))
        if options.cache_tier not in (None, "device") or self.simulate(replace(plain, speculation=forced)) is None:
            self._try_staged(forced)
        if not self.planned:
            if len(self.refused) == 1:
                raise self.refused[0][1]
            raise min(self.refused, key=lambda pair: pair[0].smallest_budget(options))[1]
        pipeline, plan = min(self.planned, key=lambda pair: latency_s(pair[1]))
        trial = Trial(self.simulate, options, self.machine, pipeline.needs.rates.bytes_per_s,
                      bool(pipeline.graphs.gathers), self.graphs_of(workload, ALONE).checkpoint_tokens)
        for feature in FEATURES:
            plan = feature.improve(plan, trial)
        return next(pair for pair in self.planned if pair[1] is plan)

    def simulate(self, batching: BatchSchedule) -> Plan | None:
        """The plan of a schedule, whose Programs are simulated; None where there is none."""
        return self._simulated(self.pipeline(batching))

    def pipeline(self, batching: BatchSchedule) -> Pipeline:
        """The pipeline of a schedule, for a workload of whole micro-batches."""
        whole = _whole(self.workload, batching)
        return Pipeline(self.graphs_of(whole, batching), whole, self.machine, self.switches)

    def _simulated(self, pipeline: Pipeline) -> Plan | None:
        try:  # layers that cannot share addresses take more than was known
            self.planned.append((pipeline, pipeline.plan(self.budget, self.options)))
        except PlanError as error:
            self.refused.append((pipeline, error))
            return None
        return self.planned[-1][1]

    def _try_staged(self, forced: Speculation) -> None:
        """Simulate the ways near the best of those with caches that come to the device for their turns."""
        ways: list[Way] = []
        for each in staged_blocks(self.graphs_of, self.workload, self.options):
            batching = replace(each, speculation=forced)
            pipeline = self.pipeline(batching)
            best: dict[tuple[int, bool], Way] = {}
            for way in _in_shares(pipeline, batching, self.budget, self.options):
                at = way.batching.cache.on_host, way.batching.cache.cpu_attention
                best[at] = min(best.get(at, way), way, key=lambda way: way.time_s)
            ways += best.values()
            if not best:
                self._simulated(pipeline.with_batching(_wished_shares(pipeline, batching, self.options)))
        known: list[tuple[float, float]] = []  # seconds as simulated, and by the closed form
        for attends in (False, True):  # where the host attends, the closed form says less of what waits for what
            some = [way for way in ways if way.batching.cache.cpu_attention == attends]
            known += _try_near(some, known, lambda way: self._simulated(way.pipeline.with_batching(way.batching)))


def closed_form_way(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, options: Options, machine: Machine, switches: Switches,
    spill_nbytes: int,
) -> Way | None:
    """The way with its cache off the device that the closed form finds fastest, of few shares of each, and with at most
    so many bytes of it on the disk; None where none fits. For a model too large to lower each way that may be best."""
    search, ways = ScheduleSearch(graphs_of, budget, workload, options, machine, switches), list[Way]()
    for batching in staged_blocks(graphs_of, workload, options):
        with contextlib.suppress(PlanError):
            ways += _in_shares(search.pipeline(batching), batching, budget, options, 1, 1)
    return min((way for way in ways if way.spilled_nbytes <= spill_nbytes), key=lambda way: way.time_s, default=None)


def _whole(workload: Workload, batching: BatchSchedule) -> Workload:
    """Round a workload up to whole micro-batches, and to a prompt that a prefill step can compute."""
    count = batching.micro_batches.count
    prompt = max(workload.prompt, 2) if batching.admitted else workload.prompt  # a step over one token decodes
    return replace(workload, batch=-(-workload.batch // count) * count, prompt=prompt)


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


def _in_shares(
    pipeline: Pipeline, batching: BatchSchedule, budget: Budget, options: Options, on_device: int = 4, on_host: int = 2
) -> list[Way]:
    """The block with shares of its caches on faster tiers: as wished, or from none to all that fit, in so many parts of
    each tier."""
    workload, needs = pipeline.workload, pipeline.needs
    assert needs.staged is not None
    layers = needs.staged.layers
    total = len(layers) * batching.micro_batches.count

    def fits(way: BatchSchedule) -> bool:
        return not (way.recomputation.checkpoints and way.cache.on_device) and plan_fits(
            needs.staging(layers, way, workload), budget, workload, options)

    def most(way: Callable[[int], BatchSchedule]) -> int:
        """The most caches that a faster tier has room for; all of them need no slots for what comes from the disk."""
        if fits(way(total)):
            return total
        return max(0, bisect_right(range(total), 0, key=lambda n: int(not fits(way(n)))) - 1)

    if options.cache_tier is not None or options.cache_shares is not None:
        ways = [_wished_shares(pipeline, batching, options)]
    else:
        host = most(lambda n: _in_whole_layers(batching, 0, n)) if batching.cache.tier == "disk" and budget.host else 0
        device = most(lambda n: _in_whole_layers(batching, n, min(host, total - n)))
        ways = [_in_whole_layers(batching, d, min(h, total - d))
                for d in parts_of(device, on_device) for h in parts_of(host, on_host)]
    if options.cpu_attention is None and host_attends(pipeline.machine):
        ways += [replace(way, cache=replace(way.cache, cpu_attention=True)) for way in ways
                 if way.cache.on_host or way.cache.tier == "host"]
    found = []
    for way in filter(fits, dict.fromkeys(ways)):
        plan = make_plan(needs.staging(layers, way, workload), budget, workload, options, pipeline.machine.name)
        found.append(Way(plan, pipeline, way))
    return found


def _wished_shares(pipeline: Pipeline, batching: BatchSchedule, options: Options) -> BatchSchedule:
    """The block with the shares of its caches that `options` name on faster tiers, none where they name none. PlanError
    for shares that are none."""
    device_share, host_share = options.cache_shares or (0.0, 0.0)
    if min(device_share, host_share) < 0 or device_share + host_share > 1:
        raise PlanError(f"cache_shares: {device_share} on the device and {host_share} in host memory must be "
                        "shares of one whole")
    assert pipeline.needs.staged is not None
    total = len(pipeline.needs.staged.layers) * batching.micro_batches.count
    return _in_whole_layers(batching, int(device_share * total), int(host_share * total))


def _in_whole_layers(batching: BatchSchedule, device: int, host: int) -> BatchSchedule:
    """The block with at most so many of its caches on the device and in host memory, if not all others are there: as
    many as lie together."""
    unit, host = batching.placement_granularity, 0 if batching.cache.tier == "host" else host
    return replace(batching,
                   cache=replace(batching.cache, on_device=device // unit * unit, on_host=host // unit * unit))


def host_attends(machine: Machine) -> bool:
    """Whether there is a host beside the device that is known to attend; without a GPU both are the same cores."""
    return machine.kind.host_hop and machine.host_attention_bytes_per_s > 0


def parts_of(most: int, parts: int) -> list[int]:
    """0, `most` and what lies between, in so many equal parts."""
    return list(dict.fromkeys(most * i // parts for i in range(parts + 1)))


def block_tokens(cache: Mapping[str, int], workload: Workload) -> int:
    """Tokens of a cache block, for a cache of these bytes by buffer: the fewest of `BLOCK_TOKENS` that are whole pages
    without much padding. Loads join a sequence's blocks, and what is not full yet takes memory: fewer are better."""
    tokens = {nbytes // (workload.batch * workload.context) for nbytes in cache.values()}  # bytes of a K or a V
    for count in BLOCK_TOKENS:
        unit = PAGE_NBYTES // count
        if all(-(-2 * nbytes // unit) * unit <= (1 + MAX_PADDING) * 2 * nbytes for nbytes in tokens):
            return count
    return BLOCK_TOKENS[-1]


def plan_batches(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, options: Options, machine: Machine, switches: Switches
) -> list[Plan]:
    """Plans for the same prompts and answers, from one sequence at once to many; those that fit no budget are left out.
    """
    found = []
    for batch in BATCHES:
        with contextlib.suppress(PlanError):
            found.append(plan_block(graphs_of, budget, replace(workload, batch=batch), options, machine, switches)[1])
    return found


def staged_blocks(graphs_of: GraphsOf, workload: Workload, options: Options) -> list[BatchSchedule]:
    """The blocks to try for a cache off the device, on the furthest tier first: with micro-batches as wished, or of
    several sizes."""
    if options.cache_tier == "device":
        return []
    batch = workload.batch
    tokens = options.cache_tokens or block_tokens(cache_buffers(graphs_of(workload, ALONE).step(1)), workload)
    counts = [options.micro_batches] if options.micro_batches else [
        math.ceil(batch / size) for size in reversed(MICRO_BATCH_SIZES) if size == 1 or size < 2 * batch]
    entering = min(options.entering or 0, batch)
    cache = CachePlacement(options.cache_tier or "disk", tokens, options.cache_slots,
                           cpu_attention=bool(options.cpu_attention))
    batching = BatchSchedule(MicroBatches(1, options.order), cache, admission=Admission(entering),
                             sparsity=Sparsity(options.sparse_values))
    share = options.checkpoints or (0, 1)
    if share[0]:
        tokens_of = graphs_of(workload, ALONE).checkpoint_tokens
        batching = with_checkpoints(batching, tokens_of, share, options.checkpoint_format)
    return [options.with_hidden(replace(batching, micro_batches=replace(batching.micro_batches, count=count)))
            for count in dict.fromkeys(min(count, batch) for count in counts)]
