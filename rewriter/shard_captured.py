"""The graphs of a captured model for one rank of several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from forebay.passes.shard.shard import ROWS, Cuts, shard
from forebay.rewriter.checkpoints.cut_weights import cut_file, cut_spec
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.share import RankShare, WeightCut
from forebay.rewriter.pipeline import PASSES
from forebay.rewriter.rewrite_captured import with_blocks
from forebay.rewriter.run_passes import Stage
from forebay.rewriter.switches import Switches

# weights of a rank, each with the model's weight that it is a part of, and which
WeightParts = dict[str, tuple[str, WeightCut]]


@no_collection()
def shard_captured(captured: CapturedModel, share: RankShare, switches: Switches) -> tuple[CapturedModel, WeightParts]:
    """`captured`, on whose graphs no pass has run, as rank `share.rank` computes it, and the parts that its weights
    are. ShardError names what cannot be divided so; ValueError for graphs that were rewritten."""
    if captured.rewritten:
        raise ValueError("the graphs of a bundle are those of one device: open the checkpoint that it was made of")
    step = with_blocks(captured)
    stage = Stage(step, replace(switches, bisect=False), "sharded", {})  # a rank alone computes nothing to compare
    stage.run(next(each for each in PASSES if each.run is shard), lambda _: (share, _units(captured)))
    parts = _parts(captured, step.meta.pop("cuts"))
    weights = dict(captured.weights)
    for name, (source, cut) in parts.items():
        weights[name] = cut_spec(captured.weights[source], cut, name)
    shapes = {node.name: node.meta["val"].shape for node in step.graph.find_nodes(op="placeholder")}
    cache = tuple(replace(spec, kv_heads=shapes[f"cache_k_{i}"][1]) for i, spec in enumerate(captured.cache))
    return replace(captured, step=step, weights=weights, cache=cache, choices=None), parts


def rank_files(captured: CapturedModel, parts: WeightParts, files: Mapping[str, FileSlice]) -> dict[str, FileSlice]:
    """Where a rank's weights lie in the files of the whole model, `captured`."""
    cut = {name: cut_file(captured.weights[source], how, files[source]) for name, (source, how) in parts.items()}
    return {**files, **cut}


def _units(captured: CapturedModel) -> dict[str, int]:
    """Input features that share a scale, of weights stored in groups, by their names within a layer."""
    found: dict[str, int] = {}
    for names in captured.layer_weights:
        for inner, name in names.items():
            stored = captured.weights[name].stored
            if stored is not None:
                found[inner] = math.lcm(found.get(inner, 1), stored.group_size)
    return found


def _parts(captured: CapturedModel, made: Mapping[str, Cuts]) -> WeightParts:
    found: WeightParts = {}
    for layer, names in zip(captured.layers, captured.layer_weights, strict=True):
        found |= {names[inner]: (names[inner], cut) for inner, cut in made[layer].weights.items()}
    for name, cut in made[""].weights.items():
        found.setdefault(name, (name.removesuffix(ROWS) if name not in captured.weights else name, cut))
    return found
