"""Read the blocks of a staged KV cache to which a step's query gives the most weight, and not the others.

Steps over prompts keep means of keys; steps over one token choose blocks by them, and attend among these alone:

    prompts                                        one token
    kv_append ─▶ cache_k, cache_v                  q, means ── choose_blocks ─▶ places, rows of blocks
    cache_k ── mean_keys ─▶ means                  kv_append, attention, mean_keys at `places` of the cache

Lowering makes the rows those of the copy that brings the layer's cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from forebay.kernels.formats.key_means import KEYS_OF_MEAN
from forebay.kernels.operators import ATTENTION, CHOOSE_BLOCKS, KV_APPEND, MEAN_KEYS, of_target
from forebay.rewriter.ir.cache_layout import BEGUN
from forebay.rewriter.ir.graph import META, block_graphs
from forebay.rewriter.ir.state import KEY_MEANS_TENSOR, KeyMeansState, StateInput, state_name
from forebay.rewriter.ir.symbolic_values import symbolic_value

aten = torch.ops.aten


class CannotChoose(ValueError):
    """A model whose cache cannot be read by blocks that steps choose; the message says why."""


def choose_cache_blocks(step: fx.GraphModule, share: float, block_tokens: int) -> None:
    """Let the layers of a captured step graph keep means of keys, in blocks of so many tokens, and with a `share` below
    1, as steps over one token have it, attend among that share of the blocks. CannotChoose, before anything is changed,
    where a layer does not append plain keys and values to a cache of its own and attend to all of it, once."""
    if block_tokens % KEYS_OF_MEAN:
        raise CannotChoose(f"blocks of {block_tokens} tokens hold no whole means of {KEYS_OF_MEAN} keys")
    calls = step.graph.find_nodes(op="call_module")
    found = {name: _operators(name, block) for name, block in block_graphs(step).items()}
    if not found or not calls:
        raise CannotChoose("the model has no layers that are captured by themselves")
    for name, (append, attend) in found.items():
        _rewrite_block(block_graphs(step)[name], append, attend, share, block_tokens)
    start = next(n for n in step.graph.find_nodes(op="placeholder") if n.target == "start")
    keys = {n.meta[META].layer: n for n in step.graph.find_nodes(op="placeholder")
            if isinstance(n.meta.get(META), StateInput) and n.meta[META].tensor == "k"}
    first = next(n for n in step.graph.nodes if n.op != "placeholder")
    with step.graph.inserting_before(first):
        begun = _input(step.graph, BEGUN, start.meta["val"]) if share < 1 else None
        means = {layer: _means(step.graph, state_name(KEY_MEANS_TENSOR, layer), cache, StateInput(
            layer, KEY_MEANS_TENSOR, KeyMeansState.kind)) for layer, cache in keys.items()}
    for call in calls:
        call.args = (*call.args, means[call.meta["layer"]], *([] if begun is None else [begun]))


def _operators(name: str, block: fx.GraphModule) -> tuple[fx.Node, fx.Node]:
    """The operators of a block that append and attend."""
    touching = [node for node in block.graph.nodes if (operator := of_target(node.target)) and operator.caches]
    kinds = [of_target(node.target) for node in touching]
    if kinds != [KV_APPEND, ATTENTION]:
        raise CannotChoose(f"{name} does not append to one native cache of keys and values and attend to it once")
    append, attend = touching
    if attend.args[5] or ATTENTION.argument(attend.args, "until") is not None:
        raise CannotChoose(f"{name} attends to a part of the cache already")
    if attend.args[0].meta["val"].shape[3] % KEYS_OF_MEAN:  # type: ignore[union-attr]
        raise CannotChoose(f"heads of {name} are no multiple of {KEYS_OF_MEAN} wide")
    return append, attend


def _rewrite_block(block: fx.GraphModule, append: fx.Node, attend: fx.Node, share: float, block_tokens: int) -> None:
    graph = block.graph
    cache, _, k, _, start = append.args
    assert isinstance(cache, fx.Node) and isinstance(k, fx.Node) and isinstance(start, fx.Node)
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        means = _means(graph, state_name(KEY_MEANS_TENSOR), cache, cache.meta.get(META))
        begun = _input(graph, BEGUN, start.meta["val"]) if share < 1 else None
    place = start
    if begun is not None:
        q, scale = attend.args[0], attend.args[4]
        with graph.inserting_before(attend):
            chosen = _call(graph, CHOOSE_BLOCKS.overload, q, means, start, begun, scale, share, block_tokens)
            count = _call(graph, aten.sym_size.int, start, 0)
            place = _call(graph, aten.slice.Tensor, chosen, 0, 0, count)
        attend.prepend(append)
        append.replace_input_with(start, place)
        attend.replace_input_with(start, place)
    with graph.inserting_after(append):
        tokens = _call(graph, aten.sym_size.int, k, 2)
    with graph.inserting_before(attend):
        _call(graph, MEAN_KEYS.overload, cache, means, place, start, tokens, block_tokens)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    node.meta |= {"val": symbolic_value(target, values, {}), "made_by": choose_cache_blocks.__name__}
    return node


def _input(graph: fx.Graph, name: str, value: torch.Tensor, mark: object = None) -> fx.Node:
    node = graph.create_node("placeholder", name, name=name)
    node.meta |= {"val": value, "made_by": choose_cache_blocks.__name__} | ({} if mark is None else {META: mark})
    return node


def _means(graph: fx.Graph, name: str, cache: fx.Node, mark: object) -> fx.Node:
    """A placeholder for the means of the keys of a cache."""
    value = cache.meta["val"]
    shape = (*value.shape[:-1], value.shape[-1] // KEYS_OF_MEAN)
    return _input(graph, name, value.new_empty(shape), mark)
