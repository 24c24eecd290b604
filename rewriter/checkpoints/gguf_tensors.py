"""Which parameter of the transformers model each GGUF tensor is, and its values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forebay.rewriter.capture.experts import experts_layout
from forebay.rewriter.checkpoints.gguf_config import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from forebay.rewriter.checkpoints.gguf_header import GgufHeader, GgufTensor, require_readable
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tensors of a model for images, which some files of Gemma 3 hold, too: text never meets them.
FOR_IMAGES = ("v.", "mm.")
# GPT-2's matrices that the transformers model has transposed (Conv1D).
TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_down.weight", "ffn_up.weight")


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of a GGUF file as a parameter of the model: `name` and `shape` are the parameter's, `processor` puts
    the values into the model's order."""

    name: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    processor: Any

    def values(self) -> torch.Tensor:
        """The values in float32, in the model's order."""
        from gguf import dequantize, quant_shape_to_byte_shape

        tensor = self.tensor
        data = np.fromfile(tensor.path, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        values = dequantize(data.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind)), tensor.kind)
        return torch.from_numpy(self.processed(values)).reshape(self.shape)

    def processed(self, values: np.ndarray) -> np.ndarray:
        """What transformers' own loader makes of a tensor's values, or of stand-ins for them."""
        taken: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        result = self.processor.process(values, self.tensor.name, tensor_key_mapping={}, parsed_parameters=taken)
        if result.name is None:  # the processor stored it itself, as GPT-2's does with an untied head
            (out,) = taken["tensors"].values()
            return out.numpy()
        return result.weights


@dataclass(frozen=True)
class PlacedExperts:
    """A parameter that holds a matrix of each expert of a layer, of `pieces` that lie in it one after the other."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[PlacedTensor, ...]

    @property
    def tensor(self) -> GgufTensor:
        """The first piece's."""
        return self.pieces[0].tensor

    def values(self) -> torch.Tensor:
        """The values in float32, in the model's order."""
        return torch.cat([piece.values() for piece in self.pieces]).view(self.shape)


PlacedParameter = PlacedTensor | PlacedExperts


def _place_experts(header: GgufHeader, model: PreTrainedModel, processor: Any) -> dict[str, PlacedExperts]:
    """The parameters of experts, each of one tensor of the file or of gates and values in two."""
    placed = {}
    for module_name, module in model.named_modules():
        layer = re.search(r"\.layers\.(\d+)\.", module_name)
        if layer is None or experts_layout(module) is None:
            continue
        for own, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            name, shape = f"{module_name}.{own}", tuple(module.get_parameter(own).shape)
            found = [header.find(f"blk.{layer[1]}.ffn_{kind}_exps.weight") for kind in kinds]
            tensors = [tensor for tensor in found if tensor is not None]
            if len(tensors) != len(kinds):
                continue  # told as a parameter without a tensor
            each = (shape[0], shape[1] // len(kinds), shape[2])
            for tensor in tensors:
                require_readable(tensor)
                if tensor.shape != each:
                    raise CheckpointError(f"{tensor.path}: {tensor.name} is {tensor.shape}, but {name} of this model "
                                          f"is {shape}")
            pieces = [PlacedTensor(f"{name}[{expert}]", each[1:], _part(tensor, expert), processor)
                      for expert in range(shape[0]) for tensor in tensors]
            placed[name] = PlacedExperts(name, shape, tuple(pieces))
    return placed


def _part(tensor: GgufTensor, expert: int) -> GgufTensor:
    """The matrix of one expert in a tensor of all."""
    nbytes = tensor.nbytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * nbytes, nbytes=nbytes)


@one_thread
def place_tensors(header: GgufHeader, model: PreTrainedModel) -> Mapping[str, PlacedParameter]:
    """The tensors of a GGUF model by the name of the parameter that each is; a tied one has its first name. Those of
    experts are `PlacedExperts`.

    Raises:
        CheckpointError: a tensor that the model has no place for, one of another shape or of a type that cannot be
            read, or a parameter without a tensor.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    # Without children: asking each submodule again costs 5 s at 30 layers and adds only bare models' names.
    flat = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=tuple)
    names = get_gguf_hf_weights_map(flat, processor, header.architecture)
    placed: dict[str, PlacedParameter] = dict(_place_experts(header, model, TensorProcessor(config={})))
    settings = () if header.architecture == "gpt2" else (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)  # obeyed by the config
    taken = {piece.tensor.name for each in placed.values() if isinstance(each, PlacedExperts) for piece in each.pieces}
    wanted = [tensor for tensor in header.tensors if tensor.name not in settings and tensor.name not in taken
              and not (header.architecture == "gemma3" and tensor.name.startswith(FOR_IMAGES))]
    unread = [tensor.name for tensor in wanted if tensor.name not in names]
    if unread:
        raise CheckpointError(
            f"{header.path}: transformers' model of architecture {header.architecture} has no place for "
            f"{', '.join(unread[:5])} ({len(unread)} in all), and left out they would change what it computes; use "
            "the model's safetensors checkpoint")
    parameters = model.state_dict(keep_vars=True)
    for tensor in wanted:
        name = names[tensor.name]
        shape = tuple(parameters[name].shape)
        require_readable(tensor)
        turned = header.architecture == "gpt2" and tensor.name.endswith(TRANSPOSED)
        if _squeezed(tensor.shape) != _squeezed(shape[::-1] if turned else shape):
            raise CheckpointError(f"{tensor.path}: {tensor.name} is {tensor.shape}, but {name} of this model is "
                                  f"{shape}")
        placed[name] = PlacedTensor(name, shape, tensor, processor)
    stored = {id(parameters[name]) for name in placed}  # a tied parameter is one object under several names
    missing = [name for name, value in parameters.items() if id(value) not in stored]
    if missing:
        raise CheckpointError(f"{header.path} is incomplete: no tensor for {', '.join(missing[:5])} ({len(missing)} "
                              "in all)")
    return placed


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1) if math.prod(shape) else shape
