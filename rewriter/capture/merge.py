"""Turn exported programs into graphs whose every input is a placeholder, and join them into one step graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from forebay.kernels.operator import HOST_MEMORY
from forebay.kernels.operators import ATTENTION, KV_APPEND, of_target
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.functional import make_functional
from forebay.rewriter.capture.layers import LayerCall, LayerCalls, Slot
from forebay.rewriter.ir.graph import META, CapturedModel, WeightInput, WeightSpec
from forebay.rewriter.ir.state import (
    BorrowedKVState,
    KVState,
    LentKVState,
    StateInput,
    StateSpec,
    state_name,
)

_aten = torch.ops.aten
_KEPT_META = ("val", "nn_module_stack", "stack_trace")
_CHECKS = {
    _aten._assert_tensor_metadata.default,
    _aten._assert_scalar.default,
    _aten._assert_async.msg,
    _aten.sym_constrain_range.default,
    _aten.sym_constrain_range_for_size.default,
}
_IDENTITIES = {
    _aten.detach.default,
    _aten.detach_.default,
    _aten.lift_fresh_copy.default,
    _aten.alias.default,
}
_CONVERSIONS = {_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.type_as.default}


@dataclass(frozen=True)
class Kind:
    """One kind of layer as exported, from the call of its first member."""

    program: ExportedProgram
    call: LayerCall
    states: tuple[StateSpec, ...]


@dataclass
class _Traced:
    """An exported program after cleaning, its inputs sorted by what they are."""

    graph: fx.Graph
    inputs: list[fx.Node]
    weights: dict[fx.Node, str]
    constants: dict[fx.Node, tuple[str, torch.Tensor, bool]]  # name, value, lifted from code rather than a buffer
    result: fx.Node


@dataclass(frozen=True)
class _TracedBlock:
    module: fx.GraphModule
    others: tuple[int, ...]  # which of the layer's other inputs it reads
    weights: dict[str, torch.Tensor]  # relative name -> traced value
    constants: tuple[tuple[str, torch.Tensor, bool], ...]
    states: tuple[StateSpec, ...]
    state_vals: tuple[torch.Tensor, ...]  # traced values of their tensors
    counted: bool  # it reads `count`
    adapted: bool  # it reads `adapters`


def _read(program: ExportedProgram, prefix: str) -> _Traced:
    graph = program.graph
    nodes = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    traced = _Traced(graph, [], {}, {}, graph.output_node())
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            traced.inputs.append(node)
            continue
        assert spec.target is not None
        name = spec.target.removeprefix(prefix)
        if spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent):
            traced.weights[node] = name
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            value = program.constants[spec.target]
            traced.constants[node] = (name, value.detach(), spec.kind is InputKind.CONSTANT_TENSOR)
        else:
            raise CaptureError(f"its graph has an input of kind {spec.kind.name}")
    _clean(graph)
    (traced.result,) = cast("tuple[fx.Node]", graph.output_node().args[0])
    _size_from_first_input(traced)
    return traced


def _size_from_first_input(traced: _Traced) -> None:
    """Read each symbolic size from the first input that has it, so that no input is kept for its size alone."""
    places: dict[Any, tuple[fx.Node, int]] = {}
    for node in traced.inputs:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                places.setdefault(size.node.expr, (node, dim))
    for node in traced.graph.find_nodes(op="call_function", target=_aten.sym_size.int):
        node.args = places.get(node.meta["val"].node.expr, node.args)


def _clean(graph: fx.Graph) -> None:
    """Erase run-time checks, and operations that return their input unchanged."""
    for node in list(graph.nodes):
        if node.op == "call_module" or node.target in _CHECKS:
            if node.users:
                raise CaptureError(f"its graph needs the result of the check {node.target}")
            graph.erase_node(node)
        elif node.op == "call_function" and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    make_functional(graph)
    graph.eliminate_dead_code()


def _is_identity(node: fx.Node) -> bool:
    args: Any = node.args
    if node.target in _IDENTITIES:
        return True
    if node.target is _aten.dropout.default:
        return args[2] is False
    if node.target is _aten.slice.Tensor:
        _, _, start, end, step = args + (None, 0, None, None, 1)[len(args) :]
        return start in (0, None) and end in (None, 2**63 - 1) and step == 1
    if node.target in _CONVERSIONS:
        copies = node.kwargs.get("copy") or any(arg is True for arg in args[2:])
        return not copies and args[0].meta["val"].dtype == node.meta["val"].dtype
    return False


def _placeholder(graph: fx.Graph, name: str, val: object, mark: object = None) -> fx.Node:
    node = graph.create_node("placeholder", name, name=name)
    node.meta["val"] = val
    if mark is not None:
        node.meta[META] = mark
    return node


def _copy_node(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    copied = graph.node_copy(node, env.__getitem__)
    copied.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    return copied


def _make_block(kind: Kind) -> _TracedBlock:
    traced = _read(kind.program, "layer.")
    tensors = [tensor for spec in kind.states for tensor in spec.tensors]
    _check_ops(traced.graph, kind.states)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    first = len(traced.inputs) - len(tensors)
    hidden, *others, start, count, adapters = traced.inputs[:first]
    kept = traced.inputs[first:]
    env[hidden] = _placeholder(graph, "hidden", hidden.meta["val"])
    names = _other_names(kind.call)
    used = tuple(i for i, node in enumerate(others) if node.users)
    for i in used:
        env[others[i]] = _placeholder(graph, names[i], others[i].meta["val"])
    named = [(start, "start"), *(
        (node, name) for node, name in ((count, "count"), (adapters, "adapters")) if node.users)]
    for node, name in (*named, *zip(kept, (state_name(tensor.name) for tensor in tensors), strict=True)):
        env[node] = _placeholder(graph, name, node.meta["val"])
    weights = {node: name for node, name in traced.weights.items() if node.users}
    constants = {node: entry for node, entry in traced.constants.items() if node.users}
    for node, name in (weights | {node: entry[0] for node, entry in constants.items()}).items():
        env[node] = _placeholder(graph, name.replace(".", "_"), node.meta["val"], WeightInput(name))
    for node in traced.graph.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = _copy_node(graph, node, env)
    graph.output(env[traced.result])
    windows = [int(ATTENTION.argument(node.args, "window"))
               for node in graph.find_nodes(op="call_function", target=ATTENTION.overload)]
    states = tuple(replace(spec, window=windows[0]) if isinstance(spec, KVState) else spec for spec in kind.states)
    vals = {name: node.meta["val"] for node, name in weights.items()}
    return _TracedBlock(_LazyGraphModule({}, graph), used, vals, tuple(constants.values()), states,
                        tuple(node.meta["val"] for node in kept), bool(count.users), bool(adapters.users))


def _check_ops(graph: fx.Graph, states: tuple[StateSpec, ...]) -> None:
    called = Counter(operator.name for node in graph.nodes if (operator := of_target(node.target)) is not None)
    wanted = Counter(name for spec in states for name in spec.operators)
    for name in (ATTENTION.name, KV_APPEND.name, *wanted):
        if called[name] != wanted[name]:
            raise CaptureError(
                f"a layer came out with {called[name]} calls of {name} where there must be {wanted[name]}. It does not "
                "keep its state as its class claims, K and V through transformers' attention interface"
            )


def _other_names(call: LayerCall) -> dict[int, str]:
    """Names of a layer's other inputs from where they stand in its call, such as position_embeddings_0."""
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(call.leaves), call.spec))
    names: dict[int, str] = {}
    for path, leaf in paths:
        if isinstance(leaf, Slot) and leaf.index >= 0:
            keys = [str(getattr(entry, "key", getattr(entry, "idx", ""))) for entry in path[1:]]
            name = "_".join(keys)
            names.setdefault(leaf.index, name if name.isidentifier() else f"input_{leaf.index}")
    return names


def join(
    model: Any,
    layers: list[nn.Module],
    path: str,
    names: dict[str, str],
    program: ExportedProgram,
    calls: LayerCalls,
    kinds: dict[str, Kind],
    kind_of_layer: list[str],
) -> CapturedModel:
    """Put every layer's block call where the outer graph has its marker.

    `path` is the name of the list of layers; `names` gives the canonical name of every weight.
    Long: one graph is made from its first placeholder to its output, and what is made first is read to the end.
    """
    outer = _read(program, "model.")
    by_name = {name: _make_block(kind) for name, kind in kinds.items()}
    blocks = [by_name[name] for name in kind_of_layer]

    # What every input stands for, by canonical name; equal layers share the traced values of their first member.
    layer_weights = tuple({rel: names[f"{path}.{i}.{rel}"] for rel in b.weights} for i, b in enumerate(blocks))
    weights = {names[name]: node.meta["val"] for node, name in outer.weights.items() if node.users}
    for block, mapping in zip(blocks, layer_weights, strict=True):
        weights |= {name: block.weights[rel] for rel, name in mapping.items()}
    constants = {name: value for node, (name, value, _) in outer.constants.items() if node.users}
    layer_constants: list[list[str]] = []
    for i, (block_name, block) in enumerate(zip(kind_of_layer, blocks, strict=True)):
        values = {
            f"{block_name}.{name}" if lifted else f"{path}.{i}.{name}": value if lifted else layers[i].get_buffer(name)
            for name, value, lifted in block.constants
        }
        constants |= values
        layer_constants.append(list(values))

    graph = fx.Graph()
    env = {node: _placeholder(graph, node.name, node.meta["val"]) for node in outer.inputs}
    start = env[outer.inputs[1]]
    count, adapters = ([env[node] for node in outer.inputs if node.name == name] for name in ("count", "adapters"))
    states: list[list[fx.Node]] = []
    for i, block in enumerate(blocks):
        states.append(_state_inputs(graph, i, block, states))
    inputs = {
        name: _placeholder(graph, name.replace(".", "_"), weights[name], WeightInput(name))
        for name in dict.fromkeys(names.values())
        if name in weights
    }
    weights = {name: weights[name] for name in inputs}
    for name, value in constants.items():
        inputs[name] = _placeholder(graph, name.replace(".", "_"), _like(value, outer.inputs[0]), WeightInput(name))
    env |= {node: inputs[names[name]] for node, name in outer.weights.items() if node.users}
    env |= {node: inputs[name] for node, (name, _, _) in outer.constants.items() if node.users}

    def call_block(call: LayerCall, hidden: fx.Node, val: object) -> fx.Node:
        i = call.layer
        others = [env[markers[run].args[1][position]] for run, position in call.sources]  # type: ignore[union-attr,index]
        given = [hidden, *(others[j] for j in blocks[i].others), start, *count * blocks[i].counted,
                 *adapters * blocks[i].adapted, *states[i]]
        given += [inputs[name] for name in (*layer_weights[i].values(), *layer_constants[i])]
        node = graph.create_node("call_module", kind_of_layer[i], name=f"layer_{i}")
        node.args = tuple(given)  # given above, they would be searched
        node.meta.update(val=val, layer=i)
        return node

    markers: list[fx.Node] = []
    for node in outer.graph.nodes:
        if node.target is torch.ops.forebay.layer_run.default:
            markers.append(node)
            hidden = env[node.args[0]]
            for call in calls.calls:
                if call.run == len(markers) - 1:
                    hidden = call_block(call, hidden, node.meta["val"])
            env[node] = hidden
        elif node.op not in ("placeholder", "output"):
            env[node] = _copy_node(graph, node, env)
    graph.output(env[outer.result])

    return CapturedModel(
        step=_LazyGraphModule({name: block.module for name, block in by_name.items()}, graph),
        weights=_weight_specs(weights, names),
        constants=constants,
        layers=tuple(kind_of_layer),
        layer_weights=layer_weights,
        states=_kept_states(blocks),
        vocab_size=int(outer.result.meta["val"].shape[-1]),
        max_positions=int(getattr(model.config, "max_position_embeddings", None)
                          or getattr(model.config, "max_seq_len", None) or 0),
        dtype=model.dtype,
        model_type=model.config.model_type,
    )


def _kept_states(blocks: list[_TracedBlock]) -> tuple[tuple[StateSpec, ...], ...]:
    """Return the states that each layer keeps: keys and values that several layers read belong to the one that makes
    them."""
    lent = {spec.source for block in blocks for spec in block.states if isinstance(spec, BorrowedKVState)}
    return tuple(tuple(LentKVState(**vars(spec)) if i in lent and isinstance(spec, KVState) else spec
                       for spec in block.states if not isinstance(spec, BorrowedKVState))
                 for i, block in enumerate(blocks))


def _state_inputs(graph: fx.Graph, layer: int, block: _TracedBlock, before: list[list[fx.Node]]) -> list[fx.Node]:
    """The inputs of a layer's states; of those that it borrows, the inputs of the layer that was `before`."""
    borrowed = [spec.source for spec in block.states if isinstance(spec, BorrowedKVState)]
    if borrowed:
        return before[borrowed[0]]
    marks = [StateInput(layer, tensor.name, spec.kind, spec.window if isinstance(spec, KVState) else 0)
             for spec in block.states for tensor in spec.tensors]
    return [_placeholder(graph, state_name(mark.tensor, layer), val, mark)
            for mark, val in zip(marks, block.state_vals, strict=True)]


def _weight_specs(weights: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, WeightSpec]:
    ties: dict[str, list[str]] = {}
    for name, canonical in names.items():
        if name != canonical:
            ties.setdefault(canonical, []).append(name)
    return {
        name: WeightSpec(name, tuple(val.shape), val.dtype, tuple(ties.get(name, ()))) for name, val in weights.items()
    }


def _like(value: torch.Tensor, traced: fx.Node) -> torch.Tensor:
    with traced.meta["val"].fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=HOST_MEMORY)
