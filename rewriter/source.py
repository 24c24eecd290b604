"""A captured language model and its checkpoint, as the pipeline takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.rewriter.checkpoint import Checkpoint, CheckpointError
from forebay.rewriter.concretise import concretise, few_layers, inline_blocks
from forebay.rewriter.dump import Dump
from forebay.rewriter.graph import META, CacheInput, CapturedModel, WeightInput
from forebay.rewriter.pipeline import BLOCK_PASSES, Source
from forebay.rewriter.plan import Workload
from forebay.rewriter.program import FileSlice
from forebay.rewriter.switches import Switches


def fuse_blocks(captured: CapturedModel, switches: Switches) -> CapturedModel:
    """`captured` with the block passes run on copies of its graphs."""
    step = _copied(captured.step)
    for name, block in captured.blocks().items():
        step.set_submodule(name, _copied(block))
    dump = Dump(switches.dump, "captured")
    for run_pass, _ in BLOCK_PASSES:
        if run_pass.__name__ in switches.skip:
            continue
        for gm in (step, *(step.get_submodule(name) for name in dict.fromkeys(captured.layers))):
            assert isinstance(gm, fx.GraphModule)
            dump.before(gm, run_pass.__name__)
            run_pass(gm)
            dump.after(gm, run_pass.__name__)
    return replace(captured, step=step)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return _LazyGraphModule(gm, graph)  # its Python is written only if somebody calls or prints it


def model_source(
    captured: CapturedModel, files: Mapping[str, FileSlice], workload: Workload, fingerprint: str, *,
    host_hop: bool = False
) -> Source:
    """The step graphs of `captured` for the batch and context of `workload`."""

    def step(tokens: int) -> fx.GraphModule:
        return concretise(captured.step, step_inputs(captured, workload, tokens))

    short, likes = few_layers(captured.step)

    def sample(tokens: int) -> tuple[fx.GraphModule, dict[int, int]]:
        return inline_blocks(concretise(short, step_inputs(replace(captured, step=short), workload, tokens))), likes

    return Source(fingerprint, step, files, captured.constants, host_hop, sample=sample)


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


def weight_files(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "", rename: Callable[[str], str] = str
) -> dict[str, FileSlice]:
    """Where each weight of the model lies in the checkpoint; CheckpointError names the first that is missing or has
    another shape or dtype. `rename` gives today's name of a checkpoint's name, which may also lack, or have on top,
    the base model's `prefix`; a tied weight goes by any of its names.
    """
    records = {rename(name): record for name, record in checkpoint.tensors.items()}
    found = {}
    for spec in captured.weights.values():
        names = [n for tied in (spec.name, *spec.ties)
                 for n in (tied, f"{prefix}.{tied}", tied.removeprefix(f"{prefix}."))]
        record = next((records[n] for n in names if n in records), None)
        if record is None:
            raise CheckpointError(f"{checkpoint.folder} holds no tensor for {spec.name} "
                                  f"(it has {len(checkpoint.tensors)} tensors): it is a checkpoint of another model")
        if tuple(record.shape) != tuple(spec.shape):
            raise CheckpointError(f"{record.path}: {record.name} has shape {list(record.shape)}, the model's "
                                  f"{spec.name} has {list(spec.shape)}")
        if record.dtype != spec.dtype:
            raise CheckpointError(f"{record.path}: {record.name} is {str(record.dtype)[6:]}, the model computes in "
                                  f"{str(spec.dtype)[6:]}; save the checkpoint in that dtype")
        found[spec.name] = FileSlice(record.path, record.offset, record.nbytes)
    return found


def checkpoint_names(config: Any) -> tuple[str, Callable[[str], str]]:
    """For a transformers config: the prefix that checkpoint names may lack, and the renaming of old checkpoint names
    that transformers itself applies when it loads them."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # older releases rename nothing in these families
        return kind.base_model_prefix, str
    found = get_checkpoint_conversion_mapping(kind.__name__) or get_checkpoint_conversion_mapping(config.model_type)
    renames = [step for step in found or () if isinstance(step, WeightRenaming)]
    return kind.base_model_prefix, (lambda name: rename_source_key(name, renames, [])[0]) if renames else str
