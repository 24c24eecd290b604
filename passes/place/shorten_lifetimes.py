"""Order a block's operators so that fewer of their results wait at the same time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from forebay.passes.lower.out_variants import is_view, mutated_arguments
from forebay.passes.place.allocate_buffers import overwritable
from forebay.rewriter.ir.graph import is_collective


def shorten_lifetimes(gm: fx.GraphModule) -> None:
    """Move every operator of a block down to where its first reader needs it, if the peak of live bytes then sinks.

    Operators that write an argument, those that read what one of them writes, and exchanges of ranks, which all have in
    one order, keep theirs. With a key for
    every query head, keys and values then lie in the cache before the queries take memory, and attention needs less
    than the feed-forward part. Graphs that call blocks are left alone.
    """
    graph = gm.graph
    nodes = list(graph.nodes)
    if any(node.op == "call_module" for node in nodes):
        return
    later = _as_late_as_possible(nodes)
    if peak_nbytes(later) < peak_nbytes(nodes):
        for node in later[1:]:
            later[0].append(node)
            later[0] = node


def _as_late_as_possible(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Inputs, then each operator that must keep its place, with what it needs just before it: of several operands the
    one first that takes most on the way to its result (Sethi and Ullman 1970)."""
    written = {_base(node.args[i]) for node in nodes for i in _writes(node)}
    placed: dict[fx.Node, None] = dict.fromkeys(n for n in nodes if n.op == "placeholder")
    needs: dict[fx.Node, int] = {}  # bytes beside the result, the most at one time, from inputs to result

    for node in nodes:
        held = need = 0
        for operand in sorted(node.all_input_nodes, key=lambda n: -needs[n]):
            need = max(need, held + needs[operand] + _held(operand))
            held += _held(operand)
        needs[node] = need if _base(node) is node else max(0, need - _held(node))

    def place(node: fx.Node) -> None:
        for operand in sorted(node.all_input_nodes, key=lambda n: -needs[n]):
            if operand not in placed:
                place(operand)
        placed[node] = None

    for node in nodes:
        fixed = (not node.users or bool(_writes(node)) or is_collective(node)
                 or any(_base(n) in written for n in node.all_input_nodes))
        if fixed and node not in placed:
            place(node)
    return list(placed)


def _held(node: fx.Node) -> int:
    """Bytes per token that a result keeps; inputs are kept by others."""
    base = _base(node)
    return _nbytes(base) if isinstance(base, fx.Node) and base.op == "call_function" else 0


def _writes(node: fx.Node) -> tuple[int, ...]:
    return mutated_arguments(node.target) if isinstance(node.target, torch._ops.OpOverload) else ()


def _base(node: object) -> object:
    """The node whose memory a view shows."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.args and (
            is_view(node.target) or not isinstance(node.target, torch._ops.OpOverload)):
        node = node.args[0]
    return node


def peak_nbytes(order: Sequence[fx.Node]) -> int:
    """Most bytes per token live at once: sizes that vary, batch and tokens, are common to all values and left out.
    Beside the first input, inputs are there all the time and count nothing."""
    last: dict[object, int] = {}
    for i, node in enumerate(order):
        for operand in node.all_input_nodes:
            last[_base(operand)] = i
    sizes: dict[object, int] = {order[0]: _nbytes(order[0])}
    ends: dict[int, list[object]] = {}
    for key, i in last.items():
        ends.setdefault(i, []).append(key)
    live = peak = sizes[order[0]]
    for i, node in enumerate(order):
        if node.op == "call_function" and _base(node) is node:
            sizes[node] = _nbytes(node)
            taken = any(last[_base(n)] == i and sizes.get(_base(n)) == sizes[node] for n in overwritable(node))
            peak = max(peak, live + (0 if taken else sizes[node]))
            live += sizes[node]
        live -= sum(sizes.get(key, 0) for key in ends.get(i, ()))
    return peak


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return sum(math.prod(size for size in v.shape if isinstance(size, int)) * v.element_size()
               for v in values if isinstance(v, torch.Tensor))
