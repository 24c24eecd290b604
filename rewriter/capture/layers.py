"""Find a model's repeated layers before tracing, and tell which of them are the same kind."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.library import custom_op
from torch.utils import _pytree as pytree

from forebay.rewriter.capture.errors import CaptureError

_SCALARS = (int, float, str, bool, type(None), torch.dtype)

# what every module has, alike in all layers or, as parameters and buffers, looked at apart
_MODULE_STATE = frozenset(vars(nn.Module()))


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The path and value of the `ModuleList` holding the most parameters, the outermost one where lists nest."""
    lists = [(name, module) for name, module in model.named_modules()
             if isinstance(module, nn.ModuleList) and len(module)]
    outermost = [(name, module) for name, module in lists
                 if not any(name.startswith(other + ".") for other, _ in lists)]
    if len(outermost) < 2:  # nothing to compare
        return outermost[0] if outermost else None
    return max(outermost, key=lambda found: sum([p.numel() for p in found[1].parameters()]))


def layer_signature(layer: nn.Module, ignore: tuple[str, ...] = ("layer_idx",)) -> Hashable:
    """Equal for two layers that compute the same function of their weights and inputs.

    Compares the class tree, parameter and buffer shapes and dtypes, and every plain value among the modules' own
    attributes, save those named in `ignore`.
    """
    parts: list[Hashable] = []
    skipped = _MODULE_STATE.union(ignore)
    remaining: list[tuple[str, nn.Module | None]] = [("", layer)]
    while remaining:  # depth first
        name, module = remaining.pop()
        if module is None:
            continue
        remaining.extend(module._modules.items())
        parts.append((name, type(module), len(module._modules)))
        for held in (module._parameters, module._buffers):
            if held:
                parts.extend([(k, t.shape, t.dtype) for k, t in held.items() if t is not None])
        for key, value in [entry for entry in vars(module).items() if entry[0] not in skipped]:
            kind = type(value)  # isinstance would ask a config for its class, through its own attribute look-up
            if issubclass(kind, _SCALARS):
                parts.append((key, value))
            elif issubclass(kind, (tuple, list)) and all(isinstance(v, _SCALARS) for v in value):
                parts.append((key, tuple(value)))
    return tuple(parts)


class LayerIndexUsed(Exception):
    """A layer computed with its own index, so layers that differ only in it are not one kind."""


def _refuse(self: object, *args: object) -> Any:
    raise LayerIndexUsed


class LayerIndex:
    """Stands in for `layer_idx` while a layer is traced, so that no index can end up in a graph unnoticed."""

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __index__ = __int__ = __float__ = __bool__ = _refuse
    __eq__ = __ne__ = __contains__ = _refuse  # type: ignore[assignment]
    __hash__ = _refuse  # type: ignore[assignment]


@custom_op("forebay::layer_run", mutates_args=())
def layer_run(hidden: torch.Tensor, others: list[torch.Tensor], first: int) -> torch.Tensor:
    """Marks, in the outer graph, a run of consecutive layers beginning with layer `first`; it is never executed."""
    raise RuntimeError("forebay::layer_run is a marker for capture and cannot be executed")


@layer_run.register_fake
def _(hidden: torch.Tensor, others: list[torch.Tensor], first: int) -> torch.Tensor:
    return torch.empty_like(hidden)


@dataclass(frozen=True)
class Slot:
    """In a layer's recorded arguments: other input number `index`, or the hidden state for -1."""

    index: int


@dataclass(frozen=True)
class LayerCall:
    """How the model calls one layer; `leaves` are `Slot`s, caches and plain values, in the order of `spec`."""

    layer: int
    run: int  # which marker covers this layer
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    others: tuple[torch.Tensor, ...]
    shapes: tuple[Hashable, ...]  # of `others`: symbolic shape and dtype
    sources: tuple[tuple[int, int], ...]  # of each of `others`: marker, position among that marker's others

    def key(self) -> Hashable:
        """Equal for two calls that hand a layer inputs of the same shapes in the same places, and equal values."""
        plain = tuple(v if isinstance(v, (*_SCALARS, Slot)) else type(v) for v in self.leaves)
        return plain, str(self.spec), self.shapes


class LayerCalls:
    """Arguments of the layers in one forward pass of the outer model."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, before the model is run again."""
        self.calls: list[LayerCall] = []
        self.hidden: list[torch.Tensor] = []  # one per run
        self._given: tuple[Any, ...] = ()  # the last call's arguments
        self._keywords: list[str] = []
        self._last: torch.Tensor | None = None
        # holds the tensor, so that ids stay unique; its marker and place there; its shape, which is dear to print
        self._seen: dict[int, tuple[torch.Tensor, tuple[int, int], Hashable]] = {}

    def record(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Note the call of `layer` and return the tensor that stands for its output.

        Layers that follow one another directly share one marker, so that the cost of tracing the outer graph does
        not grow with depth.
        """
        given = (*args, *kwargs.values())
        again = len(given) == len(self._given) and all(map(operator.is_, given, self._given))
        if again and list(kwargs) == self._keywords and any(value is self._last for value in given):
            # as the layer before, which followed another: what stands for the output of one stands for the other's
            self.calls.append(replace(self.calls[-1], layer=layer))
            assert self._last is not None
            return self._last
        self._given, self._keywords = given, list(kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise CaptureError(f"layer {layer} is called without a hidden state")
        hidden = kwargs.get("hidden_states", tensors[0])
        others = list({id(t): t for t in tensors if t is not hidden}.values())
        fresh = [t for t in others if id(t) not in self._seen]
        if hidden is not self._last or fresh:
            for i, tensor in enumerate(fresh):
                self._seen[id(tensor)] = (tensor, (len(self.hidden), i), (str(tensor.shape), tensor.dtype))
            self.hidden.append(hidden)
            self._last = torch.ops.forebay.layer_run(hidden, fresh, layer)
        slots = {id(hidden): Slot(-1)} | {id(t): Slot(i) for i, t in enumerate(others)}
        marked = tuple(slots[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        _, sources, shapes = zip(*(self._seen[id(t)] for t in others), strict=True) if others else ((), (), ())
        self.calls.append(LayerCall(layer, len(self.hidden) - 1, marked, spec, tuple(others), shapes, sources))
        assert self._last is not None
        return self._last


class LayerStub(nn.Module):
    """Takes a layer's place while the outer model is traced; attributes are still those of the layer."""

    def __init__(self, index: int, layer: nn.Module, handle: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_stub", (index, layer, handle))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index, _, handle = self._stub
        return handle(index, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stub"][1], name)
