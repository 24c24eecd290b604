"""Prompts of latent attention: over latents, or over keys and values made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.kernels.operators import EXPANDED_ATTENTION
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.latents import Latents
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest


def explain_latents(plan: Plan) -> tuple[str, str] | None:
    """Return what prompts attend to, where they expand latents."""
    text = "prompts attend to keys and values made of latents, some rows at a time; answers attend to latents"
    return ("latents", text) if plan.schedule.batching.latents.expanded else None


def latent_choices(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """Yield both ways where none is asked for, to compare their Programs. PlanError where nothing keeps latents, or the
    device has no kernel."""
    asked, can, kind = request.options.expand_latents, request.graphs.expands, request.machine.kind
    if asked and not can:
        raise PlanError("expand_latents: no layer of this model keeps latents that steps could expand; leave it out")
    if kind.kernels not in EXPANDED_ATTENTION.bind:
        can = False
        if asked:
            raise PlanError(f"expand_latents: a {kind.title} has no kernel that expands latents; leave it out")
    if not asked:
        yield batching
    if asked or (asked is None and can and request.workload.prompt > 1):
        yield replace(batching, latents=Latents(True))


LATENTS = ScheduleFeature("latents", candidates=latent_choices, explain=explain_latents)
