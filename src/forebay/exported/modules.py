"""Modules that are no language models: traced by `torch.export` for given inputs, and rewritten by the passes that
fuse."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental import _config
from torch.utils import _pytree as pytree

from forebay.exported.errors import ExportError
from forebay.exported.program import BoundGraph
from forebay.rewriter.capture.released import sources_released, uncached
from forebay.rewriter.ir.graph import META, WeightInput
from forebay.rewriter.one_thread import ONE_THREAD
from forebay.rewriter.pipeline.pass_list import PASSES, passes_in
from forebay.rewriter.pipeline.run_passes import check_switches
from forebay.rewriter.switches import Switches


@dataclass(frozen=True)
class TracedModule:
    """A module's rewritten graph, flat: placeholders marked `WeightInput` are its weights, parameters, buffers and
    constants, by name; the others its inputs. `results` names what it gives, in the order of the graph, and `spec` puts
    that together as the module does. `inputs` and `shapes` are those it was traced for."""

    gm: fx.GraphModule
    weights: Mapping[str, torch.Tensor]
    results: tuple[str, ...]
    spec: pytree.TreeSpec
    inputs: tuple[Any, ...]
    shapes: Any  # for `BoundCall`

    def program(self) -> ExportedProgram:
        with ONE_THREAD, compile_lock, _tracing():
            return torch.export.export(BoundCall(self), self.inputs, dynamic_shapes=self.shapes, strict=False)


class BoundCall(BoundGraph):
    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced.gm, traced.weights)
        self.spec = traced.spec

    def forward(self, *inputs: Any) -> Any:
        return pytree.tree_unflatten(self.run(pytree.tree_leaves(inputs)), self.spec)


def trace_module(module: nn.Module, inputs: Sequence[Any], shapes: Any, switches: Switches) -> TracedModule:
    """`module` for `inputs`, of sizes that vary as `shapes` says, in the form of `torch.export.export`. ExportError for
    a module that cannot be traced, whose inputs are changed, or that is being trained."""
    if any(each.training for each in module.modules()):
        raise ExportError(f"{type(module).__name__} is in training mode; call its eval() first")
    check_switches(PASSES, switches)
    try:
        with ONE_THREAD, compile_lock, _tracing():
            program = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes, strict=False)
            if any(_writes(node) for node in program.graph.nodes):
                program = program.run_decompositions({})  # makes it functional; norms and products stay whole
    except Exception as error:
        said = " ".join(str(error).split())[:400]
        raise ExportError(f"{type(module).__name__} cannot be traced for these inputs: {type(error).__name__}: {said}"
                          ) from error
    signature = program.graph_signature
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise ExportError(f"{type(module).__name__} changes its buffers or its inputs when it is called, which no "
                          "exported program does; make it return what changes")
    gm, held = program.graph_module, {**program.state_dict, **program.constants}
    weights = {}
    for node, spec in zip(gm.graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            weights[str(spec.target)] = held[str(spec.target)].detach()
            node.meta[META] = WeightInput(str(spec.target))
        elif spec.kind is not InputKind.USER_INPUT:
            raise ExportError(f"{type(module).__name__} has an input of kind {spec.kind.name}, which cannot be "
                              "exported; give it tensors alone")
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default):
        node.replace_all_uses_with(node.args[0])  # it does nothing where nothing is trained, and hides patterns
        gm.graph.erase_node(node)
    for each in passes_in("captured"):
        if each.optional and each.name not in switches.skip:
            each.run(gm)
    gm.recompile()
    spec = program.call_spec.out_spec
    assert spec is not None
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))[0]
    return TracedModule(gm, weights, tuple(_named(path, i) for i, (path, _) in enumerate(paths)), spec, tuple(inputs),
                        None if shapes is None else (_in_order(module, inputs, shapes),))


@contextmanager
def _tracing() -> Iterator[None]:
    """Without gradients, and without guards for chance: BERT's would rule out sequences of as many tokens as heads."""
    with torch.no_grad(), sources_released(), uncached(), _config.patch(  # type: ignore[attr-defined]
            backed_size_oblivious=True):
        yield


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _in_order(module: nn.Module, inputs: Sequence[Any], shapes: Any) -> tuple[Any, ...]:
    """Sizes that vary by the place of their input, where they are given by its name."""
    if not isinstance(shapes, Mapping):
        return tuple(shapes)
    return tuple(shapes[name] for name in inspect.signature(module.forward).bind(*inputs).arguments)


def _named(path: tuple[Any, ...], i: int) -> str:
    """`last_hidden_state`, or `output_0` where a result has no name of its own."""
    last = path[-1] if path else None
    return last.key if isinstance(last, pytree.MappingKey) and isinstance(last.key, str) else f"output_{i}"
