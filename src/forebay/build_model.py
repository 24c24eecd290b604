"""The language model that `wrap` is asked for: by itself, beside a draft, or on one of several ranks."""

from __future__ import annotations

import os
from typing import Any

from forebay.drafted import DraftedModel, best_drafted
from forebay.language_model import LanguageModel
from forebay.read_mesh import read_mesh
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.planning.options import MeshShape
from forebay.sharded import ShardedModel


def build_model(draft: str | os.PathLike[str] | None, mesh: MeshShape | None, *given: Any) -> LanguageModel:
    """Build a model by itself, beside a draft, or on one of several ranks."""
    if draft is not None and mesh is not None:
        raise PlanError("draft: a model on several ranks has none; leave draft or mesh out")
    if mesh is not None:
        return ShardedModel(read_mesh(mesh), *given)
    if draft is not None:
        return best_drafted(*given) if draft == "auto" else DraftedModel(draft, *given)
    return LanguageModel(*given)
