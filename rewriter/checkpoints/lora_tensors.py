"""The tensors of an adapter as the captured model reads them, beside those of its base.

For a matrix W of a module, with A [r, in] and B [out, r] of the adapter, the model computes

    y = W x * gain + B' A x + shift

B' holds the adapter's scale. `gain` and `shift` are there for DoRA alone (arXiv 2402.09353, equation 5):
gain = m / |W + scale B A| by rows, and shift = bias - gain * bias.

    MODULE.lora_A.weight   [r, in]; of an embedding [vocabulary, r]
    MODULE.lora_B.weight   [out, r]
    MODULE.lora_B.bias     [out], the shift and the adapter's own bias
    MODULE.lora_gain       [out]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.config import meta_model
from forebay.rewriter.checkpoints.lora import LoraAdapter, LoraModule, ReadTensor
from forebay.rewriter.checkpoints.match_weights import weight_names
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.stored_tensors import spellings
from forebay.rewriter.checkpoints.text_model import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"
CONV1D = "Conv1D"  # GPT-2's class of matrices, which are [in, out]


@dataclass(frozen=True)
class LoraTensor:
    """A tensor to be stored; `read` computes it. `rank_first`: its first dimension is the rank."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: ReadTensor
    rank_first: bool = False


def lora_tensors(adapter: LoraAdapter, base: Checkpoint, config: PreTrainedConfig) -> list[LoraTensor]:
    """The tensors that an adapter adds to the model of `base`.

    Raises:
        CheckpointError: The adapter does not fit the model; the message names the module.
    """
    model = _Base(adapter, base, config)
    found = [tensor for name, module in adapter.modules.items() for tensor in _of_module(model, name, module)]
    for name, read in adapter.replaced.items():
        found += _replaced(model, name, read)
    return found


def side_by_side(found: Mapping[str, Sequence[LoraTensor]]) -> tuple[list[LoraTensor], dict[str, tuple[int, int]]]:
    """The tensors of several adapters in one model.

    Args:
        found: Their tensors (`lora_tensors`) by the names of adapters.

    Returns:
        The tensors, in which each adapter has the same columns of x A^T in all modules, and these columns.

    Raises:
        CheckpointError: One of them does more than add matrices.
    """
    columns, end = dict[str, tuple[int, int]](), 0
    by_name: dict[str, dict[str, LoraTensor]] = {}
    for adapter, tensors in found.items():
        ranks = [tensor.shape[1] for tensor in tensors if tensor.name.endswith(SECOND)]
        columns[adapter] = end, end + max(ranks, default=0)
        end = columns[adapter][1]
        for tensor in tensors:
            if not tensor.name.endswith((FIRST, SECOND)):
                raise CheckpointError(f"adapter {adapter!r} changes {tensor.name} by more than two matrices (DoRA, a "
                                      "bias, modules_to_save): it serves alone, without a name")
            by_name.setdefault(tensor.name, {})[adapter] = tensor
    return [_joined(name, own, columns, end) for name, own in by_name.items()], columns


def _joined(
    name: str, own: Mapping[str, LoraTensor], columns: Mapping[str, tuple[int, int]], width: int
) -> LoraTensor:
    """One tensor of those that adapters have of that name, each in its columns."""
    some = next(iter(own.values()))
    rows_are_ranks = name.endswith(FIRST) and some.rank_first
    sizes = (width, some.shape[1]) if rows_are_ranks else (some.shape[0], width)

    def read() -> torch.Tensor:
        made = torch.zeros(sizes, dtype=some.dtype)
        for adapter, tensor in own.items():
            first = columns[adapter][0]
            part = made if not rows_are_ranks else made.T
            values = tensor.read().T if rows_are_ranks else tensor.read()
            part[:, first : first + values.shape[1]] = values
        return made

    return LoraTensor(name, some.dtype, sizes, read)


class _Base:
    """The model that an adapter was trained on: names as the captured model has them, shapes, values."""

    def __init__(self, adapter: LoraAdapter, base: Checkpoint, config: PreTrainedConfig) -> None:
        self.adapter, self.replaced, self.base = adapter.name, adapter.replaced, base
        self.model = meta_model(text_config(config) or config)
        self.model.tie_weights()  # type: ignore[no-untyped-call]
        self.prefix, self.rename = weight_names(config)
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))

    @cached_property
    def stored(self) -> dict[str, TensorRecord]:
        """Tensors of the checkpoint by today's names."""
        return {self.rename(name): record for name, record in self.base.tensors.items()}

    def parameter(self, name: str) -> str:
        """The model's name of the parameter that an adapter calls `name`."""
        own = next((each for each in spellings(self.rename(name), self.prefix) if each in self.parameters), None)
        if own is None:
            raise CheckpointError(f"{self.adapter}: the model in {self.base.folder} has no {name}: the adapter is one "
                                  "of another model, or of a part that is not run")
        return own

    def record(self, name: str) -> TensorRecord:
        """Return the base's record of a parameter, under any name of its storage."""
        ties = [tied for tied, each in self.parameters.items() if each is self.parameters[name]]
        for spelled in (each for tied in (name, *ties) for each in spellings(tied, self.prefix)):
            if spelled in self.stored:
                return self.stored[spelled]
        raise CheckpointError(f"{self.base.folder} holds no tensor for {name}, which {self.adapter} changes")


    def values(self, name: str) -> torch.Tensor:
        """A parameter in float32, that of the adapter where it has its own."""
        own = next((read for trained, read in self.replaced.items() if self.parameter(trained) == name), None)
        return (read_dequantized(self.record(name)) if own is None else own().detach()).float()


def _of_module(base: _Base, trained: str, module: LoraModule) -> Iterator[LoraTensor]:
    """The tensors of one module of an adapter."""
    name = base.parameter(f"{trained}.weight").removesuffix(".weight")
    kind, record = base.model.get_submodule(name), base.record(f"{name}.weight")
    looked_up = isinstance(kind, nn.Embedding)
    if not (looked_up or isinstance(kind, nn.Linear) or type(kind).__name__ == CONV1D):
        raise CheckpointError(f"{base.adapter}: it changes {trained}, a {type(kind).__name__}, which is not "
                              "implemented; merge the adapter into its base")
    rows, columns = kind.weight.shape  # type: ignore[union-attr,misc]
    inputs, outputs = (rows, columns) if looked_up or type(kind).__name__ == CONV1D else (columns, rows)
    names = ("lora_embedding_A", "lora_embedding_B") if looked_up else ("lora_A", "lora_B")
    odd = sorted(module.parts.keys() - {*names, *(() if looked_up else ("lora_B.bias", "lora_magnitude_vector"))})
    if odd or not all(each in module.parts for each in names):
        raise CheckpointError(f"{base.adapter}: {trained} has {', '.join(sorted(module.parts))}, which is not "
                              "implemented; merge the adapter into its base")
    made = _LoraNumbers(base, trained, module, names, (inputs, outputs), record, type(kind).__name__ == CONV1D)
    dtype = record.dtype if record.packed is None else record.packed.dtype
    first = (inputs, module.rank) if looked_up else (module.rank, inputs)
    yield LoraTensor(f"{name}{FIRST}", dtype, first, lambda: made.factor(0, looked_up).to(dtype),
                     not looked_up)
    yield LoraTensor(f"{name}{SECOND}", dtype, (outputs, module.rank), lambda: made.scaled().to(dtype))
    biased = f"{name}.bias" in base.parameters and made.dora
    if biased or "lora_B.bias" in module.parts:
        own = f"{name}.bias" if biased else ""
        yield LoraTensor(f"{name}.lora_B.bias", dtype, (outputs,), lambda: made.shift(own).to(dtype))
    if made.dora:
        yield LoraTensor(f"{name}.lora_gain", dtype, (outputs,), lambda: made.gain.to(dtype))


@dataclass
class _LoraNumbers:
    """The numbers of one module, in float32."""

    base: _Base
    trained: str
    module: LoraModule
    names: tuple[str, str]
    sizes: tuple[int, int]  # of inputs and outputs
    record: TensorRecord
    transposed: bool  # the base's matrix is [in, out]

    @property
    def dora(self) -> bool:
        return "lora_magnitude_vector" in self.module.parts

    def factor(self, which: int, transposed: bool = False) -> torch.Tensor:
        """A [r, in], or B [out, r]."""
        rank, (inputs, outputs) = self.module.rank, self.sizes
        found = self.read(self.names[which], ((rank, inputs), (outputs, rank))[which])
        return found.T.contiguous() if transposed else found

    def read(self, part: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = self.module.parts[part]().detach().float()
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{self.base.adapter}: {part} of {self.trained} has shape {list(found.shape)}, not "
                                  f"{list(shape)}: the adapter is one of another model, or has another rank")
        return found

    def scaled(self) -> torch.Tensor:
        """B with all that multiplies it."""
        found = self.factor(1) * self.module.scale
        return found * self.gain[:, None] if self.dora else found

    @cached_property
    def gain(self) -> torch.Tensor:
        """DoRA's factor of each output."""
        weight = read_dequantized(self.record).float()
        weight = weight.T if self.transposed else weight
        norms = torch.linalg.vector_norm(weight + self.module.scale * (self.factor(1) @ self.factor(0)), dim=1)
        return self.read("lora_magnitude_vector", (self.sizes[1],)) / norms

    def shift(self, bias: str) -> torch.Tensor:
        """Bias that is added to each output."""
        found = torch.zeros(self.sizes[1])
        if "lora_B.bias" in self.module.parts:
            found += self.read("lora_B.bias", (self.sizes[1],)) * self.module.scale
        if bias:
            found += (1 - self.gain) * self.base.values(bias)
        return found


def _replaced(base: _Base, trained: str, read: ReadTensor) -> Iterator[LoraTensor]:
    """A parameter that the adapter has whole; none where it is what the base has."""
    name = base.parameter(trained)
    record, wanted = base.record(name), tuple(base.parameters[name].shape)
    dtype = record.dtype if record.packed is None else record.packed.dtype
    found = read().detach()
    if tuple(found.shape) != wanted:
        raise CheckpointError(f"{base.adapter}: {trained} has shape {list(found.shape)}, the base's has "
                              f"{list(wanted)}: merge the adapter into its base")
    if record.packed is None and torch.equal(found.to(dtype), read_dequantized(record)):
        return
    yield LoraTensor(name, dtype, wanted, lambda: read().detach().to(dtype))
