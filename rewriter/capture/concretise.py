"""Fix a captured graph's sizes, and lay its blocks out flat.

After either function every node's `meta["val"]` is a meta tensor with its exact shape, strides and storage offset, and
`meta["alias_of"]` is the node of the same graph whose storage it views, or None for storage of its own, which a single
result fills. A node that returns its input unchanged aliases it. Where one operation makes several fresh tensors, they
alias that operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from forebay.rewriter.capture.layouts import has_gaps, run_on_meta, storage_key
from forebay.rewriter.ir.graph import META, copy_node

ALIAS = "alias_of"
LAYER = "layer"

_META = torch.device("meta")


def concretise(gm: fx.GraphModule, inputs: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """A copy of `gm` for inputs of these sizes: size arithmetic folded to numbers, dead nodes gone.

    `inputs` maps placeholder names to meta tensors, of which only shape, strides and dtype are read; placeholders of
    known size, such as weights, may be left out. Each block is fixed once per distinct set of input shapes, however
    many layers call it. Raises ValueError for an unknown, missing or unfitting input.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    unknown = inputs.keys() - {node.name for node in placeholders}
    if unknown:
        raise ValueError(f"the graph has no input {sorted(unknown)[0]!r}")
    taken: set[int] = set()
    values = [_input_value(node, inputs.get(node.name), taken) for node in placeholders]
    with torch.no_grad():
        return _Concretiser(gm, values).module


def _input_value(node: fx.Node, given: torch.Tensor | None, taken: set[int]) -> torch.Tensor:
    """A meta tensor with storage of its own, of the layout that is given or known for a placeholder: what is given, if
    its storage is not among the `taken`, which it then joins."""
    traced = node.meta.get("val")
    if given is None:
        if isinstance(traced, torch.Tensor) and _is_fixed(traced):
            return _fresh(traced)
        raise ValueError(f"input {node.name!r} has no fixed size; give a meta tensor for it")
    if isinstance(traced, torch.Tensor) and (given.dtype != traced.dtype or given.ndim != traced.ndim or any(
            [type(t) is int and s != t for s, t in zip(given.shape, traced.shape, strict=True)])):
        raise ValueError(f"input {node.name!r} must be {tuple(traced.shape)} {traced.dtype}, "
                         f"not {tuple(given.shape)} {given.dtype}")
    storage = storage_key(given)
    if storage in taken or not given.is_meta:
        return _fresh(given)
    taken.add(storage)
    return given


def _is_fixed(tensor: torch.Tensor) -> bool:
    return all(type(s) is int for s in (*tensor.shape, *tensor.stride()))


def _fresh(like: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same layout with storage of its own."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=_META)


class _Concretiser:
    """One walk over a graph; `module` is the result, `result` the value of its output."""

    module: fx.GraphModule
    result: Any

    def __init__(self, gm: fx.GraphModule, values: list[torch.Tensor]) -> None:
        self.gm = gm
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}  # of the old nodes
        self.env: dict[fx.Node, Any] = {}  # old node -> new node, or the number it became
        self.owners: dict[int, fx.Node] = {}  # storage -> the new node that made it
        self.blocks: dict[object, tuple[str, _Concretiser]] = {}
        remaining = iter(values)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self._input(node, next(remaining))
            elif node.op == "call_function":
                self._emit(node, self._run(node))
            elif node.op == "call_module":
                self._call_block(node)
            elif node.op == "output":
                self.result = _mapped(node.args[0], self.values)
                self.graph.output(_mapped(node.args[0], self.env))
                self.graph.output_node().meta = dict(node.meta)
            else:
                raise ValueError(f"{node.op} node {node.name!r}: make every input a placeholder first")
        _erase_dead(self.graph)
        self.inputs = {n: i for i, n in enumerate(self.graph.find_nodes(op="placeholder"))}
        self.module = _LazyGraphModule({name: block.module for name, block in self.blocks.values()}, self.graph)

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = _mapped((node.args, node.kwargs), self.values, onto_meta=True)
        try:
            return run_on_meta(node.target, args, kwargs)
        except Exception as error:
            error.add_note(f"at node {node.name!r}, {node.target}, with sizes fixed")
            raise

    def _input(self, node: fx.Node, value: torch.Tensor) -> None:
        new = self.graph.create_node("placeholder", node.target, name=node.name)
        new.meta.update(node.meta, val=value, **{ALIAS: None})
        self.owners[storage_key(value)] = new
        self.values[node], self.env[node] = value, new

    def _emit(self, node: fx.Node, value: Any, target: Any = None) -> None:
        """Put a node that gives `value`, with the same target unless told, behind those put before."""
        if isinstance(value, torch.Tensor) and has_gaps(value) and storage_key(value) not in self.owners:
            value = torch.empty_like(value)
        self.values[node] = value
        if isinstance(value, (int, float, bool)):
            self.env[node] = value
            return
        new = self.graph.create_node(node.op, target or node.target, name=node.name)
        new.args, new.kwargs = _mapped(node.args, self.env), _mapped(node.kwargs, self.env)  # given above, searched
        if isinstance(value, torch.Tensor):
            base = self.owners.setdefault(storage_key(value), new)
        else:
            bases = dict.fromkeys(
                self.owners.setdefault(storage_key(t), new) for t in pytree.tree_leaves(value) if _is_tensor(t))
            base = new if new in bases or not bases else next(iter(bases))  # several: meshgrid shows all its operands
        new.meta.update(node.meta, val=value, **{ALIAS: None if base is new else base})  # setting it would be searched
        self.env[node] = new

    def _call_block(self, node: fx.Node) -> None:
        known = self.values
        values = [known[arg] for arg in node.args]  # type: ignore[index]
        key = (node.target, tuple([(v.shape, v.stride(), v.dtype) for v in values]))
        found = self.blocks.get(key)
        if found is None:
            same = sum(known[0] == node.target for known in self.blocks)  # type: ignore[index]
            name = f"{node.target}_{same}" if same else str(node.target)
            block = self.gm.get_submodule(str(node.target))
            assert isinstance(block, fx.GraphModule)
            found = self.blocks[key] = (name, _Concretiser(block, [_fresh(v) for v in values]))
        name, inner = found
        self._emit(node, inner.outside(values), name)

    def outside(self, values: list[torch.Tensor]) -> Any:
        """The result of a call with inputs `values`: storage of its own per call, or that of the input it views."""

        def one(tensor: torch.Tensor) -> torch.Tensor:
            owner = self.owners[storage_key(tensor)]
            if owner.op != "placeholder":
                return _fresh(tensor)
            base = values[self.inputs[owner]]
            return base.as_strided(tensor.shape, tensor.stride(), base.storage_offset() + tensor.storage_offset())

        return one(self.result) if _is_tensor(self.result) else pytree.tree_map_only(torch.Tensor, one, self.result)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _mapped(args: Any, env: Mapping[fx.Node, Any], onto_meta: bool = False) -> Any:
    def one(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return env[arg]
        return _META if onto_meta and isinstance(arg, torch.device) else arg

    return map_aggregate(args, one)


def _erase_dead(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not _mutates(node):
            graph.erase_node(node)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def representative_layers(step: fx.GraphModule) -> tuple[fx.GraphModule, dict[int, int]]:
    """A step graph of concrete sizes with some of its layers, and for every layer the one of these that it is like.

    The last layers of each kind cut the step into stretches, as values that one kind alone reads die there. Kept are
    those last layers, and of each stretch the layers up to the second of each of its kinds: what is handed on between
    equal layers is the hidden state alone, so they have the peak of activations of the whole. A layer left out is like
    the second of its kind in its stretch, which has neighbours on both sides; its call is replaced by its first
    argument.
    """
    calls = step.graph.find_nodes(op="call_module")
    kinds = [str(call.target) for call in calls]
    layers = [call.meta[LAYER] for call in calls]
    representatives: dict[int, int] = {}
    start = 0
    for end in sorted({kind: i for i, kind in enumerate(kinds)}.values()):
        places: dict[str, list[int]] = {}
        for i in range(start, end + 1):
            places.setdefault(kinds[i], []).append(i)
        first = 1 + max(found[:2][-1] for found in places.values())
        representatives |= {layers[i]: layers[i] if i < first or i == end else layers[places[kinds[i]][1]]
                            for i in range(start, end + 1)}
        start = end + 1

    def left_out(node: fx.Node) -> bool:
        return node.op == "call_module" and representatives[node.meta[LAYER]] != node.meta[LAYER]

    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in step.graph.nodes:
        if node.op == "placeholder" and node.meta.get(META) is not None and all(map(left_out, node.users)):
            continue  # a weight or cache that only layers left out read
        if left_out(node):
            env[node] = env[node.args[0]]  # type: ignore[index]
        else:
            env[node] = _flat_copy(graph, node, env, node.name)
    return _LazyGraphModule(step, graph), representatives


def inline_blocks(step: fx.GraphModule) -> fx.GraphModule:
    """One flat graph with every block call replaced by the block's nodes.

    A node of layer 3 is named layer3_…, has `meta["layer"] == 3` and the name of its block graph in `meta["block"]`.
    Where sizes are fixed, `meta["alias_of"]` is restated for the flat graph; there it alone tells which nodes share
    storage, since the layers share their values.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in step.graph.nodes:
        if node.op == "call_module":
            block = step.get_submodule(node.target)
            assert isinstance(block, fx.GraphModule)
            env[node] = _inline(graph, block.graph, [env[arg] for arg in node.args], node.meta[LAYER], node.target)
        else:
            env[node] = _flat_copy(graph, node, env, node.name)
    return _LazyGraphModule({}, graph)


def _inline(graph: fx.Graph, block: fx.Graph, inputs: list[fx.Node], layer: int, name: object) -> Any:
    env: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    prefix = f"layer{layer}_"  # stamped by capture on every block call
    for node in block.nodes:
        if node.op == "placeholder":
            env[node] = next(remaining)
        elif node.op == "output":
            return _mapped(node.args[0], env)
        else:
            new = _flat_copy(graph, node, env, prefix + node.name)
            new.meta[LAYER] = layer
            new.meta["block"] = name
            env[node] = new
    raise ValueError("a block graph has no output")


def _flat_copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any], name: str) -> fx.Node:
    new = copy_node(graph, node, env, name)
    base = node.meta.get(ALIAS)
    if base is not None:
        flat = env[base]
        new.meta[ALIAS] = flat.meta.get(ALIAS) or flat
    return new
