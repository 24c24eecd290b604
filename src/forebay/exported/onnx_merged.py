"""Products of one operand as one product with the rows of all, of which each takes its part: a runtime starts one
operator and has longer rows of work for its threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from forebay.exported.onnx_graph import Graph
from forebay.kernels.onnx_meaning import OnnxValue, Parts
from forebay.kernels.operators import of_target
from forebay.kernels.products.linear.onnx import followed

PLAIN = (None, None, "")  # multiplier, residual, activation


def beside(node: fx.Node, env: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The products that can be one with `node`, itself among them: of the same operand, in the same format, and with a
    bias each or none. Where something follows one in its operator (`after`), as with gate and up, cutting the result
    takes longer than starting another product: 0.02 of a prefill in float32, 0.04 of a decode step over packed rows
    (SmolLM2, 256 tokens, one thread). Rows with lows take products and sums beside, of which there are fewer then."""
    if not _is_mergeable(node, env):
        return [node]
    operand: Any = node.args[0]
    return [other for other in operand.users if other.target is node.target and other.args[0] is operand
            and _is_mergeable(other, env) and other.args[6:] == node.args[6:]
            and (_bias(other) is None) == (_bias(node) is None)]


def merged(g: Graph, nodes: list[fx.Node], env: Mapping[fx.Node, Any]) -> tuple[list[Any], list[int]] | None:
    """Operands of the one product that `nodes` are, and the columns of its result that each of them has; None where
    their tensors are not all of the model's own."""
    weights = [env[node.args[1]] for node in nodes]  # type: ignore[index]
    weight = _packed(g, weights) if all(w.parts is not None for w in weights) else g.joined(weights)
    biases = [env[bias] for node in nodes if (bias := _bias(node)) is not None]
    bias = g.joined(biases) if biases else None
    if weight is None or (biases and bias is None):
        return None
    first: Any = nodes[0].args
    return [env[first[0]], weight, bias, *PLAIN[: len(first[3:])], *first[6:]], [w.shape[0] for w in weights]


def after(g: Graph, node: fx.Node, part: str, env: Mapping[fx.Node, Any]) -> str:
    """Apply the epilogue of the matmul `node` to `part`, the matmul itself and its bias."""
    given: Any = fx.map_arg(node.args[3:6], env.__getitem__)  # type: ignore[arg-type]
    return followed(g, part, None, *given, *PLAIN[len(given) :])


def _packed(g: Graph, rows: list[OnnxValue]) -> OnnxValue | None:
    codes, scales, lows = zip(*(r.parts for r in rows), strict=True)  # type: ignore[misc]
    if len({low is None for low in lows}) > 1:
        return None
    low = None if lows[0] is None else g.joined(lows)
    parts: Parts | None = (g.joined(codes), g.joined(scales), low)  # type: ignore[assignment]
    if None in parts[: 2 if lows[0] is None else 3]:  # type: ignore[index]
        return None
    return OnnxValue("+".join(rows), rows[0].dtype, (sum(r.shape[0] or 0 for r in rows), *rows[0].shape[1:]), parts)


def _is_mergeable(node: fx.Node, env: Mapping[fx.Node, Any]) -> bool:
    if not _is_product(node):
        return False
    parts = env[node.args[1]].parts  # type: ignore[index]
    return node.args[3:6] == PLAIN[: len(node.args[3:6])] or (parts is not None and parts[2] is not None)


def _is_product(node: fx.Node) -> bool:
    record = of_target(node.target)
    if node.target is not torch.ops.aten.linear.default and (record is None or record.implementations is None):
        return False
    return not node.kwargs and isinstance(node.args[1], fx.Node) and node.args[1].op == "placeholder"


def _bias(node: fx.Node) -> Any:
    return node.args[2] if len(node.args) > 2 else None
