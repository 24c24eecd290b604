"""A captured language model and its checkpoint, as the pipeline takes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from .checkpoint import Checkpoint, CheckpointError, TensorRecord
from .concretise import concretise, inline_blocks
from .graph import META, CacheInput, CapturedModel, WeightInput
from .pipeline import Source
from .plan import Workload
from .program import FileSlice


def model_source(
    captured: CapturedModel, files: Mapping[str, FileSlice], workload: Workload, fingerprint: str, *,
    host_hop: bool = False
) -> Source:
    """The flat graphs of `captured` for the batch and context of `workload`."""

    def flat(tokens: int) -> fx.GraphModule:
        return inline_blocks(concretise(captured.step, step_inputs(captured, workload, tokens)))

    return Source(fingerprint, flat, files, captured.constants, host_hop)


def step_inputs(captured: CapturedModel, workload: Workload, tokens: int) -> dict[str, torch.Tensor]:
    """Meta tensors for every placeholder of the step graph, by name."""
    batch, context = workload.batch, workload.context

    def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs = {"input_ids": meta(batch, tokens), "start": meta(batch), "last": meta(batch)}
    for node in captured.step.graph.nodes:
        if node.op != "placeholder":
            continue
        mark = node.meta.get(META)
        if isinstance(mark, CacheInput):
            spec = captured.cache[mark.layer]
            inputs[str(node.target)] = meta(batch, spec.kv_heads, context, spec.head_dim, dtype=spec.dtype)
        elif isinstance(mark, WeightInput):
            known = captured.weights.get(mark.name)
            value = captured.constants.get(mark.name)
            if known is not None:
                inputs[str(node.target)] = meta(*known.shape, dtype=known.dtype)
            elif value is not None:
                inputs[str(node.target)] = meta(*value.shape, dtype=value.dtype)
    return inputs


def weight_files(captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "") -> dict[str, FileSlice]:
    """Where each weight of the model lies in the checkpoint; CheckpointError names the first that is missing or has
    another shape or dtype. A name may lack, or have on top, the base model's `prefix`; a tied weight any of its names.
    """
    found = {}
    for spec in captured.weights.values():
        record = next((r for name in (spec.name, *spec.ties) if (r := _record(checkpoint, name, prefix))), None)
        if record is None:
            raise CheckpointError(f"{checkpoint.folder} holds no tensor for {spec.name} "
                                  f"(it has {len(checkpoint.tensors)} tensors): it is a checkpoint of another model")
        if tuple(record.shape) != tuple(spec.shape):
            raise CheckpointError(f"{record.path}: {record.name} has shape {list(record.shape)}, the model's "
                                  f"{spec.name} has {list(spec.shape)}")
        if record.dtype != spec.dtype:
            raise CheckpointError(f"{record.path}: {record.name} is {str(record.dtype)[6:]}, the model computes in "
                                  f"{str(spec.dtype)[6:]}; save the checkpoint in that dtype, or set the config's dtype")
        found[spec.name] = FileSlice(record.path, record.offset, record.nbytes)
    return found


def _record(checkpoint: Checkpoint, name: str, prefix: str) -> TensorRecord | None:
    for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if candidate in checkpoint.tensors:
            return checkpoint.tensors[candidate]
    return None
