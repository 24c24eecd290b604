"""The shapes of a step's matrix products, as the tiles that a plan streams weights in make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from forebay.kernels.products.linear.joined import MOST_WEIGHTS
from forebay.rewriter.ir.graph import weight_name
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.products import Shape, linear_arguments, product_shape, reads_table, tileable


@dataclass(frozen=True)
class ProductUse:
    """A product of a flat graph: its shape (dtype, M, N, K) while its weight is whole, the weight's name (empty where
    it is no input), and the dimension that row tiles of the weight cut ("" where it is never tiled)."""

    shape: Shape | None  # None: a product only once it is tiled
    weight: str
    cut: Literal["n", "k", ""]
    tiled: Shape  # in tiles of one row


def product_uses(flat: fx.GraphModule) -> tuple[ProductUse, ...]:
    """The products of a flat graph, before any pass, each once."""
    found: dict[ProductUse, None] = {}
    for node in flat.graph.nodes:
        shape = product_shape(node)
        weights = [arg for arg in node.all_input_nodes
                   if weight_name(arg) is not None and tileable(node, arg) and not reads_table(node, arg)]
        if not weights:
            if shape is not None:
                linear = linear_arguments(node)
                weight = linear.weight if linear is not None else node.args[2]
                found[ProductUse(shape, weight_name(weight) or "", "", shape)] = None
            continue
        weight = weights[0]
        cut: Literal["n", "k"] = "n" if linear_arguments(node) is not None else "k"
        if shape is None:  # whole, it is torch's: a plain matrix product x @ w, or one of rows that we do not take
            value, matrix = node.meta["val"], weight.meta["val"]
            n, k = matrix.shape if cut == "n" else reversed(matrix.shape)
            tiled = str(matrix.dtype)[6:], value.numel() // max(1, n), n, k
        else:
            tiled = shape
        found[ProductUse(shape, weight_name(weight) or "", cut, tiled)] = None
    return tuple(found)


def joined_shapes(flat: fx.GraphModule) -> dict[Shape, tuple[int, ...]]:
    """Shapes of products of one operand that `join_launches` may make one, with the rows of each weight: of a few that
    nothing follows, and of a gate and what it multiplies."""
    found: dict[Shape, tuple[int, ...]] = {}
    apart: dict[fx.Node, list[fx.Node]] = {}
    for node in flat.graph.nodes:
        linear = linear_arguments(node)
        if linear is None or product_shape(node) is None:
            continue
        gate = linear_arguments(linear.multiplier)
        if linear[3:6] == (None, None, ""):
            apart.setdefault(linear.x, []).append(node)
        elif gate is not None and gate.x is linear.x and gate.activation and linear[4:6] == (None, ""):
            found |= _side_by_side([linear.multiplier, node])
    for nodes in apart.values():
        for count in range(2, MOST_WEIGHTS + 1):
            for first in range(len(nodes) - count + 1):
                found |= _side_by_side(nodes[first : first + count])
    return found


def _side_by_side(nodes: Sequence[fx.Node]) -> dict[Shape, tuple[int, ...]]:
    shapes: list[Any] = [product_shape(node) for node in nodes]
    rows = tuple(n for _, _, n, _ in shapes)
    (dtype, m, _, k), *others = shapes
    return {(dtype, m, sum(rows), k): rows} if all(other == (dtype, m, other[2], k) for other in others) else {}


def weights_of_layers(step: fx.GraphModule) -> dict[int, tuple[str | None, ...]]:
    """For each layer that a step graph calls, the weights that it is given, by position."""
    return {call.meta["layer"]: tuple(weight_name(arg) if isinstance(arg, fx.Node) else None for arg in call.args)
            for call in step.graph.find_nodes(op="call_module")}


def planned_shapes(
    plan: Plan, uses: Iterable[ProductUse], layers: Mapping[int, tuple[str | None, ...]],
    representatives: Mapping[int, int],
) -> set[Shape]:
    """The shapes of all products of a step, given those of the layers that all are like (`Layout.representatives`)."""
    alike: dict[str, set[str]] = {}
    for layer, like in representatives.items():
        for name, of_like in zip(layers[layer], layers[like], strict=True):
            if name is not None and of_like is not None:
                alike.setdefault(of_like, {of_like}).add(name)
    return {shape for use in uses for name in alike.get(use.weight, {use.weight}) for shape in _shapes(plan, use, name)}


def _shapes(plan: Plan, use: ProductUse, name: str) -> Iterator[Shape]:
    dtype, m, n, k = use.tiled
    rows = n if use.cut == "n" else k
    tile = plan.weight(name).tile_rows if use.cut and plan.streams(name) else 0
    if not 0 < tile < rows:
        if use.shape is not None:
            yield use.shape
        return
    for size in {tile, rows % tile or tile}:
        yield (dtype, m, size, k) if use.cut == "n" else (dtype, m, n, size)
