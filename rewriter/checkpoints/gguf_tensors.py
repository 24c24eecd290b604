"""Which parameter of the transformers model each GGUF tensor is, and its values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forebay.rewriter.capture.experts import experts_layout
from forebay.rewriter.checkpoints.gguf_header import GgufHeader, GgufTensor, require_readable
from forebay.rewriter.checkpoints.gguf_names import parameter_names
from forebay.rewriter.checkpoints.gguf_orders import Change, is_transposed, undo_order
from forebay.rewriter.checkpoints.gguf_values import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, layer_count
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tensors of a model for images, which some files of Gemma 3 hold, too: text never meets them.
FOR_IMAGES = ("v.", "mm.")
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of a GGUF file as a parameter of the model: `name` and `shape` are the parameter's, `change` puts the
    values into the model's order."""

    name: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    change: Change | None = None

    def values(self) -> torch.Tensor:
        """The values in float32, in the model's order."""
        from gguf import dequantize, quant_shape_to_byte_shape

        tensor = self.tensor
        data = np.fromfile(tensor.path, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        values = dequantize(data.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind)), tensor.kind)
        return torch.from_numpy(self.changed(values)).reshape(self.shape)

    def changed(self, values: np.ndarray) -> np.ndarray:
        """The file's values, or stand-ins for them, in the model's order."""
        return values if self.change is None else self.change(values)


@dataclass(frozen=True)
class PlacedParts:
    """A parameter of several tensors, or of parts of them, which lie in it one after the other. Where it is
    `transposed`, they do in each of its matrices' transpose, and of `woven` pieces rows alternate there."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[PlacedTensor, ...]
    transposed: bool = False
    woven: bool = False

    @property
    def tensor(self) -> GgufTensor:
        """The first piece's."""
        return self.pieces[0].tensor

    @property
    def matrices(self) -> Iterator[tuple[PlacedTensor, ...]]:
        """The pieces of each matrix of a parameter that is transposed or woven."""
        count = len(self.pieces) // self.shape[0]
        return (self.pieces[n : n + count] for n in range(0, len(self.pieces), count))

    def values(self) -> torch.Tensor:
        """The values in float32, in the model's order."""
        if not (self.transposed or self.woven):
            return torch.cat([piece.values() for piece in self.pieces]).view(self.shape)
        return torch.stack([self.matrix(pieces) for pieces in self.matrices])

    def matrix(self, pieces: tuple[PlacedTensor, ...]) -> torch.Tensor:
        """One of the parameter's matrices, or of its vectors."""
        rows = [piece.values() for piece in pieces]
        matrix = torch.stack(rows, 1).flatten(0, 1) if self.woven else torch.cat(rows)
        return matrix.t() if self.transposed else matrix


PlacedParameter = PlacedTensor | PlacedParts


def _place_experts(header: GgufHeader, model: PreTrainedModel) -> Iterator[PlacedParts]:
    """The parameters of experts, each of one tensor of the file or of gates and values in two."""
    for module_name, module in model.named_modules():
        layer, layout = LAYER.search(f"{module_name}."), experts_layout(module)
        if layer is None or layout is None:
            continue
        for own, parameter in module.named_parameters(recurse=False):
            kinds = ("down",) if own.startswith("down") else ("gate", "up") if layout.gated else ("up",)
            if kinds == ("gate", "up") and header.find(f"blk.{layer[1]}.ffn_gate_up_exps.weight") is not None:
                kinds = ("gate_up",)
            name, shape, ending = f"{module_name}.{own}", tuple(parameter.shape), (
                "bias" if own.endswith("bias") else "weight")
            found = [header.find(f"blk.{layer[1]}.ffn_{kind}_exps.{ending}") for kind in kinds]
            tensors = [tensor for tensor in found if tensor is not None]
            if len(tensors) != len(kinds):
                continue  # told as a parameter without a tensor
            transposed = layout.transposed and ending == "weight"
            rows, *columns = shape[:0:-1] if transposed else shape[1:]
            each = (rows // len(kinds), *columns)
            for tensor in tensors:
                require_readable(tensor)
                if tensor.shape != (shape[0], *each):
                    raise CheckpointError(f"{tensor.path}: {tensor.name} is {tensor.shape}, but {name} of this model "
                                          f"is {shape}")
            pieces = [PlacedTensor(f"{name}[{expert}]", each, _rows(tensor, expert)) for expert in range(shape[0])
                      for tensor in tensors]
            yield PlacedParts(name, shape, tuple(pieces), transposed, len(kinds) > 1 and not layout.concatenated)


def _rows(tensor: GgufTensor, first: int, count: int | None = None) -> GgufTensor:
    """Some rows of a tensor; without `count` the first one, which has a dimension less."""
    nbytes = tensor.nbytes // tensor.shape[0]
    shape = tensor.shape[1:] if count is None else (count, *tensor.shape[1:])
    return replace(tensor, shape=shape, offset=tensor.offset + first * nbytes, nbytes=nbytes * (count or 1))


def _place_parts(header: GgufHeader, model: PreTrainedModel) -> Iterator[PlacedParts]:
    """Other parameters that are stored in several tensors."""
    rules = {".shared_mlp.input_linear.weight": _gates_and_values, ".linear_attn.in_proj_qkvz.weight": _by_key_head,
             ".self_attn.kv_b_proj.weight": _expansions, ".self_attn.conv1d.weight": _convolutions}
    for name, parameter in model.named_parameters():
        layer = LAYER.search(name)
        for ending, rule in rules.items():
            if layer and name.endswith(ending):
                pieces = tuple(rule(name, header, f"blk.{layer[1]}.", model.config))
                for piece in pieces:
                    require_readable(piece.tensor)
                if pieces and sum(piece.shape[0] for piece in pieces) != parameter.shape[0]:
                    raise CheckpointError(f"{header.path}: {pieces[0].tensor.name} and what belongs to it do not make "
                                          f"{name} of this model, which is {tuple(parameter.shape)}")
                if pieces:
                    yield PlacedParts(name, tuple(parameter.shape), pieces)


def _gates_and_values(name: str, header: GgufHeader, layer: str, config: Any) -> Iterator[PlacedTensor]:
    """Granite's shared experts; without others they are the layer's feed-forward matrices."""
    for kind in ("gate", "up"):
        tensor = header.find(f"{layer}ffn_{kind}_shexp.weight") or header.find(f"{layer}ffn_{kind}.weight")
        if tensor is not None:
            yield PlacedTensor(name, tensor.shape, tensor)


def _by_key_head(name: str, header: GgufHeader, layer: str, config: Any) -> Iterator[PlacedTensor]:
    """Qwen3-Next's queries, keys, values and gates, those of a head of keys together."""
    mixed, gate = header.find(f"{layer}attn_qkv.weight"), header.find(f"{layer}attn_gate.weight")
    if mixed is None or gate is None:
        return
    heads, narrow = config.linear_num_key_heads, config.linear_key_head_dim
    wide = config.linear_num_value_heads // heads * config.linear_value_head_dim
    if mixed.shape[0] != heads * (2 * narrow + wide) or gate.shape[0] != heads * wide:
        raise CheckpointError(f"{mixed.path}: {mixed.name} is {mixed.shape} and {gate.name} {gate.shape}, of which "
                              f"{name} of this model cannot be made")
    for head in range(heads):
        for tensor, first, count in ((mixed, head * narrow, narrow), (mixed, (heads + head) * narrow, narrow),
                                     (mixed, 2 * heads * narrow + head * wide, wide), (gate, head * wide, wide)):
            yield PlacedTensor(name, (count, *tensor.shape[1:]), _rows(tensor, first, count))


def _convolutions(name: str, header: GgufHeader, layer: str, config: Any) -> Iterator[PlacedTensor]:
    """Kimi's short convolutions of queries, keys and values as one."""
    for kind in "qkv":
        tensor = header.find(f"{layer}ssm_conv1d_{kind}.weight")
        if tensor is not None:
            yield PlacedTensor(name, (math.prod(tensor.shape[:-1]), 1, tensor.shape[-1]), tensor)


def _expansions(name: str, header: GgufHeader, layer: str, config: Any) -> Iterator[PlacedTensor]:
    """The matrix that expands latents, head by head: the part of keys, which the file has transposed, and of values."""
    keys, values = header.find(f"{layer}attn_k_b.weight"), header.find(f"{layer}attn_v_b.weight")
    if keys is None or values is None:
        return
    inner, outer, rank = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    if keys.shape[1:] != (rank, inner) or values.shape[1:] != (outer, rank) or keys.shape[0] != values.shape[0]:
        raise CheckpointError(f"{keys.path}: {keys.name} is {keys.shape} and {values.name} {values.shape}, of which "
                              f"{name} of this model cannot be made")
    for head in range(keys.shape[0]):
        yield PlacedTensor(name, (inner, rank), _rows(keys, head), lambda values: values.reshape(rank, inner).T)
        yield PlacedTensor(name, (outer, rank), _rows(values, head))


def _place_stacked(header: GgufHeader, model: PreTrainedModel) -> Iterator[PlacedParts]:
    """Gemma 3n's matrices that make its other predictions and put them together: one tensor has all of either."""
    for name, parameter in model.named_parameters():
        found = re.search(r"\.altup(_unembed)?_projections\.(\d+)\.weight$", name)
        tensor = header.find(f"altup{'_unembd' if found[1] else ''}_proj.weight") if found else None
        if found is None or tensor is None:
            continue
        require_readable(tensor)
        shape, number = tuple(parameter.shape), int(found[2])
        if tensor.shape[1:] != shape or number >= tensor.shape[0]:
            raise CheckpointError(f"{tensor.path}: {tensor.name} is {tensor.shape}, of which {name} of this model "
                                  "cannot be a part")
        yield PlacedParts(name, shape, (PlacedTensor(name, shape, _rows(tensor, number)),))


def _unread(header: GgufHeader, config: Any) -> tuple[str, ...]:
    """Return how tensors begin that no layer reads: of those that draft for the model, and keys and values of layers
    that attend over those of others."""
    layers, sharing = layer_count(header), int(getattr(config, "num_kv_shared_layers", 0) or 0)
    drafting = [f"blk.{n}." for n in range(layers, int(header.get("block_count")))]  # type: ignore[call-overload]
    return (*drafting, *(f"blk.{n}.attn_{kind}" for n in range(layers - sharing, layers)
                         for kind in ("k.", "v.", "k_norm.")))


@one_thread
def place_tensors(header: GgufHeader, model: PreTrainedModel) -> Mapping[str, PlacedParameter]:
    """The tensors of a GGUF model by the name of the parameter that each is; a tied one has its first name. Those that
    make one parameter together are `PlacedParts`. Layers that draft tokens for the model are left out, and what the
    model has no use for.

    Raises:
        CheckpointError: a tensor that the model has no place for, one of another shape or of a type that cannot be
            read, or a parameter without a tensor.
    """
    parts = (*_place_experts(header, model), *_place_parts(header, model), *_place_stacked(header, model))
    placed: dict[str, PlacedParameter] = {each.name: each for each in parts}
    settings = () if header.architecture == "gpt2" else (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)  # obeyed by the config
    taken = {piece.tensor.name for each in parts for piece in each.pieces}
    wanted = [tensor for tensor in header.tensors if tensor.name not in settings and tensor.name not in taken
              and not tensor.name.startswith(_unread(header, model.config))
              and not (header.architecture == "gemma3" and tensor.name.startswith(FOR_IMAGES))]
    parameters, config = model.state_dict(keep_vars=True), model.config.to_dict()
    names = parameter_names(parameters, header.architecture, layer_count(header), {t.name for t in wanted})
    unread = [tensor.name for tensor in wanted if tensor.name not in names]
    if unread:
        raise CheckpointError(
            f"{header.path}: transformers' model of architecture {header.architecture} has no place for "
            f"{', '.join(unread[:5])} ({len(unread)} in all), and left out they would change what it computes; use "
            "the model's safetensors checkpoint")
    for tensor in wanted:
        name = names[tensor.name]
        shape = tuple(parameters[name].shape)
        require_readable(tensor)
        if not _fits(tensor, shape[::-1] if is_transposed(header.architecture, tensor.name) else shape):
            raise CheckpointError(f"{tensor.path}: {tensor.name} is {tensor.shape}, but {name} of this model is "
                                  f"{shape}")
        placed[name] = PlacedTensor(name, shape, tensor, undo_order(header.architecture, tensor.name, config))
    stored = {id(parameters[name]) for name in placed}  # a tied parameter is one object under several names
    missing = [name for name, value in parameters.items() if id(value) not in stored]
    if missing:
        raise CheckpointError(f"{header.path} is incomplete: no tensor for {', '.join(missing[:5])} ({len(missing)} "
                              "in all)")
    return placed


def _fits(tensor: GgufTensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor's shape is a parameter's but for dimensions of 1; a norm's groups make one vector."""
    if tensor.name.endswith(".ssm_norm.weight"):
        return math.prod(tensor.shape) == math.prod(shape)
    return _squeezed(tensor.shape) == _squeezed(shape)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1) if math.prod(shape) else shape
