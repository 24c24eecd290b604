"""The step of a captured model with logits of every token, made of the one with logits of the last."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.rewriter.ir.graph import CapturedModel, copy_node

aten = torch.ops.aten


def every_position(captured: CapturedModel) -> CapturedModel | None:
    """`captured`, whose step gives logits [B, V] of the token `last`, with logits [B, S, V] of all S tokens; None where
    its step does not choose the token in front of the head, or does more with the result than to hand it out, and where
    the length of the call is an input: a step over several tokens has one length for all. The blocks are the same
    ones."""
    ends = _ends(captured)
    if ends is None:
        return None
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in captured.step.graph.nodes:
        env[node] = env[node.args[0]] if node in ends else copy_node(graph, node, env)
    return replace(captured, step=_LazyGraphModule(captured.step, graph), gives="all")


def gives_every_position(captured: CapturedModel) -> bool:
    """Whether `every_position` can make such a step; makes none."""
    return _ends(captured) is not None


def _ends(captured: CapturedModel) -> tuple[fx.Node, fx.Node] | None:
    """What chooses the token in front of the head, and what takes its logits; None where a step does otherwise."""
    if any(node.target == "length" for node in captured.step.graph.find_nodes(op="placeholder")):
        return None
    gathers = [n for n in captured.step.graph.nodes if n.target is aten.gather.default and _from_last(n.args[2])]
    taken = captured.step.graph.output_node().args[0]
    while isinstance(taken, tuple | list) and len(taken) == 1:
        taken = taken[0]
    if captured.gives != "last" or len(gathers) != 1 or not isinstance(taken, fx.Node) or not (
            taken.target is aten.select.int and taken.args[1:] == (1, 0)):
        return None
    return gathers[0], taken


def _from_last(value: object) -> bool:
    """Whether an index is made of the input `last` alone."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        value = value.args[0]
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.target == "last"
