"""Choose how a batch is cut into micro-batches, and where its cache lies, by plans made for each way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.plan import ALONE, Block, Budget, Plan, PlanError, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline import Pipeline
from forebay.rewriter.planning.graph_needs import cache_buffers
from forebay.rewriter.planning.wishes import Wishes
from forebay.rewriter.switches import Switches

SIZES = (1, 4, 16, 64)  # of micro-batches that are tried; each takes a plan and its Programs
TOKENS = (16, 32, 64)  # of a cache block
PADDING = 1 / 8  # of a token's bytes
PLACES = 256  # at most, of which some are given anew while the others decode
ENTERING = 8  # a prefill step computes one in so many places: idle ones, which wait for as many, are a sixteenth

GraphsOf = Callable[[Workload, Block], StepGraphs]


def plan_block(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, wishes: Wishes, machine: Machine, switches: Switches
) -> tuple[Pipeline, Plan]:
    """The plan for (at least) the batch of `workload`, and the pipeline of its Programs.

    A cache that fits the device stays there. For one that does not, every way of `disk_blocks` is planned, and the one
    whose Programs are predicted to take prompt and answer the least time is taken. PlanError, if none fits, for the way
    that fits the smallest budget.
    """
    refused: list[tuple[Pipeline, PlanError]] = []

    def planned(block: Block) -> tuple[Pipeline, Plan] | None:
        count = block.micro_batches
        prompt = max(workload.prompt, 2) if block.entering else workload.prompt  # a step over one token decodes
        whole = replace(workload, batch=-(-workload.batch // count) * count, prompt=prompt)
        pipeline = Pipeline(graphs_of(whole, block), whole, machine, switches)
        try:
            return pipeline, pipeline.plan(budget, wishes)
        except PlanError as error:
            refused.append((pipeline, error))
            return None

    if wishes.cache_tier != "disk":
        found = planned(wishes.block(workload.batch))
        if found is not None:
            return found
    ways: list[Block] = []
    if wishes.cache_tier != "device" and machine.device_kind == "cpu":
        tokens = wishes.cache_tokens or block_tokens(cache_buffers(graphs_of(workload, ALONE).step(1)), workload)
        ways = disk_blocks(wishes, workload.batch, tokens)
    fitting = [way for way in map(planned, ways) if way is not None]
    if fitting:
        return min(fitting, key=lambda way: answer_time_s(way[1]))
    if len(refused) == 1:
        raise refused[0][1]
    raise min(refused, key=lambda pair: pair[0].smallest_budget(wishes))[1]


def plan_answers(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, wishes: Wishes, machine: Machine, switches: Switches
) -> tuple[Pipeline, Plan]:
    """The plan for sequences that need not all be computed at once. They are where their cache fits the device; else it
    is as `plan_places` finds, unless a wish says how many are."""
    try:
        tier = wishes.cache_tier if wishes.entering else wishes.cache_tier or "device"
        return plan_block(graphs_of, budget, workload, replace(wishes, cache_tier=tier), machine, switches)
    except PlanError:
        if wishes.entering or wishes.cache_tier == "disk" or wishes.micro_batches:
            raise
    return plan_places(graphs_of, budget, workload, wishes, machine, switches)


def entering_at_once(places: int | None) -> int | None:
    """How many sequences a prefill step computes where they enter `places`."""
    return -(-places // ENTERING) if places else None


def plan_places(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, wishes: Wishes, machine: Machine, switches: Switches,
    places: int | None = None,
) -> tuple[Pipeline, Plan]:
    """The plan for a job of as many sequences as the batch of `workload`, and the pipeline of its Programs.

    Unless all find room at once, and no way with fewer places is faster, its batch is a number of places that sequences
    enter and leave. Numbers that halve the job's are planned (or `places` alone), and the one whose Programs are
    predicted to take least time a sequence is taken. PlanError, if none fits, for the fewest.
    """
    count = workload.batch
    sizes = [min(places, count)] if places else _halvings(count)
    found: list[tuple[Pipeline, Plan]] = []
    refused: PlanError | None = None
    for size in sizes:
        enters = wishes if size == count else replace(wishes, entering=wishes.entering or entering_at_once(size))
        try:
            found.append(plan_block(graphs_of, budget, replace(workload, batch=size), enters, machine, switches))
        except PlanError as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda way: sequence_time_s(way[1]))


def _halvings(count: int) -> list[int]:
    """`count`, if it is not above `PLACES`, and powers of two below it."""
    powers = [1 << i for i in reversed(range(PLACES.bit_length())) if 1 << i < count]
    return [count, *powers] if count <= PLACES else powers


def sequence_time_s(plan: Plan) -> float:
    """Predicted seconds of the block per sequence of a long job. Where sequences enter, places wait until as many are
    free as enter at once: half of these are idle at any time."""
    batch, enters = plan.workload.batch, plan.schedule.block.entering
    idle = (enters - 1) / 2 if enters else 0.0
    decode = (plan.workload.new_tokens - 1) * plan.prediction.decode_time_s
    return plan.prediction.prefill_time_s / batch + decode / (batch - idle)


def block_tokens(cache: Mapping[str, int], workload: Workload) -> int:
    """Tokens of a cache block, for a cache of these bytes by buffer: the fewest of `TOKENS` that are whole pages
    without much padding. Loads join a sequence's blocks, and what is not full yet takes memory: fewer are better."""
    tokens = {nbytes // (workload.batch * workload.context) for nbytes in cache.values()}  # bytes of a K or a V
    for count in TOKENS:
        unit = PAGE_NBYTES // count
        if all(-(-2 * nbytes // unit) * unit <= (1 + PADDING) * 2 * nbytes for nbytes in tokens):
            return count
    return TOKENS[-1]


def disk_blocks(wishes: Wishes, batch: int, tokens: int) -> list[Block]:
    """The blocks to try for a cache on disk: as wished, or with micro-batches of several sizes."""
    counts = [wishes.micro_batches] if wishes.micro_batches else [
        math.ceil(batch / size) for size in reversed(SIZES) if size == 1 or size < 2 * batch]
    entering = min(wishes.entering or 0, batch)
    return [Block(count, wishes.order, "disk", tokens, wishes.cache_slots, entering)
            for count in dict.fromkeys(min(count, batch) for count in counts)]


def answer_time_s(plan: Plan) -> float:
    """Predicted seconds from the prompts to the last token of the answers."""
    return plan.prediction.prefill_time_s + (plan.workload.new_tokens - 1) * plan.prediction.decode_time_s
