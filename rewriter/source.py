"""A captured language model and its checkpoint, as the pipeline takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.kernels import packing
from forebay.passes.quantise.quantize_cache import quantize_cache
from forebay.passes.quantise.quantize_weights import fuse_dequantize, quantize_weights
from forebay.rewriter.capture.concretise import concretise, few_layers, inline_blocks
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, CheckpointError, TensorRecord
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.graph import META, CacheInput, CapturedModel, RowFormat, WeightInput, copy_node
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.pipeline import BLOCK_PASSES, Source
from forebay.rewriter.report.dump import Dump
from forebay.rewriter.switches import Switches

_META = torch.device("meta")


@no_collection()
def fuse_blocks(captured: CapturedModel, switches: Switches, cache_format: str = "native") -> CapturedModel:
    """`captured` with the block passes run on copies of its graphs; weights that are stored as packed rows are read as
    such, and the KV cache is kept in `cache_format` (native, kv8 or kv4)."""
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
    formats = {name: spec.stored for name, spec in captured.weights.items() if spec.stored is not None}
    captured = replace(captured, step=step)
    if cache_format != "native":
        captured = _with_packed_cache(captured, cache_format, dump)
    return _quantized(captured, formats, dump) if formats else captured


def _with_packed_cache(captured: CapturedModel, cache_format: str, dump: Dump) -> CapturedModel:
    if cache_format not in packing.CACHE_FORMATS:
        raise PlanError(f"cache: there is no format {cache_format!r}; there are native, "
                        f"{', '.join(packing.CACHE_FORMATS)}")
    bits = packing.CACHE_FORMATS[cache_format]
    dims = dict(zip(captured.layers, (spec.head_dim for spec in captured.cache), strict=True))  # block -> head_dim
    widest = max(dims.values())
    for name, gm in (("", captured.step), *captured.blocks().items()):
        dim = dims.get(name, widest)
        dump.before(gm, "quantize_cache")
        quantize_cache(gm, bits, packing.cache_group_size(dim, bits), packing.cache_row_nbytes(dim, bits))
        dump.after(gm, "quantize_cache")
    cache = tuple(replace(spec, head_dim=packing.cache_row_nbytes(spec.head_dim, bits), dtype=torch.uint8,
                          format=cache_format) for spec in captured.cache)
    for node in captured.step.graph.find_nodes(op="placeholder"):
        mark = node.meta.get(META)
        if isinstance(mark, CacheInput):
            value = node.meta["val"]
            node.meta["val"] = value.new_empty((*value.shape[:-1], cache[mark.layer].head_dim))
    return replace(captured, cache=cache)


def _quantized(captured: CapturedModel, formats: Mapping[str, RowFormat], dump: Dump) -> CapturedModel:
    """`captured` reading the weights named in `formats` as packed rows. Layers of one kind whose weights are stored
    otherwise get a block graph of their own."""
    step, layers = captured.step, []
    made: dict[tuple, str] = {}
    for call, weights in zip(step.graph.find_nodes(op="call_module"), captured.layer_weights, strict=True):
        stored = {inner: formats[name] for inner, name in weights.items() if name in formats}
        key = (str(call.target), tuple(sorted(stored.items())))
        if key not in made:
            same = sum(known == key[0] for known, _ in made)
            made[key] = f"{key[0]}_q{same}" if same else key[0]
            step.set_submodule(made[key], _copied(step.get_submodule(key[0])) if same else step.get_submodule(key[0]))  # type: ignore[arg-type]
        call.target = made[key]
        layers.append(made[key])
    # a kind's graph itself is rewritten last: the copies for other formats are made from it
    blocks = [(step.get_submodule(name), dict(stored)) for (_, stored), name in made.items()]
    for gm, named in ((step, dict(formats)), *blocks):
        assert isinstance(gm, fx.GraphModule)
        dump.before(gm, "quantize_weights")
        quantize_weights(gm, named)
        fuse_dequantize(gm)
        dump.after(gm, "quantize_weights")
    return replace(captured, step=step, layers=tuple(layers))


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        env[node] = copy_node(graph, node, env)
    return _LazyGraphModule(gm, graph)  # its Python is written only if somebody calls or prints it


@no_collection()
def model_source(
    captured: CapturedModel, files: Mapping[str, FileSlice], workload: Workload, fingerprint: str, *,
    host_hop: bool = False
) -> Source:
    """The step graphs of `captured` for the batch and context of `workload`."""
    weights = _weight_inputs(captured)

    def step(tokens: int, cached: int | None = None) -> fx.GraphModule:
        return concretise(captured.step, step_inputs(captured, workload, tokens, cached, weights))

    short, likes = few_layers(captured.step)
    few = {node.name for node in short.graph.find_nodes(op="placeholder")}

    def sample(tokens: int) -> tuple[fx.GraphModule, dict[int, int]]:
        inputs = step_inputs(captured, workload, tokens, None, weights)
        return inline_blocks(concretise(short, {name: inputs[name] for name in few & inputs.keys()})), likes

    return Source(fingerprint, step, files, captured.constants, host_hop, sample=sample,
                  prefill=lambda tokens: step(tokens, workload.prompt))


def step_inputs(
    captured: CapturedModel, workload: Workload, tokens: int, cached: int | None = None,
    weights: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Meta tensors for every placeholder of the step graph, by name; the cache holds `cached` tokens per sequence, all
    of the context by default. `weights`, if they were made before, are those of the weights and constants."""
    batch, context = workload.batch, workload.context if cached is None else cached
    inputs = {"input_ids": _meta((batch, tokens)), "start": _meta((batch,)), "last": _meta((batch,))}
    for i, spec in enumerate(captured.cache):
        for side in "kv":
            inputs[f"cache_{side}_{i}"] = _meta((batch, spec.kv_heads, context, spec.head_dim), spec.dtype)
    inputs.update(_weight_inputs(captured) if weights is None else weights)
    return inputs


def _weight_inputs(captured: CapturedModel) -> dict[str, torch.Tensor]:
    """Meta tensors for the weights and constants of the step graph, by the placeholder's name."""
    inputs = {}
    for node in captured.step.graph.find_nodes(op="placeholder"):
        mark = node.meta.get(META)
        if not isinstance(mark, WeightInput):
            continue
        known, value = captured.weights.get(mark.name), captured.constants.get(mark.name)
        if known is not None and known.stored is not None:
            inputs[str(node.target)] = _meta((known.stored.out_features, known.stored.row_nbytes), torch.uint8)
        elif known is not None:
            inputs[str(node.target)] = _meta(known.shape, known.dtype)
        elif value is not None:
            inputs[str(node.target)] = _meta(value.shape, value.dtype)
    return inputs


def _meta(shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def weight_files(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "", rename: Callable[[str], str] = str
) -> dict[str, FileSlice]:
    """Where each weight of the model lies in the checkpoint; CheckpointError names the first that is missing or has
    another shape or dtype. `rename` gives today's name of a checkpoint's name, which may also lack, or have on top,
    the base model's `prefix`; a tied weight goes by any of its names.
    """
    records = _weight_records(captured, checkpoint, prefix, rename)
    return {name: FileSlice(record.path, record.offset, record.nbytes) for name, record in records.items()}


def with_stored_formats(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "", rename: Callable[[str], str] = str
) -> CapturedModel:
    """`captured` knowing which of its weights the checkpoint holds as packed rows."""
    records = _weight_records(captured, checkpoint, prefix, rename)
    weights = {name: replace(spec, stored=_row_format(records[name])) for name, spec in captured.weights.items()}
    return replace(captured, weights=weights)


def _row_format(record: TensorRecord) -> RowFormat | None:
    packed = record.packed
    return None if packed is None else RowFormat(
        packed.format, packed.bits, packed.group_size, packed.scale_dtype, packed.in_features, packed.out_features,
        packed.row_nbytes, packed.dtype, packed.transposed)


def _weight_records(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str, rename: Callable[[str], str]
) -> dict[str, TensorRecord]:
    records = {rename(name): record for name, record in checkpoint.tensors.items()}
    found = {}
    for spec in captured.weights.values():
        names = [n for tied in (spec.name, *spec.ties)
                 for n in (tied, f"{prefix}.{tied}", tied.removeprefix(f"{prefix}."))]
        record = next((records[n] for n in names if n in records), None)
        if record is None:
            raise CheckpointError(f"{checkpoint.folder} holds no tensor for {spec.name} "
                                  f"(it has {len(checkpoint.tensors)} tensors): it is a checkpoint of another model")
        shape, dtype = (record.shape, record.dtype) if record.packed is None else (
            record.packed.shape, record.packed.dtype)
        if tuple(shape) != tuple(spec.shape):
            raise CheckpointError(f"{record.path}: {record.name} has shape {list(shape)}, the model's "
                                  f"{spec.name} has {list(spec.shape)}")
        if dtype != spec.dtype:
            raise CheckpointError(f"{record.path}: {record.name} is {str(dtype)[6:]}, the model computes in "
                                  f"{str(spec.dtype)[6:]}; save the checkpoint in that dtype")
        found[spec.name] = record
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
