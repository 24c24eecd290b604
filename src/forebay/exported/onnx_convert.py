"""A graph, or one that calls others, put into ONNX node by node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from forebay.exported.errors import ExportError
from forebay.exported.onnx_aten import meaning_of
from forebay.exported.onnx_graph import Graph
from forebay.exported.onnx_merged import after, beside, merged
from forebay.kernels.onnx_meaning import OnnxValue
from forebay.kernels.operators import of_target
from forebay.rewriter.ir.graph import values_of


@dataclass(frozen=True)
class Conversion:
    """How graphs are put into `g`: `known` gives a node that is an input of the model in disguise, and `advice` says
    what to do about an operator without a meaning."""

    g: Graph
    advice: str
    known: Callable[[fx.Node], OnnxValue | None] = lambda node: None
    made: dict[fx.Node, Any] = field(default_factory=dict)  # of products computed as one: their parts of it

    def convert(self, gm: fx.GraphModule, env: dict[fx.Node, Any], where: str) -> Any:
        """Convert `gm`, with values of its placeholders in `env`. ExportError names an operator without a meaning, and
        `where` it stands: in its module where that is empty."""
        for node in gm.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)  # type: ignore[arg-type]
            if node.op == "call_module":
                layer = node.meta["layer"]
                block: Any = gm.get_submodule(str(node.target))
                given = zip(block.graph.find_nodes(op="placeholder"), (env[a] for a in node.args), strict=True)
                inner = {placeholder: _within(placeholder, value) for placeholder, value in given}
                self.g.prefix = f"layer.{layer}/"
                env[node] = _described(node, self.convert(block, inner, f"layer {layer}"))
                self.g.prefix = ""
            elif node.op == "call_function":
                env[node] = self._call(node, env, where)
        raise ExportError(f"{where or 'the module'} gives nothing")

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], where: str) -> Any:
        known = self.known(node)
        if known is not None:
            return known
        if node in self.made:
            return _described(node, after(self.g, node, self.made.pop(node), env))
        ours = of_target(node.target)
        meaning = meaning_of(node.target) if ours is None else ours.onnx
        reason = "" if meaning is not None else "it has none"
        products = beside(node, env)
        joined = merged(self.g, products, env) if len(products) > 1 else None
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)  # type: ignore[arg-type]
        made: Any = None
        if meaning is not None:
            try:
                made = meaning(self.g, *(args if joined is None else joined[0]), **kwargs)
            except NotImplementedError as error:
                reason = str(error)
        if reason:
            raise ExportError(f"{where or _module_of(node)} computes {node.target} ({node.name}), whose meaning in "
                              f"ONNX is not known ({reason}); {self.advice}")
        if joined is not None:
            parts = self.g.op("Split", made, self.g.constant(joined[1]), outputs=len(products), axis=-1)
            self.made.update(zip(products, parts, strict=True))
            return _described(node, after(self.g, node, self.made.pop(node), env))
        return _described(node, made)


def _within(placeholder: fx.Node, value: OnnxValue) -> OnnxValue:
    """An operand of a block with its sizes as the block's graph writes them."""
    if value.parts is not None:
        return value
    return OnnxValue(value, value.dtype, value.shape, None, [str(n) for n in placeholder.meta["val"].shape])


def _module_of(node: fx.Node) -> str:
    """The module that a node of a traced module stands in."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "the module"
    path, kind = list(stack.values())[-1]
    return f"{path or 'the module'} ({str(kind).rpartition('.')[2].strip(chr(39) + '>')})"


def _described(node: fx.Node, made: Any) -> Any:
    """Return a meaning's result with dtype and shape of the node's values."""
    if made is None:
        return None
    values = values_of(node)
    if isinstance(made, tuple):
        return tuple(_value(name, value) for name, value in zip(made, values, strict=True))
    return _value(made, values[0]) if values else OnnxValue(made, torch.int64, sizes=[str(node.meta.get("val"))])


def _value(name: str, value: torch.Tensor) -> OnnxValue:
    parts = name.parts if isinstance(name, OnnxValue) else None
    return OnnxValue(name, value.dtype, [n if isinstance(n, int) else None for n in value.shape], parts,
                     [str(n) for n in value.shape])
