"""Search over block sizes, orders, formats, host attention: the placement LP for each, the exact pass for the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

import numpy as np

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.objective import BudgetError, Objective
from forebay.rewriter.policy.block_costs import BlockCosts, BlockModel, BlockShape
from forebay.rewriter.policy.placement import (
    FASTEST,
    Closed,
    Goal,
    Placement,
    RoundedPlacement,
    items_of,
    place,
    round_placement,
)
from forebay.rewriter.policy.shares import ONE, TIERS
from forebay.rewriter.predict.estimator import Estimator, MachineEstimator
from forebay.rewriter.predict.model_shapes import ModelShape

MICRO_BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ROUNDING = 1.02  # no rounded placement of a block this much slower than the best by its bound is looked for


@dataclass(frozen=True)
class Space:
    """The search space. `batch` fixes the sequences of a block, `largest` bounds them; `closed` pairs of tensor and
    tier hold nothing.

    A diagonal order moves as much as a zig-zag one and needs less memory, so the model always prefers it: ask for it
    where the runtime has it, and zig-zag is left out.
    """

    micro_batches: tuple[int, ...] = MICRO_BATCHES
    blocks: tuple[int, ...] = BLOCKS
    orders: tuple[Literal["row", "zigzag", "diagonal"], ...] = ("row", "zigzag")
    weight_formats: tuple[str, ...] = ("native",)
    cache_formats: tuple[str, ...] = ("native",)
    host_attention: bool = True
    closed: Closed = frozenset()
    batch: int = 0
    largest: int = 1024


@dataclass(frozen=True)
class Problem:
    """A model on a machine with a workload. `capacity` overrides the machine's bytes per tier; `runs` makes the model
    of a block, by default of this runtime; `times` stand in the place of the machine's own."""

    model: ModelShape
    machine: Machine
    prompt: int
    new_tokens: int
    capacity: Mapping[str, int] = field(default_factory=dict)
    runs: Callable[..., BlockModel] = BlockModel
    times: Estimator | None = None
    typical: tuple[int, int] | None = None  # tokens of the prompts and answers that times are of

    def model_of(self, block: BlockShape, context: float = 0.0) -> BlockModel:
        capacity = {tier: self.machine.tiers[tier].capacity_nbytes if tier in self.machine.tiers else 0
                    for tier in TIERS} | dict(self.capacity)
        times = self.times or MachineEstimator(self.machine)
        return self.runs(self.model, times, block, self.prompt, self.new_tokens, capacity, context, self.typical)

    def host_attends(self) -> bool:
        """Return whether there is a host that may compute attention."""
        times, host = self.times or MachineEstimator(self.machine), self.machine.tiers.get("host")
        return host is not None and host.capacity_nbytes > 0 and math.isfinite(times.host_attention_s(1.0))

    def costs(self, block: BlockShape, context: float = 0.0) -> BlockCosts:
        """Costs of a block; decode sees `context` cached tokens, by default the average."""
        return self.model_of(block, context).costs()


@dataclass(frozen=True)
class Policy:
    """The chosen policy: the block, where everything lies, and the seconds the bound and the whole placement take."""

    problem: Problem
    block: BlockShape
    costs: BlockCosts
    placement: RoundedPlacement
    bound_time_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.costs.tokens / self.placement.time_s

    def phase_s(self, phase: str) -> float:
        """Seconds of one phase of the whole block."""
        return self.costs.time_s(self.placement.x, phase)

    def busy_s(self) -> dict[str, float]:
        """Seconds per lane over the whole block."""
        return self.costs.busy_s(self.placement.x)


@dataclass(frozen=True)
class _Candidate:
    block: BlockShape
    costs: BlockCosts
    bound: Placement


def candidates(space: Space, host_attends: bool) -> Iterator[BlockShape]:
    """Every block of the space. A row-by-row block of several micro-batches is the same block of one, again and again,
    so rows come with one micro-batch; other orders with several."""
    hosts = (False, True) if space.host_attention and host_attends else (False,)
    for size, count in product(space.micro_batches, space.blocks):
        if (space.batch and size * count != space.batch) or size * count > space.largest:
            continue
        orders = [o for o in space.orders if (o == "row") == (count == 1)]
        orders = ["diagonal"] if "diagonal" in orders else orders
        for order, weights, cache, host in product(orders, space.weight_formats, space.cache_formats, hosts):
            if host and cache != "native":
                continue  # the host does not dequantize fast enough to be worth asking (FlexGen, section 5)
            yield BlockShape(size, count, order, weights, cache, host)


def search(problem: Problem, space: Space | None = None, objective: Objective | None = None) -> Policy:
    """The best policy of the space; raises BudgetError when nothing fits, or nothing reaches the target.

    More bytes on any tier never give a slower policy: the candidates do not depend on the budget, each one's placement
    is optimal, and the best is taken.
    """
    space, objective = space or Space(), objective or Objective()
    if objective.kind == "latency":
        space = replace(space, batch=space.batch or objective.batch)
    space = _with_divisors(space)
    if objective.kind == "budget":
        return _smallest(problem, space, objective)
    found = _bounds(problem, space, objective)
    best: Policy | None = None
    for candidate in sorted(found, key=_token_time):
        if best is not None and _token_time(candidate) >= best.placement.time_s / best.costs.tokens:
            break
        policy = _rounded(problem, candidate, space, FASTEST)
        if policy is None or policy.placement.time_s > objective.latency_s:
            continue
        if best is None or policy.tokens_per_s > best.tokens_per_s:
            best = policy
    if best is None:
        quickest = min((c.bound.time_s for c in _bounds(problem, space, Objective(), prune=False)), default=0.0)
        if quickest:
            raise BudgetError(f"no block of {problem.model.name} on {problem.machine.name} ends within "
                              f"{objective.latency_s:g} s; the quickest takes {quickest:.4g} s")
        raise BudgetError(explain_infeasible(problem, space))
    return best


def frontier(problem: Problem, space: Space | None = None) -> list[Policy]:
    """The latency-throughput frontier (FlexGen's Figure 1): policies none of which is beaten in both, fastest first."""
    space = _with_divisors(space or Space())
    found = _bounds(problem, space, Objective(), prune=False)
    if not found:
        raise BudgetError(explain_infeasible(problem, space))
    chosen: list[Policy] = []
    best = 0.0
    for candidate in sorted(found, key=lambda c: (c.bound.time_s, -c.costs.tokens)):
        if candidate.costs.tokens / candidate.bound.time_s <= 1.02 * best:
            continue
        policy = _rounded(problem, candidate, space, FASTEST)
        if policy is not None and policy.tokens_per_s > best:
            best = policy.tokens_per_s
            chosen.append(policy)
    return chosen


def explain_infeasible(problem: Problem, space: Space) -> str:
    """Return which tier binds for the smallest block of the space, and the least bytes on it that something fits in."""
    blocks = list(candidates(space, problem.host_attends()))
    smallest = min(b.size for b in blocks)
    tried = [problem.costs(b) for b in blocks if b.size == smallest]
    capacity = tried[0].capacity
    parts = []
    for tier in TIERS:
        placed = [(costs, place(costs, closed=space.closed, goal=Goal(tier))) for costs in tried]
        needed = min((float(costs.memory[tier] @ found.x) for costs, found in placed if found is not None), default=0.0)
        if needed > capacity[tier]:
            parts.append(f"{tier}: {format_nbytes(capacity[tier])} given, at least "
                         f"{format_nbytes(int(needed) + 1)} ({int(needed) + 1} bytes) needed")
    what = (f"{problem.model.name} on {problem.machine.name}, block of {smallest}, prompt {problem.prompt}, "
            f"{problem.new_tokens} new tokens")
    if not parts:
        totals = ", ".join(f"{tier} {format_nbytes(capacity[tier])}" for tier in TIERS)
        return f"nothing fits: {what}; more than one tier is too small ({totals})"
    return f"nothing fits: {what}; the binding tier is {'; or '.join(parts)}"


def _with_divisors(space: Space) -> Space:
    """A space that can make blocks of exactly `batch` sequences, where one is asked for."""
    if not space.batch:
        return space
    divisors = tuple(d for d in range(1, space.batch + 1) if space.batch % d == 0)
    return replace(space, micro_batches=divisors, blocks=divisors, largest=space.batch)


def _token_time(candidate: _Candidate) -> float:
    return candidate.bound.time_s / candidate.costs.tokens


def _floor_s(costs: BlockCosts) -> float:
    """Return the least seconds of the block for any placement: a bound that needs no LP."""
    return sum(p.count * max(0.0, *(float(row @ ONE) for row in p.rows())) for p in costs.pieces)


def _bounds(problem: Problem, space: Space, objective: Objective, prune: bool = True) -> list[_Candidate]:
    """LP placements of the blocks that may hold the best policy; the others are left out by cheaper bounds."""
    blocks = [(block, problem.costs(block)) for block in candidates(space, problem.host_attends())]
    blocks = [(b, c) for b, c in blocks if all(c.memory[t][-1] <= c.capacity[t] for t in TIERS)]
    blocks.sort(key=lambda pair: _floor_s(pair[1]) / pair[1].tokens)
    best, found = np.inf, []
    for block, costs in blocks:
        floor = _floor_s(costs)
        if floor > objective.latency_s or (prune and floor / costs.tokens > ROUNDING * best):
            continue
        bound = place(costs, closed=space.closed)
        if bound is None or bound.time_s > objective.latency_s:
            continue
        found.append(_Candidate(block, costs, bound))
        best = min(best, bound.time_s / costs.tokens)
    return found


def _rounded(problem: Problem, candidate: _Candidate, space: Space, goal: Goal) -> Policy | None:
    items = items_of(problem.model, candidate.block.size, problem.prompt + problem.new_tokens)
    placement = round_placement(candidate.costs, items, closed=space.closed, goal=goal)
    if placement is None:
        return None
    return Policy(problem, candidate.block, candidate.costs, placement, candidate.bound.time_s)


def _smallest(problem: Problem, space: Space, objective: Objective) -> Policy:
    """The policy with the fewest device bytes that reaches the wanted throughput."""
    if objective.tokens_per_s <= 0:
        raise BudgetError(f"tokens_per_s: must be above 0, is {objective.tokens_per_s}")
    found = []
    for block in candidates(space, problem.host_attends()):
        costs = problem.costs(block)
        allowed = costs.tokens / objective.tokens_per_s
        if _floor_s(costs) > allowed:
            continue
        bound = place(costs, closed=space.closed, goal=Goal("device", allowed))
        if bound is not None:
            found.append((float(costs.memory["device"] @ bound.x), _Candidate(block, costs, bound), allowed))
    best: Policy | None = None
    least = np.inf
    for nbytes, candidate, allowed in sorted(found, key=lambda entry: entry[0]):
        if nbytes >= least:
            break
        policy = _rounded(problem, candidate, space, Goal("device", allowed))
        if policy is not None and float(policy.costs.memory["device"] @ policy.placement.x) < least:
            best, least = policy, float(policy.costs.memory["device"] @ policy.placement.x)
    if best is None:
        raise BudgetError(f"no device budget reaches {objective.tokens_per_s:g} tokens/s with {problem.model.name} on "
                          f"{problem.machine.name}")
    return best
