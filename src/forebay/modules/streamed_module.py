"""A module of transformers whose layers are read from the model's files as they are called, within a budget.

Memory holds the weights outside the layers, the layer that computes, activations, the layer that is called next, and as
many other layers as there is room for where they are called again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from forebay.modules.counted_memory import CountedMemory
from forebay.modules.layer_reads import LayerReads
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, read_tensor
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.stored_tensors import spellings
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import PlanError
from forebay.runtime.run.arena import return_freed_memory

WeightPlace = tuple[nn.Module, str]  # of a parameter or a persistent buffer


@dataclass(frozen=True)
class StreamedSizes:
    """Memory of a streamed module.

    Attributes:
        nbytes: Of all of its weights.
        kept_nbytes: Of those outside its layers, which stay while it runs.
        layers: How many layers are read one at a time.
        layer_nbytes: Of the largest of them.
    """

    nbytes: int
    kept_nbytes: int
    layers: int
    layer_nbytes: int

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights in memory at least."""
        return self.kept_nbytes + self.layer_nbytes


class StreamedModule:
    """A module on the meta device, whose weights are read as it runs.

    Args:
        module: Its layers are the members of its outermost lists of modules.
        records: Where its weights lie, by name; a tensor with several names may be there under any.
        dtype: What floating weights are computed in.
        what: What the module is, for messages.
        constants: Weights by name that no file holds; each weight is there or in `records`.

    Attributes:
        sizes: Its memory.
        peak_nbytes: Of weights and activations in the last run.
        least_nbytes: The same without layers that were read ahead.
    """

    def __init__(
        self, module: Any, records: Mapping[str, TensorRecord], dtype: torch.dtype, what: str = "the model",
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.module, self.dtype, self.what = module, dtype, what
        self.peak_nbytes = self.least_nbytes = 0
        self._tied: dict[int, list[WeightPlace]] = {}
        self._record_of: dict[int, TensorRecord] = {}
        self._constant_of: dict[int, torch.Tensor] = {}
        for prefix, inner in module.named_modules():
            for place in _places(inner, recurse=False):
                key = id(_held(place))
                self._tied.setdefault(key, []).append(place)
                name = f"{prefix}.{place[1]}".removeprefix(".")
                if name in records:
                    self._record_of.setdefault(key, records[name])
                if constants is not None and name in constants:
                    self._constant_of[key] = constants[name]
        self._key_of = {place: key for key, places in self._tied.items() for place in places}
        layers = [layer for layers in _outermost_lists(module) for layer in layers]
        self._layers = {id(layer): {self._key_of[place] for place in _places(layer)} for layer in layers}
        shared = [key for keys in self._layers.values() for key in keys]
        within = {key for key in shared if shared.count(key) == 1 and len(self._tied[key]) == 1}
        self._layers = {layer: keys & within for layer, keys in self._layers.items()}
        self._kept = self._tied.keys() - within
        self._resident: dict[int, None] = {}  # layers that stay, in order
        self._order = {id(layer): id(after) for layer, after in pairwise(layers)}  # of calls, corrected by them
        self._memory: CountedMemory | None = None
        self._reads: LayerReads | None = None
        self._most_resident = 0
        self._running: int | None = None  # the layer that computes
        for layer in layers:
            layer.register_forward_pre_hook(self._load_layer)
            layer.register_forward_hook(self._drop_layer)
        sizes = [self._nbytes(keys) for keys in self._layers.values()]
        kept = self._nbytes(self._kept)
        self.sizes = StreamedSizes(sum(sizes) + kept, kept, len(sizes), max(sizes, default=0))

    @contextmanager
    def running(self, budget_nbytes: int, stay: bool = False) -> Iterator[None]:
        """Let the module be called, within memory for weights and activations together.

        Args:
            budget_nbytes: That memory.
            stay: Whether layers that have been read stay while there is room, for they are called again.

        Raises:
            PlanError: The budget has no room for the weights, or for the activations of what it computes.
        """
        if self.sizes.weight_nbytes > budget_nbytes:
            raise PlanError(f"budget: {self.what} needs {format_nbytes(self.sizes.weight_nbytes)} for weights at a "
                            f"time, and the budget is {format_nbytes(budget_nbytes)}; give more")
        self._memory = CountedMemory(budget_nbytes, self._make_room, self.what)
        self._reads = LayerReads(self._order, lambda layer: dict(self._read(self._layers[layer])))
        self._most_resident = len(self._layers) if stay else 0
        self._working: dict[int, int] = {}  # bytes that layers took while they computed last
        self._alone: set[int] = set()  # layers with or after which another had no room
        try:
            with torch.no_grad(), self._memory:
                self._load(self._kept)
                yield
        finally:
            self._reads.close()
            self.peak_nbytes, self.least_nbytes = self._memory.peak_nbytes, self._memory.own_peak_nbytes
            self._memory, self._reads, self._resident = None, None, {}
            self._drop(self._tied)
            return_freed_memory()

    def forget_call(self) -> None:
        """Let the layer go in which a call broke off, so that there may be another call."""
        if self._running is not None and self._running not in self._resident:
            self._drop(self._layers[self._running])
        self._running = None
        self._forget_ahead()

    def _nbytes(self, keys: Iterable[int]) -> int:
        """In the dtype that is computed in."""
        found = [_held(self._tied[key][0]) for key in keys]
        return sum(each.numel() * (self.dtype.itemsize if each.is_floating_point() else each.element_size())
                   for each in found)

    def _read(self, keys: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        for key in keys:
            tensor = self._constant_of[key] if key in self._constant_of else read_tensor(self._record_of[key])
            yield key, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _read_nbytes(self, keys: Collection[int]) -> int:
        """While they are read: tensors of another dtype, or of several pieces, are in memory twice for a moment."""
        records = [self._record_of[key] for key in keys if key not in self._constant_of]
        twice = [each.nbytes for each in records if each.bands or each.dtype != self.dtype]
        return self._nbytes(keys) + max(twice, default=0)

    def _load(self, keys: Iterable[int]) -> None:
        for key, tensor in self._read(keys):
            self._put(key, tensor)

    def _drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            held = _held(self._tied[key][0])
            if not held.is_meta:
                self._put(key, torch.empty_like(held, device="meta"))

    def _put(self, key: int, tensor: torch.Tensor) -> None:
        owner, name = self._tied[key][0]
        value = nn.Parameter(tensor, requires_grad=False) if name in owner._parameters else tensor
        for owner, name in self._tied[key]:
            if name in owner._parameters:
                owner._parameters[name] = value  # type: ignore[assignment]
            else:
                owner._buffers[name] = value

    def _load_layer(self, layer: nn.Module, args: Any) -> None:
        memory, reads, key = self._memory, self._reads, id(layer)
        assert memory is not None and reads is not None
        self._running = key
        reads.called(key)
        if key not in self._resident:
            if reads.ahead == key:
                self._take_ahead()
            else:
                self._forget_ahead()
                self._load(self._layers[key])
        self._read_ahead(memory, reads)
        self._marked_nbytes = memory.mark()

    def _read_ahead(self, memory: CountedMemory, reads: LayerReads) -> None:
        """Begin to read the next layer where there is room while this one computes."""
        after = reads.next_of(self._resident) if reads.ahead is None and reads.last not in self._alone else None
        if after is None or not self._working:
            return
        nbytes, working = self._read_nbytes(self._layers[after]), max(self._working.values())
        if reads.last in self._working:
            working = self._working[reads.last]
        if memory.count() + nbytes + working <= memory.limit_nbytes:
            memory.reserved_nbytes = nbytes
            reads.begin(after)

    def _take_ahead(self) -> None:
        """Compute with the layer that has been read."""
        assert self._memory is not None and self._reads is not None
        weights = self._reads.take()
        self._memory.hold(weights)
        self._memory.reserved_nbytes = 0
        for key, tensor in weights.items():
            self._put(key, tensor)

    def _forget_ahead(self) -> bool:
        """Let the layer go that has been read; whether there was one."""
        assert self._memory is not None and self._reads is not None
        if self._reads.ahead is None:
            return False
        self._reads.take()
        self._memory.reserved_nbytes = 0
        return True

    def _drop_layer(self, layer: nn.Module, args: Any, out: Any) -> None:
        key, self._running = id(layer), None
        assert self._memory is not None
        self._working[key] = self._memory.high_nbytes - self._marked_nbytes
        if key in self._resident:
            return
        if len(self._resident) < self._most_resident and self._can_stay(self._memory, key):
            self._resident[key] = None
        else:
            self._drop(self._layers[key])

    def _can_stay(self, memory: CountedMemory, key: int) -> bool:
        """Return whether a layer can stay with room for those that come and go, two at a time."""
        others = len(self._layers) - len(self._resident) - 1
        room = memory.limit_nbytes - memory.count() + memory.reserved_nbytes
        return room >= min(2, others) * self.sizes.layer_nbytes + self._working[key]

    def _make_room(self) -> bool:
        """Let a layer go that was read ahead, or stays; whether there was one."""
        if self._forget_ahead():
            assert self._reads is not None and self._reads.last is not None
            self._alone.add(self._reads.last)
            return True
        key = next((each for each in reversed(self._resident) if each != self._running), None)
        if key is None:
            return False
        del self._resident[key]
        self._drop(self._layers[key])
        self._most_resident = len(self._resident)  # from here on, else layers come and go
        return True


def missing_weights(module: nn.Module, known: Collection[str]) -> list[str]:
    """One name of each of a module's weights that is not among the known ones."""
    names: dict[int, list[str]] = {}
    for prefix, inner in module.named_modules():
        for place in _places(inner, recurse=False):
            names.setdefault(id(_held(place)), []).append(f"{prefix}.{place[1]}".removeprefix("."))
    return [each[0] for each in names.values() if not any(name in known for name in each)]


def stored_records(
    module: nn.Module, checkpoint: Checkpoint, prefix: str, rename: Callable[[str], str], within: str = ""
) -> dict[str, TensorRecord]:
    """Find the weights of a module in a checkpoint.

    Args:
        module: The module.
        checkpoint: The files.
        prefix: The base model's, which names in the files may lack or have in addition.
        rename: Gives the present name of an older one.
        within: Name of the module within the model.

    Returns:
        The records by name within the module, of those that are there.

    Raises:
        CheckpointError: One of them has another shape, or cannot be computed with.
    """
    stored = {rename(name): record for name, record in checkpoint.tensors.items()} | dict(checkpoint.tensors)
    found = {}
    for owner, inner in module.named_modules():
        for place in _places(inner, recurse=False):
            name = f"{owner}.{place[1]}".removeprefix(".")
            whole = f"{within}.{name}".removeprefix(".")
            record = next((stored[each] for each in spellings(whole, prefix) if each in stored), None)
            if record is None:
                continue
            if record.packed is not None or record.opaque or tuple(record.shape) != tuple(_held(place).shape):
                raise CheckpointError(f"{record.path}: {record.name} is not what the model's {whole} is, "
                                      f"{list(_held(place).shape)} of floating-point numbers")
            found[name] = record
    return found


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _places(module: nn.Module, recurse: bool = True) -> list[WeightPlace]:
    return [(owner, name) for owner in (module.modules() if recurse else (module,))
            for held, hidden in ((owner._parameters, ()), (owner._buffers, owner._non_persistent_buffers_set))
            for name, tensor in held.items() if tensor is not None and name not in hidden]


def _held(place: WeightPlace) -> torch.Tensor:
    owner, name = place
    tensor = owner._parameters[name] if name in owner._parameters else owner._buffers[name]
    assert tensor is not None
    return tensor
