"""The step of a captured model with logits of every token, made of the one with logits of the last."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.rewriter.ir.graph import CapturedModel, copy_node, is_pipeline_send

aten = torch.ops.aten


def every_position(captured: CapturedModel) -> CapturedModel | None:
    """`captured`, whose step gives logits [B, V] of the token `last`, with logits [B, S, V] of all S tokens; None where
    its step does not choose the token in front of the head, or does more with the result than to hand it out, and where
    the length of the call is an input: a step over several tokens has one length for all. A stage without the head has
    room for as many. The blocks are the same ones."""
    ends = _ends(captured)
    if ends is None:
        return None
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in captured.step.graph.nodes:
        if node not in ends:
            env[node] = copy_node(graph, node, env)
        elif node.target is aten.empty.memory_format:
            env[node] = _room(graph, node, env)
        else:
            env[node] = env[node.args[0]]
    return replace(captured, step=_LazyGraphModule(captured.step, graph), gives="all")


def gives_every_position(captured: CapturedModel) -> bool:
    """Return whether `every_position` can make such a step; makes none."""
    return _ends(captured) is not None


def _ends(captured: CapturedModel) -> tuple[fx.Node, ...] | None:
    """Find the node that chooses the token in front of the head, and the one that takes its logits, or the memory that
    a stage is handed them in; None where a step does otherwise."""
    if captured.gives != "last" or any(node.target == "length" for node in captured.step.graph.find_nodes(
            op="placeholder")):
        return None
    taken = captured.step.graph.output_node().args[0]
    while isinstance(taken, tuple | list) and len(taken) == 1:
        taken = taken[0]
    if isinstance(taken, fx.Node) and is_pipeline_send(taken):
        taken = taken.args[0]
    if not isinstance(taken, fx.Node):
        return None
    if taken.target is aten.empty.memory_format and len(taken.args[0]) == 2:  # type: ignore[arg-type]
        return (taken,)
    gathers = [n for n in captured.step.graph.nodes if n.target is aten.gather.default and _from_last(n.args[2])]
    return (gathers[0], taken) if len(gathers) == 1 and (
        taken.target is aten.select.int and taken.args[1:] == (1, 0)) else None


def _room(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """The memory for logits of one token of each sequence, for those of all."""
    ids = next(new for old, new in env.items() if old.target == "input_ids")
    tokens = graph.call_function(aten.sym_size.int, (ids, 1))
    tokens.meta["val"] = aten.sym_size.int(ids.meta["val"], 1)
    room = copy_node(graph, node, env)
    sizes, value = room.args[0], room.meta["val"]
    assert isinstance(sizes, list | tuple)
    room.args = ([sizes[0], tokens, sizes[1]],)
    room.meta["val"] = value.new_empty((value.shape[0], tokens.meta["val"], value.shape[1]))
    return room


def _from_last(value: object) -> bool:
    """Return whether an index is made of the input `last` alone."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        value = value.args[0]
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.target == "last"
