"""The language model that `wrap` is asked for: by itself, beside a draft, or on one of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from forebay.calibration import calibrated
from forebay.drafted import DraftedPlanner
from forebay.language_model import LanguageModel
from forebay.read_mesh import read_mesh
from forebay.rewriter.checkpoints.resolve import draft_copies
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.pipeline.plan_search import plan_batch
from forebay.rewriter.pipeline.plan_task import PlanChoice
from forebay.rewriter.planning.options import Options


def build_model(
    opened: tuple[Any, Any, Any], budget: Budget, workload: Workload, options: Options, choose: PlanChoice = plan_batch,
    capture: Callable[..., CapturedModel] | None = None,
) -> LanguageModel:
    """Build an opened model by itself, beside a draft, or on one of several ranks; `capture` is as for it."""
    captured, checkpoint, _ = opened
    options = calibrated(options, checkpoint.fingerprint, captured.dtype)
    given: Any = *opened, budget, workload, options, options.machine, options.plan, choose
    if options.draft is not None and options.mesh is not None:
        raise PlanError("draft: a model on several ranks has none; leave draft or mesh out")
    if options.draft is not None and options.plan is not None:
        raise PlanError("draft: a plan that is replayed was made without one; leave one of both out, or wrap the "
                        "draft by itself and give it to generate as assistant_model")
    if options.mesh is not None:
        from forebay.sharded import shard_model

        return shard_model(read_mesh(options.mesh), *given)
    if options.draft is None:
        return LanguageModel(*given, capture=capture)
    for name in draft_copies(checkpoint.folder, budget.device) if options.draft == "auto" else (options.draft,):
        lm = LanguageModel(*given, planner_of=partial(DraftedPlanner, name), capture=capture)
        if lm.helper is not None or lm.shared_draft is not None:
            break
    return lm  # the last one says why nothing drafts
