"""The search over what runs: every block that can be lowered, each planned as it would run, and the best by objective.

`Lowered` is the one place that says which blocks of `policy_search.Space` have Programs; a `Policy` outside it is no
`Plan` and cannot become one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from forebay.rewriter.ir.plan import Budget, Plan, PlanError
from forebay.rewriter.planning.objective import BudgetError, Objective, latency_s, tokens_per_s
from forebay.rewriter.policy.block_costs import BlockShape
from forebay.rewriter.policy.policy_search import Space, candidates

TARGET = 0.01  # the least budget for a throughput is found to this part of itself


@dataclass(frozen=True)
class Lowered:
    """Blocks that can become a Plan with K, V and activations on the device: one micro-batch (more are wished for, not
    searched), step after step. Those with caches on slower tiers are `ScheduleSearch`'s."""

    micro_batches: tuple[int, ...] = (1,)

    def space(self, batch: int = 0, cache_formats: tuple[str, ...] = ("native",)) -> Space:
        """The blocks to look at: of exactly `batch` sequences if that is not 0."""
        return Space(micro_batches=(batch,) if batch else BATCHES, blocks=self.micro_batches, orders=("row",),
                     cache_formats=cache_formats, host_attention=False, largest=batch or max(BATCHES))


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOWERED = Lowered()
PlanFor = Callable[[BlockShape, Budget], Plan]  # PlanError where nothing fits


def blocks(batch: int, cache_formats: tuple[str, ...] = ("native",)) -> list[BlockShape]:
    """Every block that runs, small ones first."""
    return sorted(candidates(LOWERED.space(batch, cache_formats), host_attends=False), key=lambda b: b.size)


def search_plans(plan_for: PlanFor, budget: Budget, objective: Objective, found: list[BlockShape]) -> list[Plan]:
    """Plans for those of the blocks that fit, smallest first; PlanError of the smallest if none does.

    A block that does not fit ends the search of larger ones in the same formats. With a budget as objective each
    plan has the least device memory, to 1 %, that reaches the throughput."""
    plans, full, first = [], set[str](), None
    for block in found:
        if block.cache_format in full:
            continue
        try:
            plan = plan_for(block, budget)
        except PlanError as error:
            full.add(block.cache_format)
            first = first or error
            continue
        if objective.kind == "budget" and tokens_per_s(plan) >= objective.tokens_per_s:
            plan = _smallest(plan_for, block, budget, objective.tokens_per_s, plan)
        plans.append(plan)
    if not plans and first is not None:
        raise first
    return plans


def best_plan(plans: list[Plan], objective: Objective) -> Plan:
    """The plan that the objective asks for; BudgetError where none reaches it."""
    if objective.kind == "budget":
        enough = [p for p in plans if tokens_per_s(p) >= objective.tokens_per_s]
        if not enough:
            raise BudgetError(f"no device budget reaches {objective.tokens_per_s:g} tokens/s with what runs; the most "
                              f"is {max(map(tokens_per_s, plans)):.4g}")
        return min(enough, key=lambda p: p.budget.device)
    quick = [p for p in plans if latency_s(p) <= objective.latency_s]
    if not quick:
        raise BudgetError(f"no plan ends within {objective.latency_s:g} s; the quickest takes "
                          f"{min(map(latency_s, plans)):.4g} s")
    return min(quick, key=latency_s) if objective.kind == "latency" else max(quick, key=tokens_per_s)


def plan_frontier(plans: list[Plan]) -> list[Plan]:
    """Plans none of which is beaten in both latency and throughput, quickest first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (latency_s(p), -tokens_per_s(p))):
        if not kept or tokens_per_s(plan) > tokens_per_s(kept[-1]):
            kept.append(plan)
    return kept


def _smallest(plan_for: PlanFor, block: BlockShape, budget: Budget, wanted: float, known: Plan) -> Plan:
    """The plan with the least device budget that reaches `wanted` tokens per second; more is never predicted slower."""
    low, high = 0, known.budget.device
    while high - low > TARGET * high:
        middle = (low + high) // 2
        try:
            plan = plan_for(block, replace(budget, device=middle))
        except PlanError:
            low = middle
            continue
        if tokens_per_s(plan) >= wanted:
            known, high = plan, middle
        else:
            low = middle
    return known
