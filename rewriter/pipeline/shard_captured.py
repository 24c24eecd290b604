"""The graphs of a captured model for one rank of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from forebay.passes.shard.cuts import Cuts
from forebay.passes.shard.looped import piece_name, whole_name
from forebay.passes.shard.rank_inputs import ROWS
from forebay.passes.shard.shard import shard
from forebay.passes.shard.split import ShardError
from forebay.passes.shard.take_stage import take_stage
from forebay.rewriter.checkpoints.cut_weights import cut_file, cut_spec
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.graph import CapturedModel, weight_name
from forebay.rewriter.ir.indexers import least_chosen
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.share import RankShare, WeightCut
from forebay.rewriter.ir.state import (
    ConvolutionState,
    KVState,
    LatentState,
    LentKVState,
    RecurrentState,
    StateSpec,
    kv_states,
    state_name,
)
from forebay.rewriter.pipeline.pass_list import PASSES
from forebay.rewriter.pipeline.rewrite_captured import seeing_all, with_blocks
from forebay.rewriter.pipeline.run_passes import Stage
from forebay.rewriter.switches import Switches

LEAST_FEATURES = 32  # of which products of packed rows take whole numbers
# weights of a rank, each with the model's weight that it is a part of, and which
WeightParts = dict[str, tuple[str, WeightCut]]


@no_collection()
def shard_captured(captured: CapturedModel, share: RankShare, switches: Switches) -> tuple[CapturedModel, WeightParts]:
    """`captured`, on whose graphs no pass has run, as rank `share.rank` computes it: the layers of its stage, and of
    their weights its parts, which are given too. ShardError names what cannot be divided so, graphs that were rewritten
    too."""
    if captured.rewritten:
        raise ShardError("the graphs of a bundle are those of one device: open the checkpoint that it was made of")
    if any(isinstance(spec, LentKVState) for states in captured.states for spec in states):
        raise ShardError("several layers read the keys and values of one, which ranks do not share")
    if captured.model_type == "gemma3n_text":
        raise ShardError("its layers pass on several predictions of the hidden state (AltUp), which ranks "
                         "do not divide")
    if share.stages > 1:
        captured = _staged(captured, share, switches)
    if share.beside == 1:
        return replace(captured, choices=None), {}
    several, one = zip(share.chunks, share.gather_chunks, strict=True)
    if chosen := least_chosen(captured.step):  # no rank's part of an indexer is known
        captured = replace(seeing_all(captured, switches), max_positions=min(captured.max_positions or chosen, chosen))
    step, cuts = _sharded(captured, share, switches, "sharded", None, one)
    names = tuple(_in_pieces(layer, own) for layer, own in zip(
        (cuts[layer] for layer in captured.layers), captured.layer_weights, strict=True))
    parts = _parts(captured, names, cuts)
    apart = {source for name, (source, _) in parts.items() if name == piece_name(source, 0)}
    weights = {name: spec for name, spec in captured.weights.items() if name not in apart}
    for name, (source, cut) in parts.items():
        weights[name] = cut_spec(captured.weights[source], cut, name)
    shapes = {node.name: node.meta["val"].shape for node in step.graph.find_nodes(op="placeholder")}
    if share.sharers > 1 or any(spec.grows and not isinstance(spec, KVState | LatentState)
                                for states in captured.states for spec in states):
        kv_states(captured.states, "mesh")
    states = tuple(tuple(_of_rank(spec, shapes[state_name(spec.tensors[0].name, i)][1:], share) for spec in states)
                   for i, states in enumerate(captured.states))
    found = replace(captured, step=step, layer_weights=names, weights=weights, states=states, choices=None)
    if share.gathered or several != one:
        prefill, _ = _sharded(captured, share, switches, "sharded_prefill", cuts if share.gathered else None, several)
        found = replace(found, prefill=replace(found, step=prefill))
    return found, parts


def _of_rank(spec: StateSpec, sizes: Sequence[int], share: RankShare) -> StateSpec:
    """A layer's state of which a rank has such a part."""
    if isinstance(spec, KVState):
        return replace(spec, kv_heads=sizes[0], parts=share.sharers)
    if isinstance(spec, ConvolutionState):
        return replace(spec, channels=sizes[1])
    return replace(spec, sizes=tuple(sizes)) if isinstance(spec, RecurrentState) else spec


def _sharded(
    captured: CapturedModel, share: RankShare, switches: Switches, name: str, stored: Mapping[str, Cuts] | None,
    chunks: tuple[int, int]
) -> tuple[fx.GraphModule, dict[str, Cuts]]:
    """The step graph of a rank, and what was cut."""
    step = with_blocks(captured)
    stage = Stage(step, replace(switches, bisect=False), name, {})  # a rank alone computes nothing to compare
    given = share, _units(captured, share), stored, chunks
    stage.run(next(each for each in PASSES if each.run is shard), lambda _: given)
    return step, step.meta.pop("cuts")


def _in_pieces(made: Cuts, names: Mapping[str, str]) -> dict[str, str]:
    """A layer's names of weights, those of pieces in the place of what a rank has in pieces."""
    found: dict[str, str] = {}
    for inner, name in names.items():
        pieces = {piece_name(inner, i): piece_name(name, i) for i in range(made.in_pieces.get(inner, 0))}
        found |= pieces or {inner: name}
    return found


def _staged(captured: CapturedModel, share: RankShare, switches: Switches) -> CapturedModel:
    """The layers of a stage, and the weights and constants that they read, or that stand before or behind them."""
    step = with_blocks(captured)
    begins = stage_begins(captured, share.stages)
    stage = Stage(step, replace(switches, bisect=False), "staged", {})
    stage.run(next(each for each in PASSES if each.run is take_stage), lambda _: (share, begins))
    read = {weight_name(node) for node in step.graph.find_nodes(op="placeholder")}
    own = slice(*begins[share.stage : share.stage + 2])
    return replace(
        captured, step=step, layers=captured.layers[own], layer_weights=captured.layer_weights[own],
        states=captured.states[own], moves_back=captured.rewindable,
        weights={name: w for name, w in captured.weights.items() if name in read},
        constants={name: c for name, c in captured.constants.items() if name in read})


def stage_begins(captured: CapturedModel, stages: int) -> tuple[int, ...]:
    """The first layer of each stage, and behind the last: so that the most that a stage reads of weights in a step is
    least, and then each takes what it can. What stands behind the layers is the last one's; before them stand tables,
    of which a step reads a few rows. ShardError where there are too few layers."""
    sizes = [sum(captured.weights[name].nbytes for name in set(names.values())) for names in captured.layer_weights]
    if len(sizes) < stages:
        raise ShardError(f"{stages} stages need as many layers, and the model has {len(sizes)}; take fewer stages")
    sizes[-1] += sum(captured.weights[name].nbytes for name in _read_behind(captured.step) if name in captured.weights)
    return cut_evenly(sizes, stages)


def cut_evenly(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the starts of so many runs of neighbors, none empty, whose largest is as small as possible."""
    limits = sorted({sum(sizes[first:end]) for first in range(len(sizes)) for end in range(first + 1, len(sizes) + 1)})
    return next(begins for limit in limits if (begins := _filled(sizes, stages, limit)) is not None)


def _filled(sizes: Sequence[int], stages: int, limit: int) -> tuple[int, ...] | None:
    """Return the starts of stages that each take at most `limit` of these sizes, the first ones as many as they can;
    None where that does not hold all."""
    begins = [0]
    for left in range(stages - 1, 0, -1):
        end = begins[-1] + 1
        while end < len(sizes) - left and sum(sizes[begins[-1] : end + 1]) <= limit:
            end += 1
        begins.append(end)
    begins.append(len(sizes))
    return tuple(begins) if all(sum(sizes[a:b]) <= limit for a, b in pairwise(begins)) else None


def _read_behind(step: fx.GraphModule) -> set[str]:
    """The weights that are read behind the first layer, by others than layers."""
    nodes = list(step.graph.nodes)
    first = next(i for i, node in enumerate(nodes) if node.op == "call_module")
    return {name for node in nodes[first:] if node.op == "call_function" for operand in node.all_input_nodes
            if (name := weight_name(operand)) is not None}


def rank_files(captured: CapturedModel, parts: WeightParts, files: Mapping[str, FileSlice]) -> dict[str, FileSlice]:
    """Return the places of a rank's weights in the files of the whole model, `captured`."""
    cut = {name: cut_file(captured.weights[source], how, files[source]) for name, (source, how) in parts.items()}
    return {**files, **cut}


def _units(captured: CapturedModel, share: RankShare) -> dict[str, int]:
    """Input features that share a scale, of weights stored in groups, by their names within a layer, and products take
    at once."""
    found: dict[str, int] = {}
    least = 1 if share.wide else LEAST_FEATURES  # along the wide axis ranks put theirs together
    for names in captured.layer_weights:
        for inner, name in names.items():
            stored = captured.weights[name].stored
            if stored is not None:
                found[inner] = math.lcm(found.get(inner, 1), stored.group_size, least)
    return found


def _parts(captured: CapturedModel, names: Sequence[Mapping[str, str]], made: Mapping[str, Cuts]) -> WeightParts:
    found: WeightParts = {}
    for layer, own in zip(captured.layers, names, strict=True):
        found |= {own[inner]: (whole_name(own[inner]), cut) for inner, cut in made[layer].weights.items()}
    for name, cut in made[""].weights.items():
        found.setdefault(name, (name.removesuffix(ROWS) if name not in captured.weights else name, cut))
    return found
