"""Which kind of language model serves what is asked of `wrap`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.rewriter.ir.plan import PlanError

if TYPE_CHECKING:
    from forebay.api import LanguageModel

MeshShape = str | int | Sequence[int]


def made(draft: str | os.PathLike[str] | None, mesh: MeshShape | None, *given: Any) -> LanguageModel:
    """A model by itself, beside a draft, or on one of several ranks."""
    if draft is not None and mesh is not None:
        raise PlanError("draft: a model on several ranks has none; leave draft or mesh out")
    if mesh is not None:
        from forebay.sharded import ShardedModel

        return ShardedModel(mesh_shape(mesh), *given)
    if draft is not None:
        from forebay.drafted import DraftedModel

        return DraftedModel(draft, *given)
    from forebay.api import LanguageModel

    return LanguageModel(*given)


def mesh_shape(mesh: MeshShape) -> tuple[int, ...]:
    """Ranks along each axis: of 4, (2, 2) or "2x2". PlanError where it is none of these."""
    parts: Sequence[Any] = mesh.lower().split("x") if isinstance(mesh, str) else (
        [mesh] if isinstance(mesh, int) else mesh)
    try:
        shape = tuple(map(int, parts))
    except (TypeError, ValueError):
        shape = ()
    if not shape or min(shape) < 1:
        raise PlanError(f"mesh: {mesh!r} must be numbers of ranks of at least 1, as 4 or 2x2")
    return shape
