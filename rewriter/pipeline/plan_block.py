"""Choose how a batch is cut into micro-batches, and where its cache lies, by plans made for each way."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.block import ALONE, Block
from forebay.rewriter.ir.cache_layout import cache_buffers
from forebay.rewriter.ir.hidden_layout import offloaded_regions
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.prefill_chunks import chunk_steps
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_speculation import forced_sizes
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.checkpoint_share import balanced_share, link_binds, shares_beside
from forebay.rewriter.planning.objective import latency_s
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import make_plan, plan_fits
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.switches import Switches

SIZES = (1, 4, 8, 12, 16, 24, 32, 64)  # of micro-batches; those near the best take a plan and its Programs
TOKENS = (8, 16, 32, 64)  # of a cache block
PADDING = 1 / 8  # of a token's bytes
BATCHES = (1, 4, 16, 64, 256)  # between latency and throughput
BROUGHT = 0.5  # of a prefill's time: where weights take less, fewer passes over them save little
GATHER_BUFFERS = 2  # one that is read, one that is gathered; more keep activations waiting behind what comes early
WORTH = 0.01  # of the time of prompt and answer, that this must save
NEAR = 1.5  # times the least of the closed form: what it finds slower is not simulated
SAVES = 0.02  # of the closed form's time, that more micro-batches must save to be simulated
SLOWER, OTHER = 1.25, 2.0  # times the best of such ways, and of other kinds, by what the closed form errs at least
STAMPS = 512  # layers times micro-batches that are simulated where fewer may do as well
BESIDE = 4  # other shares of a number of micro-batches that are simulated

GraphsOf = Callable[[Workload, Block], StepGraphs]
PlanChoice = Callable[[GraphsOf, Budget, Workload, Options, Machine, Switches], tuple[Pipeline, Plan]]


def plan_block(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, options: Options, machine: Machine, switches: Switches
) -> tuple[Pipeline, Plan]:
    """The plan for (at least) the batch of `workload`, and the pipeline of its Programs.

    A cache that fits the device stays there. For one that does not, micro-batches of several sizes are compared, each
    with several shares of its caches on faster tiers, by the closed form, and with a GPU each with attention to what
    lies in host memory on either side. Of a few near the best (`_try_near`) the one whose Programs are predicted to
    take prompt and answer the least time is taken. Where the links bind it, and what K and V are made of is smaller,
    its caches may keep that of a share of the tokens; where a prompt comes in chunks for want of memory, hidden states
    may leave the device for larger ones.
    PlanError, if none fits, for the way that fits the smallest budget.

    Long: what fits, and what was refused and why, is one search.
    """
    if options.entering and options.prefill_chunk == 1:
        raise PlanError("prefill_chunk: 1 is a step that decodes for all places; where sequences enter them, a chunk "
                        "has at least 2 tokens")
    refused: list[tuple[Pipeline, PlanError]] = []

    def pipeline_of(block: Block) -> Pipeline:
        return _pipeline_of(graphs_of, workload, machine, switches, block)

    sizes: tuple[int, ...] = ()
    if isinstance(options.prompt_lookup_num_tokens, int):
        sizes = forced_sizes(graphs_of(workload, ALONE), _whole(workload, options.block(workload.batch)), options)
    if options.cache_tier in (None, "device"):
        pipeline = pipeline_of(replace(options.block(workload.batch), speculative_steps=sizes))
        try:
            planned = pipeline, pipeline.plan(budget, options)
        except PlanError as error:
            refused.append((pipeline, error))
        else:
            return planned if options.gather_buffers is not None else _ahead(*planned, budget, options, pipeline_of)
    ways: list[Way] = []
    for block in (replace(each, speculative_steps=sizes) for each in staged_blocks(graphs_of, workload, options)):
        pipeline = pipeline_of(block)
        found = _in_shares(pipeline, block, budget, options)
        best: dict[tuple[int, bool], Way] = {}
        for way in found:
            at = way.block.cache_host, way.block.cpu_attention
            best[at] = min(best.get(at, way), way, key=lambda way: way.time_s)
        ways += best.values()
        if not found:
            least = pipeline.with_block(_wished_shares(pipeline, block, options))
            try:
                least.plan(budget, options)
            except PlanError as error:
                refused.append((least, error))
    fitting: list[tuple[Pipeline, Plan]] = []

    def simulate(pipeline: Pipeline) -> Plan | None:
        try:  # layers that cannot share addresses take more than was known
            fitting.append((pipeline, pipeline.plan(budget, options)))
        except PlanError as error:
            refused.append((pipeline, error))
            return None
        return fitting[-1][1]

    known: list[tuple[float, float]] = []  # seconds as simulated, and by the closed form
    for attends in (False, True):  # where the host attends, the closed form says less of what waits for what
        some = [way for way in ways if way.block.cpu_attention == attends]
        known += _try_near(some, known, lambda way: simulate(way.pipeline.with_block(way.block)))
    if fitting:
        if options.hidden_tier is None:
            _try_hidden(*min(fitting, key=_answer_time_s), options, lambda block: simulate(pipeline_of(block)))
        if options.checkpoints is None:
            _try_checkpoints(min(fitting, key=_answer_time_s)[1], graphs_of, workload, options,
                             lambda block: simulate(pipeline_of(block)))
        return min(fitting, key=_answer_time_s)
    if len(refused) == 1:
        raise refused[0][1]
    raise min(refused, key=lambda pair: pair[0].smallest_budget(options))[1]


def closed_form_way(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, options: Options, machine: Machine, switches: Switches,
    spill_nbytes: int,
) -> Way | None:
    """The way with its cache off the device that the closed form finds fastest, of few shares of each, and with at most
    so many bytes of it on the disk; None where none fits. For a model too large to lower each way that may be best."""
    ways: list[Way] = []
    for block in staged_blocks(graphs_of, workload, options):
        with contextlib.suppress(PlanError):
            pipeline = _pipeline_of(graphs_of, workload, machine, switches, block)
            ways += _in_shares(pipeline, block, budget, options, 1, 1)
    return min((way for way in ways if way.spilled_nbytes <= spill_nbytes), key=lambda way: way.time_s, default=None)


def _pipeline_of(
    graphs_of: GraphsOf, workload: Workload, machine: Machine, switches: Switches, block: Block
) -> Pipeline:
    whole = _whole(workload, block)
    return Pipeline(graphs_of(whole, block), whole, machine, switches)


def _whole(workload: Workload, block: Block) -> Workload:
    """Round a workload up to whole micro-batches, and to a prompt that a prefill step can compute."""
    count = block.micro_batches
    prompt = max(workload.prompt, 2) if block.entering else workload.prompt  # a step over one token decodes
    return replace(workload, batch=-(-workload.batch // count) * count, prompt=prompt)


def _ahead(
    pipeline: Pipeline, plain: Plan, budget: Budget, options: Options, pipeline_of: Callable[[Block], Pipeline]
) -> tuple[Pipeline, Plan]:
    """The plan with memory for weights that ranks gather ahead, where there are such and prompt and answer are then
    predicted to take less time: by what gathers take from the products beside them less than their Programs say."""
    shown = 1 - MachineEstimator(pipeline.machine).held_up
    if pipeline.graphs.gathers and shown > 0:
        with contextlib.suppress(PlanError):
            other = pipeline_of(replace(plain.schedule.block, gather_buffers=GATHER_BUFFERS))
            ahead = other.plan(budget, options)
            if shown * (latency_s(plain) - latency_s(ahead)) > WORTH * latency_s(plain):
                return other, ahead
    return pipeline, plain


def _answer_time_s(pair: tuple[Pipeline, Plan]) -> float:
    return latency_s(pair[1])


def _try_hidden(pipeline: Pipeline, plain: Plan, options: Options, simulate: Callable[[Block], Plan | None]) -> None:
    """Simulate the block of `plain` with hidden states off the device, on the fastest tier that has room, where a
    prompt comes in chunks and bringing the weights for each takes most of a prefill: for larger ones they come fewer
    times."""
    block, prompt = plain.schedule.block, plain.workload.paced(plain.schedule.block)[0]
    chunks = chunk_steps(prompt, plain.schedule.prefill_chunks)
    if sum(chunks.values()) == 1 or options.prefill_chunk or block.entering or block.order == "row":
        return
    brought_s = sum(chunks.values()) * plain.prediction.streamed_nbytes / pipeline.needs.rates.bytes_per_s
    if brought_s < BROUGHT * plain.prediction.prefill_time_s:
        return
    tiers: tuple[Literal["host", "disk"], ...] = ("host", "disk")
    for tier in tiers[0 if plain.budget.host != 0 else 1 :]:
        away = replace(options, hidden_tier=tier).with_hidden(block)
        if offloaded_regions(away) and simulate(away) is not None:
            return


def _try_checkpoints(
    plain: Plan, graphs_of: GraphsOf, workload: Workload, options: Options, simulate: Callable[[Block], Plan | None]
) -> None:
    """Simulate the block of `plain` with checkpoints, where a link binds it and they are smaller than K and V: of all
    tokens, and the shares next to the one with which computing and that link end together. What passes through host
    slots keeps K and V: of blocks of two kinds the slot is not the table in order, so it would cross whole."""
    block = plain.schedule.block
    hops = plain.schedule.host_hop and block.cache == "disk"
    if not (block.staged and link_binds(plain)) or block.cpu_attention or hops:
        return
    try:
        full = _with_checkpoints(block, graphs_of, workload, (1, 1), options.checkpoint_format)
    except PlanError:  # the model has no place for them
        return
    if full.checkpoint_tokens <= full.cache_tokens:
        return
    found = simulate(full)
    for some, period in shares_beside(balanced_share(plain, found)) if found is not None else ():
        if some < period:
            simulate(replace(full, checkpoints=some, checkpoint_period=period))


@dataclass(frozen=True)
class Way:
    """A block to lower, the pipeline of one with as many micro-batches, and the closed form's plan."""

    plan: Plan
    pipeline: Pipeline
    block: Block

    @property
    def time_s(self) -> float:
        """Seconds of prompt and answer by the closed form."""
        return latency_s(self.plan)

    @property
    def spilled_nbytes(self) -> int:
        """Bytes of caches on the disk."""
        needs = self.pipeline.needs
        assert needs.staged is not None
        staged = needs.staging(needs.staged.layers, self.block, self.pipeline.workload).staged
        return 0 if staged is None else sum(staged.homes.get("disk", {}).values())

    @property
    def stamps(self) -> int:
        """Block graphs that a step stamps."""
        staged = self.pipeline.needs.staged
        return self.block.micro_batches * (1 if staged is None else len(staged.layers))


def _try_near(
    ways: Sequence[Way], known: Sequence[tuple[float, float]], simulate: Callable[[Way], Plan | None]
) -> list[tuple[float, float]]:
    """Simulate the ways that may be best: of those near the least of the closed form, which leaves waits out, the best
    of each number of micro-batches that saves `SAVES` over all smaller ones, as more of them take longer to plan; then
    other shares of the number that came out best. None that would be `SLOWER` times as slow as the best if the closed
    form erred by as little as it did of any, or `OTHER` times as slow as the best of other ways, `known`; nor one of
    more than `STAMPS` blocks to lower, where others may be best. Seconds as simulated, and by the closed form."""
    near = sorted((w for w in ways if w.time_s <= NEAR * min(w.time_s for w in ways)), key=lambda way: way.time_s)
    near = [way for way in near if way.stamps <= STAMPS] or near
    front: list[Way] = []
    for way in sorted(near, key=lambda way: way.block.micro_batches):
        if not front or way.time_s < (1 - SAVES) * min(w.time_s for w in front):
            front = [w for w in front if w.block.micro_batches < way.block.micro_batches] + [way]
    found: list[tuple[float, float]] = []
    count = 0

    def try_each(some: Sequence[Way]) -> None:
        nonlocal count
        for way in some:
            if any(way.time_s * min(s / closed for s, closed in others) > slower * min(others)[0]
                   for others, slower in ((found, SLOWER), (known, OTHER)) if others):
                continue
            if (plan := simulate(way)) is not None:
                found.append((latency_s(plan), way.time_s))
                if found[-1] == min(found):
                    count = way.block.micro_batches

    try_each(sorted(front, key=lambda way: way.time_s))
    rest = [way for way in near if way not in front]
    try_each([way for way in rest if way.block.micro_batches == count][:BESIDE] if found else rest)
    return found


def _in_shares(
    pipeline: Pipeline, block: Block, budget: Budget, options: Options, on_device: int = 4, on_host: int = 2
) -> list[Way]:
    """The block with shares of its caches on faster tiers: as wished, or from none to all that fit, in so many parts of
    each tier."""
    workload, needs = pipeline.workload, pipeline.needs
    assert needs.staged is not None
    layers = needs.staged.layers
    total = len(layers) * block.micro_batches

    def fits(way: Block) -> bool:
        return not (way.checkpoints and way.cache_device) and plan_fits(
            needs.staging(layers, way, workload), budget, workload, options)

    def most(way: Callable[[int], Block]) -> int:
        """The most caches that a faster tier has room for; all of them need no slots for what comes from the disk."""
        if fits(way(total)):
            return total
        return max(0, bisect_right(range(total), 0, key=lambda n: int(not fits(way(n)))) - 1)

    if options.cache_tier is not None or options.cache_shares is not None:
        ways = [_wished_shares(pipeline, block, options)]
    else:
        host = most(lambda n: _in_whole_layers(block, 0, n)) if block.cache == "disk" and budget.host else 0
        device = most(lambda n: _in_whole_layers(block, n, min(host, total - n)))
        ways = [_in_whole_layers(block, d, min(h, total - d))
                for d in parts_of(device, on_device) for h in parts_of(host, on_host)]
    if options.cpu_attention is None and host_attends(pipeline.machine):
        ways += [replace(way, cpu_attention=True) for way in ways if way.cache_host or way.cache == "host"]
    found = []
    for way in filter(fits, dict.fromkeys(ways)):
        plan = make_plan(needs.staging(layers, way, workload), budget, workload, options, pipeline.machine.name)
        found.append(Way(plan, pipeline, way))
    return found


def _wished_shares(pipeline: Pipeline, block: Block, options: Options) -> Block:
    """The block with the shares of its caches that `options` name on faster tiers, none where they name none. PlanError
    for shares that are none."""
    device_share, host_share = options.cache_shares or (0.0, 0.0)
    if min(device_share, host_share) < 0 or device_share + host_share > 1:
        raise PlanError(f"cache_shares: {device_share} on the device and {host_share} in host memory must be "
                        "shares of one whole")
    assert pipeline.needs.staged is not None
    total = len(pipeline.needs.staged.layers) * block.micro_batches
    return _in_whole_layers(block, int(device_share * total), int(host_share * total))


def _in_whole_layers(block: Block, device: int, host: int) -> Block:
    """The block with at most so many of its caches on the device and in host memory, if not all others are there: as
    many as lie together."""
    unit, host = block.together, 0 if block.cache == "host" else host
    return replace(block, cache_device=device // unit * unit, cache_host=host // unit * unit)


def host_attends(machine: Machine) -> bool:
    """Whether there is a host beside the device that is known to attend; without a GPU both are the same cores."""
    return machine.kind.host_hop and machine.host_attention_bytes_per_s > 0


def parts_of(most: int, parts: int) -> list[int]:
    """0, `most` and what lies between, in so many equal parts."""
    return list(dict.fromkeys(most * i // parts for i in range(parts + 1)))


def block_tokens(cache: Mapping[str, int], workload: Workload) -> int:
    """Tokens of a cache block, for a cache of these bytes by buffer: the fewest of `TOKENS` that are whole pages
    without much padding. Loads join a sequence's blocks, and what is not full yet takes memory: fewer are better."""
    tokens = {nbytes // (workload.batch * workload.context) for nbytes in cache.values()}  # bytes of a K or a V
    for count in TOKENS:
        unit = PAGE_NBYTES // count
        if all(-(-2 * nbytes // unit) * unit <= (1 + PADDING) * 2 * nbytes for nbytes in tokens):
            return count
    return TOKENS[-1]


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


def staged_blocks(graphs_of: GraphsOf, workload: Workload, options: Options) -> list[Block]:
    """The blocks to try for a cache off the device, on the furthest tier first: with micro-batches as wished, or of
    several sizes."""
    if options.cache_tier == "device":
        return []
    batch = workload.batch
    tokens = options.cache_tokens or block_tokens(cache_buffers(graphs_of(workload, ALONE).step(1)), workload)
    counts = [options.micro_batches] if options.micro_batches else [
        math.ceil(batch / size) for size in reversed(SIZES) if size == 1 or size < 2 * batch]
    entering = min(options.entering or 0, batch)
    block = Block(1, options.order, options.cache_tier or "disk", tokens, options.cache_slots, entering=entering,
                  cpu_attention=bool(options.cpu_attention), sparse_values=options.sparse_values)
    share = options.checkpoints or (0, 1)
    if share[0]:
        block = _with_checkpoints(block, graphs_of, workload, share, options.checkpoint_format)
    return [options.with_hidden(replace(block, micro_batches=count))
            for count in dict.fromkeys(min(count, batch) for count in counts)]


def _with_checkpoints(
    block: Block, graphs_of: GraphsOf, workload: Workload, share: tuple[int, int], kept: str
) -> Block:
    """The block with checkpoints in the format `kept` of so many stretches of tokens of every so many, its `share`.
    PlanError where it can have none."""
    some, period = share
    if not 0 < some <= period:
        raise PlanError(f"checkpoints: {some} of {period} stretches of tokens are no share of them")
    if block.cpu_attention:
        raise PlanError("checkpoints: the host attends over K and V where they lie; leave out one of both")
    tokens = graphs_of(workload, ALONE).checkpoint_tokens(block.cache_tokens, kept)
    if not tokens:
        raise PlanError(f"checkpoints: blocks of {block.cache_tokens} tokens cannot hold them; wish for other "
                        "cache_tokens")
    return replace(block, checkpoints=some, checkpoint_period=period, checkpoint_tokens=tokens, checkpoint_format=kept,
                   cache_device=0)
