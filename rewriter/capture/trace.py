"""Trace the outer model and one layer of each kind, and join them into a `CapturedModel`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from forebay.kernels.operator import HOST_MEMORY
from forebay.rewriter.capture.attention import TracedCache, masks_of_images
from forebay.rewriter.capture.cache_name import cache_argument
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.family import family_of, outer_inputs
from forebay.rewriter.capture.layer_states import layer_inputs, starts
from forebay.rewriter.capture.layers import (
    LayerCall,
    LayerCalls,
    LayerIndex,
    LayerIndexUsed,
    LayerStub,
    Slot,
    find_layers,
    layer_signature,
)
from forebay.rewriter.capture.lora import chosen_columns
from forebay.rewriter.capture.merge import Kind, join
from forebay.rewriter.capture.patterns import mark_patterns
from forebay.rewriter.capture.released import failures_released, release_symbols, sources_released, uncached
from forebay.rewriter.capture.rotary import calls_of, follow_length
from forebay.rewriter.checkpoints.text_model import DEEPSTACK, GROUPS, PLACEHOLDER
from forebay.rewriter.ir.graph import CapturedModel, Gives
from forebay.rewriter.ir.state import KVState, StateSpec

# Example sizes: unequal, so that a size mistaken for another shows, and none is 1, which tracing would specialise.
_B, _S, _L = 3, 7, 19
_last: ContextVar[torch.Tensor] = ContextVar("forebay_last")  # read by the hook on the head
_given: ContextVar[list[tuple[torch.Tensor, torch.Tensor]]] = ContextVar("forebay_given")  # and that on the embedding
_BATCH, _SEQ, _LEN = Dim("B", min=1), Dim("S", min=1), Dim("L", min=1)


@dataclass(frozen=True)
class _TrialRun:
    """Observations of one run of a layer over fake tensors."""

    returned: int  # elements of the tuple it returns, 0 if it returns the bare hidden state
    states: tuple[StateSpec, ...]

    def output(self, hidden: torch.Tensor) -> Any:
        return (hidden, *[None] * (self.returned - 1)) if self.returned else hidden


class _Step(nn.Module):
    """The model with its layers taken out: tokens in, logits or scores out."""

    def __init__(self, model: Any, calls: LayerCalls, wanted: Gives, embeds: bool = False) -> None:
        super().__init__()
        self.model = model
        self.calls = calls
        self.wanted = wanted
        self.cache = TracedCache()
        if wanted == "last":
            head = model.get_output_embeddings()
            if head is None:
                raise CaptureError("it has no output embeddings")
            head.register_forward_pre_hook(self._gather_last)
        if embeds:
            model.get_input_embeddings().register_forward_hook(_put_given)

    def _gather_last(self, head: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        hidden = args[0]  # [B, S, H]
        return (hidden.gather(1, _last.get()[:, None, None].expand(-1, 1, hidden.shape[-1])),)

    def forward(
        self, input_ids: torch.Tensor, start: torch.Tensor, last: torch.Tensor, length: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None, positions: torch.Tensor | None = None,
        deepstack: torch.Tensor | None = None, until: torch.Tensor | None = None, count: torch.Tensor | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.clear()
        counted = start[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
        given: dict[str, Any] = outer_inputs(self.model, counted)
        if positions is not None:
            given["position_ids"] = positions.permute(2, 0, 1)
        if until is not None:
            given["attention_mask"] = masks_of_images(self.model.config, until)
        token = _last.set(last)
        if inputs_embeds is not None:
            _given.set([(input_ids, inputs_embeds)])
            if deepstack is not None:
                given["visual_pos_masks"] = input_ids < 0
                given["deepstack_visual_embeds"] = deepstack.split(inputs_embeds.shape[2], 2)
            input_ids = torch.where(input_ids < 0, getattr(self.model.config, PLACEHOLDER, 0), input_ids)
        try:
            with layer_inputs(start, start if count is None else count), calls_of(length), chosen_columns(adapters):
                out = self.model(
                    input_ids=input_ids,
                    **given,
                    **{cache_argument(self.model.forward): self.cache},
                    use_cache=True,
                    return_dict=True,
                )
        finally:
            _last.reset(token)
        if self.wanted == "scores":
            return _score(out.logits, torch.cat((input_ids, last[:, None]), 1)[:, 1:])
        return out.logits if self.wanted == "all" else out.logits[:, 0]


def _put_given(table: nn.Module, args: Any, looked_up: torch.Tensor) -> torch.Tensor:
    """Embeddings [B, S, H] as the table has them, but where an id is negative those that are given."""
    given = _given.get()
    if not given:
        raise CaptureError("it looks up embeddings of tokens twice, so none can be given")
    ids, embeds = given.pop()
    return torch.where((ids < 0)[..., None], embeds, looked_up)


def _score(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[B, S, 2] float32 of logits [B, S, V] and targets [B, S]: log probability, and whether it is the highest."""
    logarithms = torch.log_softmax(logits.float(), -1)
    chosen = logarithms.gather(-1, targets[..., None])[..., 0]
    return torch.stack((chosen, (logarithms.argmax(-1) == targets).float()), -1)


class _Layer(nn.Module):
    """One layer with every tensor it reads as an input, its index unknown to it."""

    def __init__(self, layer: nn.Module, call: LayerCall, states: tuple[StateSpec, ...]) -> None:
        super().__init__()
        self.layer, self.call = layer, call
        self.shapes = [tensor.shape for spec in states for tensor in spec.tensors]

    def forward(
        self, hidden: torch.Tensor, others: list[torch.Tensor], start: torch.Tensor, count: torch.Tensor,
        adapters: torch.Tensor, states: list[torch.Tensor],
    ) -> torch.Tensor:
        given = iter(states)
        lengths = [value.shape[shape.index("L")] for value, shape in zip(states, self.shapes, strict=True)
                   if "L" in shape]
        cache = TracedCache(lengths[0] if lengths else 1, in_layer=True)

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return hidden if leaf.index < 0 else others[leaf.index]
            return cache if isinstance(leaf, TracedCache) else leaf

        args, kwargs = pytree.tree_unflatten([fill(leaf) for leaf in self.call.leaves], self.call.spec)
        with (layer_inputs(start, count, lambda spec: tuple(next(given) for _ in spec.tensors)),
              chosen_columns(adapters)):
            out = self.layer(*args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


def trace_model(model: Any, wanted: Gives, embeds: bool = False, adapter_columns: int = 0) -> CapturedModel:
    """Trace `model`, which is on the meta device and has our attention, into a `CapturedModel`."""
    with compile_lock, uncached():  # Dynamo may trace in another thread, and patches what this does
        return _traced(model, wanted, embeds, adapter_columns)


def _traced(model: Any, wanted: Gives, embeds: bool, adapter_columns: int) -> CapturedModel:
    found = find_layers(model)
    if found is None:
        raise CaptureError("it has no repeated layers")
    path, layers = found
    mark_patterns(model.config, list(layers), family_of(model).layer_types)
    follows = follow_length(model)
    with failures_released(), sources_released():
        tracer = _Tracer(model, path, list(layers), wanted, follows.length, embeds, adapter_columns)
        try:
            kinds, kind_of_layer = tracer.trace_layers(("layer_idx",))
        except LayerIndexUsed:  # then layers that differ in nothing but their index are different kinds
            kinds, kind_of_layer = tracer.trace_layers(())
        joined = join(model, list(layers), path, tracer.names, tracer.program, tracer.calls, kinds, kind_of_layer)
    for program in (tracer.program, *(kind.program for kind in kinds.values())):
        release_symbols(program)
    vocab_size = model.get_output_embeddings().weight.shape[0] if wanted == "scores" else joined.vocab_size
    limit = 0 if follows.unlimited else joined.max_positions
    if embeds:
        _check_ids_only_looked_up(joined, follows.rope_switch_length, getattr(model.config, PLACEHOLDER, None))
    return replace(joined, vocab_size=vocab_size, gives=wanted, max_positions=limit,
                   rope_switch_length=follows.rope_switch_length, embeds=tracer.width,
                   position_rows=tracer.position_rows, deepstack=tracer.deepstack,
                   image_groups=tracer.image_groups)


def _check_ids_only_looked_up(captured: CapturedModel, rope_switch_length: int, placeholder: int | None) -> None:
    """CaptureError where given embeddings, with the id `placeholder` for other tables, would not be all that a step
    needs to know of a token."""
    ids = next(node for node in captured.step.graph.nodes if node.name == "input_ids")
    known = [node for node in ids.users if node.target is torch.ops.aten.where.ScalarOther or (
        node.target is torch.ops.aten.where.ScalarSelf)]
    if len(known) != 1 or (len(known[0].users) != 1 and placeholder is None):
        raise CaptureError("it reads ids of tokens as well as their embeddings, so embeddings alone cannot be given")
    if rope_switch_length:
        raise CaptureError("its cache is computed anew once it is long, for which ids are needed, not embeddings")


class _Tracer:
    """Holds the model while its outer part is traced, at once, and its kinds of layers, afterwards."""

    def __init__(
        self, model: Any, path: str, layers: list[nn.Module], wanted: Gives, follows_length: bool = False,
        embeds: bool = False, adapter_columns: int = 0,
    ) -> None:
        self.layers, self.dtype, self.adapter_columns = layers, model.dtype, adapter_columns
        self.names, self.exact = _canonical_names(model), family_of(model).holds_positions(model.config)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self.memo: dict[torch.Tensor, torch.Tensor] = {}
        self.calls = LayerCalls()
        self.signatures = _numbered(layer_signature(layer) for layer in layers)
        self.probes: dict[int, _TrialRun] = {}
        self.exporting = False
        self.width = 0  # of embeddings that are given
        # and what else is known of tokens of images
        self.position_rows = 3 if embeds and "mrope_section" in (
            getattr(model.config, "rope_parameters", None) or {}) else 0
        self.image_groups = embeds and bool(getattr(model.config, GROUPS, ()))
        self.deepstack: int = getattr(model.config, DEEPSTACK, 0) if embeds and "_deepstack_process" in vars(
            model.base_model) else 0
        parent, _, attribute = path.rpartition(".")
        stubs = nn.ModuleList(LayerStub(i, layer, self._call_layer) for i, layer in enumerate(layers))
        setattr(model.get_submodule(parent), attribute, stubs)
        self.step = _Step(model, self.calls, wanted, embeds)
        self._make_fake(model)
        with self.mode:
            tokens = torch.zeros(_B, _S, dtype=torch.int64)
            each = [torch.zeros(_B, dtype=torch.int64) for _ in range(3 if follows_length else 2)]
            given: dict[str, torch.Tensor] = dict(zip(("input_ids", "start", "last", "length"), (tokens, *each),
                                                      strict=False))
            if embeds:
                self.width = model.get_input_embeddings().weight.shape[1]
                given["inputs_embeds"] = torch.zeros(_B, _S, self.width, dtype=model.dtype)
            if self.position_rows:
                given["positions"] = torch.zeros(_B, _S, self.position_rows, dtype=torch.int64)
            if self.image_groups:
                given["until"] = torch.zeros(_B, _S, dtype=torch.int64)
            if self.deepstack:
                given["deepstack"] = torch.zeros(_B, _S, self.deepstack * self.width, dtype=model.dtype)
            if adapter_columns:
                given["adapters"] = self._example_columns()
            self.step(**given)
            if any(not spec.rewindable for probe in self.probes.values() for spec in probe.states):
                given["count"] = torch.zeros(_B, dtype=torch.int64)
        self.exporting = True
        shapes = {name: {0: _BATCH, 1: _SEQ} if value.dim() > 1 and name != "adapters" else {0: _BATCH}
                  for name, value in given.items()}
        self.program = export(self.step, (), given, dynamic_shapes=shapes, strict=False)
        self.sizes = _dynamic_sizes(self.program)
        if [call.layer for call in self.calls.calls] != list(range(len(layers))):
            raise CaptureError("its layers are not called once each, in order")

    def _call_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = self.signatures[index]
        if signature not in self.probes:
            self.probes[signature] = self._probe(index, args, kwargs)
        if self.exporting:
            hidden = self.calls.record(index, args, kwargs)
        else:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return self.probes[signature].output(hidden)

    def _probe(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _TrialRun:
        """Run a layer on fake tensors to see what it keeps and what it returns."""
        states: list[StateSpec] = []

        def give(spec: StateSpec) -> tuple[torch.Tensor, ...]:
            states.append(replace(spec, exact=True) if self.exact and isinstance(spec, KVState) else spec)
            return _example_state(spec)

        self._make_fake(self.layers[index])
        with layer_inputs(starts(), starts(), give), chosen_columns(self._example_columns()):
            out = self.layers[index](*args, **kwargs)
        names = [tensor.name for spec in states for tensor in spec.tensors]
        if len(set(names)) < len(names):
            raise CaptureError(f"layer {index} keeps two states of the same tensors: {', '.join(names)}")
        if isinstance(out, tuple) and any(isinstance(extra, torch.Tensor) for extra in out[1:]):
            raise CaptureError(f"layer {index} returns more than a hidden state")
        return _TrialRun(len(out) if isinstance(out, tuple) else 0, tuple(states))

    def trace_layers(self, ignore: tuple[str, ...]) -> tuple[dict[str, Kind], list[str]]:
        """Trace one layer of each kind; returns the kinds by name, and the name of each layer's kind."""
        signatures = self.signatures if ignore else _numbered(layer_signature(layer, ignore) for layer in self.layers)
        kinds: dict[str, Kind] = {}
        by_key: dict[Hashable, str] = {}
        kind_of_layer = []
        for call, signature, probe_key in zip(self.calls.calls, signatures, self.signatures, strict=True):
            key = (signature, call.key())
            if key not in by_key:
                by_key[key] = f"block_{len(kinds)}"
                kinds[by_key[key]] = self._trace_layer(call, self.probes[probe_key].states, bool(ignore))
            kind_of_layer.append(by_key[key])
        return kinds, kind_of_layer

    def _trace_layer(self, call: LayerCall, states: tuple[StateSpec, ...], hide_index: bool) -> Kind:
        layer = self.layers[call.layer]
        self._make_fake(layer)
        indices = {module: vars(module)["layer_idx"] for module in layer.modules() if "layer_idx" in vars(module)}
        with self.mode:
            hidden = self._example(self.calls.hidden[call.run])
            others = [self._example(t) for t in call.others]
            start, count = (torch.zeros(_B, dtype=torch.int64) for _ in range(2))
            kept = [value for spec in states for value in _example_state(spec)]
            adapters = self._example_columns()
        shapes = (
            self._dims(self.calls.hidden[call.run]),
            [self._dims(t) for t in call.others],
            {0: _BATCH},
            {0: _BATCH},
            {0: _BATCH},
            [{i: {"B": _BATCH, "L": _LEN}[n] for i, n in enumerate(tensor.shape) if isinstance(n, str)}
             for spec in states for tensor in spec.tensors],
        )
        try:
            for module in indices if hide_index else ():
                module.layer_idx = LayerIndex()  # type: ignore[assignment]
            program = export(_Layer(layer, call, states), (hidden, others, start, count, adapters, kept),
                             dynamic_shapes=shapes, strict=False)
        finally:
            for module, index in indices.items():
                module.layer_idx = index
        return Kind(program, call, states)

    def _example_columns(self) -> torch.Tensor:
        return torch.zeros(_B, self.adapter_columns or 1, dtype=self.dtype)

    def _example(self, traced: torch.Tensor) -> torch.Tensor:
        hints = {_BATCH: _B, _SEQ: _S}
        return torch.empty([hints.get(d, d) for d in self._named(traced)], dtype=traced.dtype)

    def _dims(self, traced: torch.Tensor) -> dict[int, Any]:
        return {i: d for i, d in enumerate(self._named(traced)) if not isinstance(d, int)}

    def _named(self, traced: torch.Tensor) -> list[Any]:
        sizes = []
        for size in traced.shape:
            if isinstance(size, int):
                sizes.append(size)
            elif size.node.expr in self.sizes:
                sizes.append(self.sizes[size.node.expr])
            else:
                raise CaptureError(f"a layer's input has the size {size}, which is neither batch nor sequence")
        return sizes

    def _make_fake(self, module: nn.Module) -> None:
        """Replace meta parameters by fake ones that claim to be on the CPU, so that no graph mentions `meta`."""
        with self.mode:
            for sub in module.modules():
                held: tuple[dict[str, Any], ...] = (sub._parameters, sub._buffers)
                for tensors in held:
                    for name, tensor in tensors.items():
                        if tensor is not None and tensor.is_meta and not isinstance(tensor, FakeTensor):
                            tensors[name] = self._fake(tensor)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self.memo:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST_MEMORY)
            is_parameter = isinstance(tensor, nn.Parameter)
            self.memo[tensor] = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
        return self.memo[tensor]


def _example_state(spec: StateSpec) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(tensor.sized(_B, _L), dtype=tensor.dtype) for tensor in spec.tensors)


def _dynamic_sizes(program: ExportedProgram) -> dict[Any, Any]:
    tokens = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == "input_ids").meta["val"]
    return {tokens.shape[0].node.expr: _BATCH, tokens.shape[1].node.expr: _SEQ}


def _numbered(signatures: Iterable[Hashable]) -> list[int]:
    """The same number for equal signatures, which are long to hash."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(signature, len(known)) for signature in signatures]


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """For every parameter and persistent buffer, the first name of its storage; in the model's order."""
    first: dict[int, str] = {}
    names = {}
    for prefix, module in model.named_modules():
        for kind, hidden in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            for key, tensor in kind.items():
                if tensor is not None and key not in hidden:
                    name = f"{prefix}.{key}" if prefix else key
                    names[name] = first.setdefault(id(tensor), name)
    return names
