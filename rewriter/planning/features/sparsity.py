"""Decode steps that read the values of some tokens alone."""

from __future__ import annotations

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.planning.features.feature import ScheduleFeature


def explain_values(plan: Plan) -> tuple[str, str] | None:
    """Which values decode steps read, where they do not read all."""
    share = plan.schedule.batching.sparsity.values
    text = f"decode steps read those of {100 * share:g} % of the tokens, the weightiest"
    return ("values", text) if share < 1 else None


SPARSITY = ScheduleFeature("sparsity", explain=explain_values)
