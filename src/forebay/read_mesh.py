"""Ranks, as `wrap(mesh=…)` and `--mesh` name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.share import Attended, Dimensions, RankShare
from forebay.rewriter.planning.options import MeshShape

CHUNKED = ("chunks", "gather_chunks")
GATHERED = {"x": 1, "xy": 2, "xyz": 0}  # layouts whose prefills gather weights, and over how many axes; 0: all


def read_mesh(mesh: MeshShape) -> RankShare:
    """Ranks along each axis of a stage, how many stages there are, the layout of a stage and what ranks divide of
    attention, and in how many parts sums are exchanged and inputs gathered, as rank 0 has it: of 4, (2, 2), "2x2",
    {"stages": 2, "tensor": 2}, "stages=2,tensor=2", "tensor=2x2,layout=2d,attention=batch", "tensor=4,chunks=4/2" (4 in
    steps over several tokens, 2 over one) or "tensor=2x2,layout=2d,gather_chunks=4". PlanError where it is none of
    these."""
    wanted = ("numbers of ranks of at least 1, as 4, 2x2 or stages=2,tensor=2, and layout=2d, attention=batch, "
              "chunks=4")
    known = {"stages", "tensor", "layout", "attention", "gather_buffers", *CHUNKED}
    parts: Mapping[str, Any] = {"tensor": mesh}
    if isinstance(mesh, Mapping):
        parts = mesh
    elif isinstance(mesh, str) and "=" in mesh:
        named = [part.partition("=") for part in mesh.split(",")]
        parts = {name.strip(): given for name, _, given in named}
        if len(parts) < len(named):
            raise PlanError(f"mesh: {mesh!r} names a part twice; it must be {wanted}")
    stages = _numbers(parts.get("stages", 1))
    shape = _numbers(parts.get("tensor", 1))
    layout = str(parts.get("layout", "1d")).lower()
    attention = str(parts.get("attention", "heads")).lower()
    if set(parts) - known or len(stages) != 1 or not shape or min(*stages, *shape) < 1:
        raise PlanError(f"mesh: {mesh!r} must be {wanted}")
    if layout not in (*get_args(Dimensions), *GATHERED):
        raise PlanError(f"mesh: layout {layout} is none of those that run, "
                        f"{', '.join((*get_args(Dimensions), *GATHERED))}")
    chunks, gathers = (_chunks(name, parts.get(name, 1)) for name in CHUNKED)
    if layout in GATHERED:
        if (chunks, gathers) != ((1, 1), (1, 1)):
            raise PlanError(f"mesh: {mesh!r}: sums are exchanged at once where prompts gather weights, and so is what "
                            "is gathered; leave chunks and gather_chunks out")
        found = _gathered(mesh, RankShare(shape, 0, stages[0]), layout, parts.get("attention", "batch"))
        return replace(found, gather_buffers=_buffers(parts.get("gather_buffers")))
    if "gather_buffers" in parts:
        raise PlanError(f"mesh: {mesh!r}: weights are gathered with layout=x, xy or xyz; leave gather_buffers out")
    if attention not in get_args(Attended):
        raise PlanError(f"mesh: attention {attention} is divided by none of those that run, "
                        f"{', '.join(get_args(Attended))}")
    found = RankShare(shape, 0, stages[0], cast("Dimensions", layout), cast("Attended", attention),
                      chunks=chunks, gather_chunks=gathers)
    if layout == "2d" and len(found.axes) < 2:
        raise PlanError(f"mesh: {mesh!r}: the layout 2d needs a mesh of two axes, as 2x2")
    if gathers != (1, 1) and layout != "2d":
        raise PlanError(f"mesh: {mesh!r}: inputs of matmuls are gathered with layout=2d; leave gather_chunks out")
    return found


def _gathered(mesh: MeshShape, share: RankShare, layout: str, attention: object) -> RankShare:
    """The ranks whose prefills gather weights along the last axis, the last two, or all."""
    axes = share.axes[-GATHERED[layout]:] if GATHERED[layout] else share.axes
    if len(axes) < max(1, GATHERED[layout]) or share.stages > 1 or attention != "batch":
        raise PlanError(f"mesh: {mesh!r}: weights are gathered over 1 axis with layout=x, 2 with xy and all with xyz, "
                        "where the mesh has as many, without stages and with attention=batch")
    return replace(share, layout="2d" if len(share.axes) > 1 else "1d", attention="batch", gathered=axes)


def _buffers(given: Any) -> int | None:
    """Times the weights read at once that those gathered ahead have memory for; None where nothing is said."""
    found = () if given is None else _numbers(given)
    if given is not None and (len(found) != 1 or found[0] < 0):
        raise PlanError(f"mesh: gather_buffers {given} must be a number of at least 0")
    return found[0] if found else None


def _chunks(name: str, given: Any) -> tuple[int, int]:
    """Parts of exchanges in steps over several tokens and over one: of 4, "4", "4/1" or (4, 1)."""
    found = _numbers(given.replace("/", "x") if isinstance(given, str) else given)
    both = found * 2 if len(found) == 1 else found
    if len(both) != 2 or min(both) < 1 or max(both) % min(both):
        raise PlanError(f"mesh: {name} {given} must be a number of at least 1, or two, of which one divides the other, "
                        "as 4/1: in steps over several tokens, and over one")
    return both[0], both[1]


def _numbers(given: Any) -> tuple[int, ...]:
    """Whole numbers joined by x, in a sequence, or one alone; none where it is something else."""
    parts = given.lower().split("x") if isinstance(given, str) else [given] if isinstance(given, int) else given
    try:
        return tuple(map(int, parts))
    except (TypeError, ValueError):
        return ()
