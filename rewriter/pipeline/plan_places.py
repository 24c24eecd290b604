"""Choose how many places a job's sequences enter and leave, by plans made for several numbers of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_block import GraphsOf, plan_block
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options, require_sizes
from forebay.rewriter.switches import Switches

CacheTier = Literal["device", "host", "disk"] | None
MIN_STAGED_JOB_S = 60.0  # a shorter job is done before ways with caches on slower tiers are compared
MAX_SLOTS = 256  # at most, of which some are given anew while the others decode
SLOTS_PER_ADMITTED = 8  # a prefill step computes one in so many: idle ones, which wait for as many, are a sixteenth


def plan_answers(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, options: Options, machine: Machine, switches: Switches
) -> tuple[Pipeline, Plan]:
    """The plan for sequences that need not all be computed at once. They are where their cache fits the device; else it
    is as `plan_places` finds, unless a wish says how many are."""
    try:
        tier = options.cache_tier if options.entering else options.cache_tier or "device"
        return plan_block(graphs_of, budget, workload, replace(options, cache_tier=tier), machine, switches)
    except PlanError:
        if options.entering or options.cache_tier in ("host", "disk") or options.micro_batches:
            raise
    return plan_places(graphs_of, budget, workload, options, machine, switches)


def entering_at_once(places: int | None) -> int | None:
    """How many sequences a prefill step computes where they enter `places`. PlanError for places that are no size."""
    require_sizes(places=places)
    return -(-places // SLOTS_PER_ADMITTED) if places else None


def plan_places(
    graphs_of: GraphsOf, budget: Budget, workload: Workload, options: Options, machine: Machine, switches: Switches,
    places: int | None = None,
) -> tuple[Pipeline, Plan]:
    """The plan for a job of as many sequences as the batch of `workload`, and the pipeline of its Programs.

    Unless all find room at once, and no way with fewer places is faster, its batch is a number of places that sequences
    enter and leave. Numbers that halve the job's are planned (or `places` alone), and the one whose Programs are
    predicted to take least time a sequence is taken. With `rounds` wished, all that are computed begin together.
    Numbers whose cache the device cannot hold have it on slower tiers too, for a job that takes `MIN_STAGED_JOB_S`
    else: from the fewest on, as long as more are faster. Where none fits, the fewest are computed in rounds, which need
    less than places that are entered. PlanError if these do not fit either.
    """
    count = workload.batch
    sizes = [min(places, count)] if places else _halvings(count)

    def planned(size: int, tier: CacheTier, rounds: bool = options.rounds) -> tuple[Pipeline, Plan]:
        wished = replace(options, cache_tier=tier, rounds=rounds)
        together = options.entering or entering_at_once(size)
        enters = wished if size == count or rounds else replace(wished, entering=together)
        return plan_block(graphs_of, budget, replace(workload, batch=size), enters, machine, switches)

    found: list[tuple[Pipeline, Plan]] = []
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
        if sizes[-1] == count or options.rounds or options.entering:
            raise refused
        found.append(planned(sizes[-1], options.cache_tier, rounds=True))
    return min(found, key=lambda way: sequence_time_s(way[1]))


def _halvings(count: int) -> list[int]:
    """`count`, if it is not above `MAX_SLOTS`, and powers of two below it."""
    powers = [1 << i for i in reversed(range(MAX_SLOTS.bit_length())) if 1 << i < count]
    return [count, *powers] if count <= MAX_SLOTS else powers


def sequence_time_s(plan: Plan) -> float:
    """Predicted seconds of the block per sequence of a long job. Where sequences enter, places wait until as many are
    free as enter at once: half of these are idle at any time."""
    w, s = plan.workload, plan.schedule
    _, new_tokens = w.paced(s.batching)
    idle = (s.batching.admitted - 1) / 2 if s.batching.admitted else 0.0
    decode = (new_tokens - 1) * plan.prediction.decode_time_s
    return plan.prediction.prefill_time_s / w.batch + decode / (w.batch - idle)
