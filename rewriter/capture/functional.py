"""Operators in place, as the code of models writes them: what they leave is made anew where nobody can tell."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_PARTS = {_aten.slice.Tensor: _aten.slice_scatter.default, _aten.select.int: _aten.select_scatter.default}


def make_functional(graph: fx.Graph) -> None:
    """Replace operators of torch's own that write into memory which the graph itself made.

    A written view takes its values along: what is a part of a tensor (a slice, an element) is scattered into a copy of
    the tensor, which later readers then read. Writes that another view could see stay as they are.
    """
    for node in list(graph.nodes):
        functional = _functional(node.target)
        if functional is None or not _keeps(node):
            continue
        target = node.args[0]
        if _is_fresh(target, node):
            node.target = functional
        elif isinstance(target, fx.Node) and target.target in _PARTS and _is_whole(target.args[0], target, node):
            _write_part(graph, node, functional)


def _write_part(graph: fx.Graph, node: fx.Node, functional: torch._ops.OpOverload) -> None:
    """Make `node`, which writes a part of a tensor, write the part of a copy that takes the tensor's place."""
    part: Any = node.args[0]
    whole, *where = part.args
    again = [each for each in whole.users if each > node and each.target is part.target and each.args == part.args]
    for view in again:  # y[1:] += x also copies the part to itself
        for user in list(view.users):
            if user.target is _aten.copy_.default and user.args == (view, node) and not user.users:
                graph.erase_node(user)
    node.target = functional
    with graph.inserting_after(node):
        made = graph.call_function(_PARTS[part.target], (whole, node, *where))
    made.meta = dict(whole.meta)
    whole.replace_all_uses_with(made, lambda user: user > made)


def _functional(target: object) -> torch._ops.OpOverload | None:
    """The operator that gives what one of torch's own leaves in its first operand; None for all others."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._opname
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    return getattr(packet, target._overloadname, None)


def _is_fresh(node: object, written_by: fx.Node) -> bool:
    """Return whether `node` shows memory that the graph made, and nobody sees after `written_by` but through it."""
    if not isinstance(node, fx.Node):
        return False
    if _is_view(node) and len(node.users) == 1:
        return _is_fresh(node.args[0], node)
    return _makes_memory(node) and all(
        each is written_by or (each < written_by and _makes_memory(each)) for each in node.users)


def _is_whole(node: object, part: fx.Node, written_by: fx.Node) -> bool:
    """Return whether `node` made the memory that `written_by` writes a `part` of, and no older view is read later."""
    def passed(user: fx.Node) -> bool:
        return user < written_by and (_makes_memory(user) or all(map(passed, user.users)))

    return isinstance(node, fx.Node) and _makes_memory(node) and set(part.users) == {written_by} and all(
        each is part or each > written_by or passed(each) for each in node.users)


def _is_view(node: fx.Node) -> bool:
    """Return whether an operator of torch's gives another view of its first operand, and does nothing else."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or len(target._schema.returns) != 1:
        return False
    return target._schema.returns[0].alias_info is not None


def _keeps(node: fx.Node) -> bool:
    """Return whether an operator that makes new memory would give the dtype that one in place leaves as it is."""
    dtypes = {each.meta["val"].dtype for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor)}
    kept = node.meta["val"].dtype
    return {each for each in dtypes if each.is_floating_point or not kept.is_floating_point} == {kept}


def _makes_memory(node: fx.Node) -> bool:
    """Return whether what a node gives lies in memory of its own; of several results each does, and has one node."""
    target, source = node.target, node.args[0] if node.args else None
    if target is operator.getitem and isinstance(source, fx.Node):
        return _makes_memory(source) and sum(each.args[1:] == node.args[1:] for each in source.users) == 1
    return isinstance(target, torch._ops.OpOverload) and all(each.alias_info is None for each in target._schema.returns)
