"""The vision tower and projector of a multimodal model: transformers' own modules, whose layers are read from the
model's files one at a time as they are called, within the budget.

Each weight is used once for a batch of images, so that nothing is gained by keeping any: memory holds the weights
outside the layers, the layer that computes, and activations.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay.rewriter.capture.language_model import fill_constants
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, read_tensor
from forebay.rewriter.checkpoints.match_weights import checkpoint_names, model_class
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.stored_tensors import spellings
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.one_thread import one_thread
from forebay.runtime.run.arena import return_freed_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OF_AUDIO = ("audio_tower", "embed_audio")
TowerTensor = tuple[nn.Module, str]  # of a parameter or a persistent buffer


@dataclass(frozen=True)
class TowerPlan:
    """Memory of a tower while it runs.

    Attributes:
        nbytes: Of all of its weights, each of which is read once for a batch of images.
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
        """Bytes of weights in memory at a time."""
        return self.kept_nbytes + self.layer_nbytes

    def __str__(self) -> str:
        return (f"{format_nbytes(self.nbytes)} of a vision tower, read once per batch of images before the prefill; "
                f"{format_nbytes(self.weight_nbytes)} at a time ({self.layers} layers in turn), and activations")


class ImageTower:
    """The tower of one model; `features` runs it.

    Attributes:
        plan: Its memory.
        peak_nbytes: Of weights and activations in the last run.
    """

    def __init__(self, config: PreTrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.config, self.dtype, self.peak_nbytes = config, dtype, 0
        self.base = _without_text(config, dtype)
        self._records = _records(self.base, config, checkpoint)
        layers = [layer for layers in _outermost_lists(self.base) for layer in layers]
        self._layers = {id(layer): _places(layer) for layer in layers}
        within = {place for places in self._layers.values() for place in places}
        self._kept = [place for place in _places(self.base) if place not in within]
        for layer in layers:
            layer.register_forward_pre_hook(self._load_layer)
            layer.register_forward_hook(self._drop_layer)
        sizes = [sum(map(self._nbytes, places)) for places in self._layers.values()]
        kept = sum(map(self._nbytes, self._kept))
        self.plan = TowerPlan(sum(sizes) + kept, kept, len(sizes), max(sizes, default=0))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of what a processor gives of images."""
        taken = inspect.signature(self.base.get_image_features).parameters
        return tuple(name for name in taken if name not in ("self", "kwargs") and not name.startswith("vision_feature"))

    def features(self, given: Mapping[str, torch.Tensor], budget_nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the tower over images.

        Args:
            given: The `inputs`, as transformers' processor makes them.
            budget_nbytes: For weights and activations together.

        Returns:
            Embeddings [N, H] of the tokens of all images in their order, and what is added after the first layers,
            [N, layers H].

        Raises:
            PlanError: The budget has no room for the weights, or for the activations of so many images.
        """
        if self.plan.weight_nbytes > budget_nbytes:
            raise PlanError(f"budget: the vision tower needs {format_nbytes(self.plan.weight_nbytes)} for weights at a "
                            f"time, and the budget is {format_nbytes(budget_nbytes)}; give more, or leave images out")
        images = {name: torch.as_tensor(given[name]) for name in self.inputs if name in given}
        images = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in images.items()}
        counted = _CountedMemory(budget_nbytes)
        try:
            with torch.no_grad(), counted:
                self._load(self._kept)
                found: Any = self.base.get_image_features(**images)
                embeds, *added = (_rows(each) for each in (
                    self._embeddings(found), *(getattr(found, "deepstack_features", None) or ())))
        finally:
            self.peak_nbytes = counted.peak_nbytes
            self._drop([*self._kept, *(place for places in self._layers.values() for place in places)])
        del found
        return_freed_memory()
        return embeds, torch.cat(added, 1) if added else embeds[:, :0]

    def _embeddings(self, found: Any) -> Any:
        """Embeddings of images, of which `get_image_features` may leave the projector to the model."""
        projector = MULTIMODAL[self.config.model_type].projector
        return self.base.get_submodule(projector)(_rows(found.last_hidden_state)) if projector else found.pooler_output

    def _nbytes(self, place: TowerTensor) -> int:
        return _held(place).nbytes

    def _load(self, places: list[TowerTensor]) -> None:
        for place in places:
            _put(place, read_tensor(self._records[place]).to(self.dtype))

    def _drop(self, places: list[TowerTensor]) -> None:
        for place in places:
            _put(place, torch.empty_like(_held(place), device="meta"))

    def _load_layer(self, layer: nn.Module, args: Any) -> None:
        self._load(self._layers[id(layer)])

    def _drop_layer(self, layer: nn.Module, args: Any, out: Any) -> None:
        self._drop(self._layers[id(layer)])


@one_thread
def _without_text(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The base model of a multimodal one on the meta device, without its language model."""
    from transformers import initialization

    with torch.device("meta"), initialization.no_init_weights():
        whole: Any = model_class(config)._from_config(copy.deepcopy(config), dtype=dtype)
    base = whole.base_model
    others = (MULTIMODAL[config.model_type].text.removeprefix("model.").partition(".")[0], *OF_AUDIO)
    for name in others:
        if getattr(base, name, None) is not None:
            setattr(base, name, nn.Module())
    fill_constants(base)
    return base.eval()


def _records(base: nn.Module, config: PreTrainedConfig, checkpoint: Checkpoint) -> dict[TowerTensor, TensorRecord]:
    """Where the tower's weights lie. CheckpointError for a folder without them."""
    _, rename = checkpoint_names(config)
    stored = {rename(name): record for name, record in checkpoint.tensors.items()} | dict(checkpoint.tensors)
    found = {}
    for prefix, module in base.named_modules():
        for place in _places(module, recurse=False):
            name = ".".join(filter(None, ("model", prefix, place[1])))
            record = next((stored[each] for each in spellings(name, "model") if each in stored), None)
            if record is None or record.packed is not None or record.opaque:
                raise CheckpointError(f"{checkpoint.folder} has no {name} that can be computed with, so images cannot "
                                      "be taken: give the folder that the model was published in")
            found[place] = record
    return found


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _places(module: nn.Module, recurse: bool = True) -> list[TowerTensor]:
    return [(owner, name) for owner in (module.modules() if recurse else (module,))
            for held, hidden in ((owner._parameters, ()), (owner._buffers, owner._non_persistent_buffers_set))
            for name, tensor in held.items() if tensor is not None and name not in hidden]


def _held(place: TowerTensor) -> torch.Tensor:
    owner, name = place
    tensor = owner._parameters[name] if name in owner._parameters else owner._buffers[name]
    assert tensor is not None
    return tensor


def _put(place: TowerTensor, tensor: torch.Tensor) -> None:
    owner, name = place
    if name in owner._parameters:
        owner._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[name] = tensor


def _rows(features: Any) -> torch.Tensor:
    """[N, H] of the features of all images, which are one tensor or one for each."""
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


class _CountedMemory(TorchDispatchMode):
    """Counts the bytes of tensors that operators make inside, and breaks off where they exceed `limit_nbytes`."""

    def __init__(self, limit_nbytes: int) -> None:
        super().__init__()
        self.limit_nbytes, self.peak_nbytes = limit_nbytes, 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                storage = each.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        nbytes = sum(size for _, size in self._held.values())
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        if nbytes > self.limit_nbytes:
            raise PlanError(f"budget: these images need more than {format_nbytes(self.limit_nbytes)} while the vision "
                            "tower computes them; give more, or fewer or smaller images at a time")
        return out
