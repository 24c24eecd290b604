"""Views of views in ONNX, as one view or none: a runtime starts each as an operator of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forebay.kernels.onnx_meaning import OnnxGraph, OnnxValue

VIEWS = ("Transpose", "Reshape")


class RankedGraph(OnnxGraph, Protocol):
    """A graph that knows some values' numbers of dimensions."""

    def rank(self, value: str) -> int | None:
        """The dimensions of a value, where they are known."""


def viewed(g: RankedGraph, kind: str, inputs: Sequence[str], attributes: Mapping[str, Any]) -> str | None:
    """A value equal to the result of the view `kind`; None where the view is needed."""
    if kind == "Transpose":
        before = g.source(inputs[0], kind)
        if before is None:
            return None
        first, then = before[1]["perm"], attributes["perm"]
        return before[0][0] if [first[i] for i in then] == list(range(len(then))) else None
    shape = g.numbers(inputs[1])
    if attributes or shape is None:
        return None
    if shape == [0, 0, -1] and g.rank(inputs[0]) == 3:
        return str(inputs[0])
    before = g.source(inputs[0], kind)
    held = g.numbers(before[0][1]) if before is not None and not before[1] else None
    if before is None or held is None or any(n == 0 and (i >= len(held) or held[i] != 0) for i, n in enumerate(shape)):
        return None  # a size of 0 is the input's at the same place
    return str(g.op(kind, before[0][0], inputs[1]))


def shape_of(x: OnnxValue, sizes: Sequence[Any]) -> list[int] | None:
    """`sizes`, numbers and sizes that vary, for a Reshape of x as numbers alone: 0 where x has the size at that place,
    -1 for one that is left. None where there are more, or a size is 0 itself."""
    found, left = [], 0
    for i, size in enumerate(sizes):
        if isinstance(size, OnnxValue):
            kept = bool(size.sizes) and i < len(x.sizes) and x.sizes[i] == size.sizes[0]
            found.append(0 if kept else -1)
        else:
            if size == 0:
                return None
            found.append(size)
        left += found[-1] == -1
    return found if left <= 1 else None
