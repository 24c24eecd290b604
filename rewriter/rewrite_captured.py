"""The passes that come before there is a plan: they rewrite captured graphs, once per kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.kernels.formats.table import cache_format as format_of
from forebay.passes.quantise.quantize_cache import quantize_cache
from forebay.passes.quantise.quantize_weights import fuse_dequantize, quantize_weights
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.graph import META, CacheInput, CapturedModel, RowFormat, copy_node
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.pipeline import BLOCK_PASSES
from forebay.rewriter.report.dump import Dump
from forebay.rewriter.switches import Switches


@no_collection()
def rewrite_captured(captured: CapturedModel, switches: Switches, cache_format: str = "native") -> CapturedModel:
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
    try:
        found = format_of(cache_format)
    except ValueError as error:
        raise PlanError(f"cache: {error}") from error
    dims = dict(zip(captured.layers, (spec.head_dim for spec in captured.cache), strict=True))  # block -> head_dim
    widest = max(dims.values())
    for name, gm in (("", captured.step), *captured.blocks().items()):
        dim = dims.get(name, widest)
        dump.before(gm, "quantize_cache")
        quantize_cache(gm, found.bits, found.group_of(dim), found.row_nbytes(dim, captured.dtype.itemsize))
        dump.after(gm, "quantize_cache")
    cache = tuple(replace(spec, head_dim=found.row_nbytes(spec.head_dim, spec.dtype.itemsize), dtype=torch.uint8,
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
