"""The language model that `wrap` is asked for: by itself, beside a draft, or on one of several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forebay.calibration import ranges_for
from forebay.drafted import DraftedModel, best_drafted
from forebay.language_model import LanguageModel
from forebay.read_mesh import read_mesh
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.pipeline.plan_block import PlanChoice
from forebay.rewriter.planning.options import Options
from forebay.sharded import ShardedModel


def build_model(opened: tuple[Any, Any, Any], budget: Budget, workload: Workload, options: Options, *choose: PlanChoice
                ) -> LanguageModel:
    """Build an opened model by itself, beside a draft, or on one of several ranks."""
    captured, checkpoint, _ = opened
    options = replace(options, score_ranges=options.score_ranges or ranges_for(
        options.calibration, checkpoint.fingerprint, captured.dtype))
    given: Any = *opened, budget, workload, options, options.machine, options.plan, *choose
    if options.draft is not None and options.mesh is not None:
        raise PlanError("draft: a model on several ranks has none; leave draft or mesh out")
    if options.mesh is not None:
        return ShardedModel(read_mesh(options.mesh), *given)
    if options.draft is not None:
        return best_drafted(*given) if options.draft == "auto" else DraftedModel(options.draft, *given)
    return LanguageModel(*given)
