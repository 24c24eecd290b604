"""Decode steps that read the values of some tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.sparsity import Sparsity
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest


def explain_values(plan: Plan) -> tuple[str, str] | None:
    """Return which values decode steps read, where they do not read all."""
    share = plan.schedule.batching.sparsity.values
    text = f"decode steps read those of {100 * share:g} % of the tokens, the weightiest"
    return ("values", text) if share < 1 else None


def asked_values(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """The share that is asked for."""
    yield replace(batching, sparsity=Sparsity(request.options.sparse_values))


SPARSITY = ScheduleFeature("sparsity", candidates=asked_values, explain=explain_values)
