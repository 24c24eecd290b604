"""Rewrite the graphs of a model into those of one rank, which computes a part of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from forebay.passes.shard.cuts import Cuts
from forebay.passes.shard.demand import Demand, keeps_state, product_of
from forebay.passes.shard.divided import Divided
from forebay.passes.shard.gathered import GatheredStep
from forebay.passes.shard.looped import InChunks, piece_name
from forebay.passes.shard.sequences import SequenceParallelRegion
from forebay.passes.shard.split import ShardError, Split, shape_of
from forebay.rewriter.ir.graph import META, WeightInput, block_graphs, weight_name
from forebay.rewriter.ir.share import RankShare, ranges
from forebay.rewriter.ir.state import StateInput


def shard(gm: fx.GraphModule, share: RankShare, units: Mapping[str, int], stored: Mapping[Any, Cuts] | None = None,
          chunks: tuple[int, int] = (1, 1)) -> None:
    """Make a captured step graph, and the blocks that it calls, those of one rank: weights, heads and caches are parts,
    and collectives add up what ranks have of a layer's sums; hidden states are whole on every rank, or divided along
    the wide axis. `units`: of weights stored in groups, by name, how many input features belong together. What was cut
    stands in `gm.meta["cuts"]`, by block ("": the step). Where that is given as `stored`, it is a prefill's step that
    gathers weights. `chunks`: in how many parts sums of products are exchanged, and inputs gathered. ShardError
    names what cannot be divided so, and what would do.
    """
    layer = share if stored is None else share.prefilling
    found: dict[Any, Cuts] = {}
    blocks: dict[Any, fx.GraphModule] = dict(block_graphs(gm))
    given = {name: block.graph.find_nodes(op="placeholder") for name, block in blocks.items()}
    for name, block in blocks.items():
        grouped = {n: units[weight_name(n)] for n in block.graph.find_nodes(op="placeholder")  # type: ignore[index]
                   if weight_name(n) in units}
        apart = SequenceParallelRegion(block if layer.sharers > 1 else None)
        plain = layer.attention == "heads" and not layer.wide and stored is None and any(map(
            keeps_state, block.graph.nodes))
        for recurrences in (True, False) if plain else (False,):
            try:
                wants = {}
                for each in layer.all if recurrences or layer.attention != "heads" else layer.peers:
                    demand = Demand(each, recurrences)
                    demand.of_layer(block, grouped, apart.entering)
                    wants[each.rank] = demand.wanted
                found[name] = Divided(block, layer, wants, None, True, apart, None if stored is None else stored[name],
                                      InChunks(share.pieces, chunks[0]), InChunks(share.gather_pieces, chunks[1]),
                                      grouped).run()
                break
            except ShardError:  # each rank has all of the recurrences then
                if not recurrences:
                    raise
    head = _head(gm)
    wanted = {} if head is None else {head: _head_rows(head, share)}
    divided = GatheredStep(gm, share, wanted, head) if stored is not None else (
        Divided(gm, share, {each.rank: wanted for each in share.peers}, head, False, SequenceParallelRegion()))
    for call in gm.graph.find_nodes(op="call_module"):
        for outer, inner in zip(call.args, given[call.target], strict=True):
            _note(divided.cuts, outer, inner, found[call.target])
    found[""] = divided.run()
    gm.meta["cuts"] = found


def _note(cuts: Cuts, outer: fx.Node, inner: fx.Node, found: Cuts) -> None:
    """Note of a step's placeholder, which a layer is given as `inner`, what the layer has of it."""
    mark, name = outer.meta.get(META), weight_name(inner)
    if isinstance(mark, StateInput) and inner.name in found.heads:
        cuts.heads[outer.name] = found.heads[inner.name]
    elif isinstance(mark, WeightInput) and name in found.in_pieces:
        cuts.in_pieces[mark.name] = found.in_pieces[name]
        for i in range(found.in_pieces[name]):
            cuts.weights[piece_name(mark.name, i)] = found.weights[piece_name(name, i)]
    elif isinstance(mark, WeightInput) and name in found.weights:
        cuts.weights[mark.name] = found.weights[name]


def _head(gm: fx.GraphModule) -> fx.Node | None:
    """The product that gives logits: the last one of the step, behind all layers."""
    after = False
    found = None
    for node in gm.graph.nodes:
        after |= node.op == "call_module"
        if after and product_of(node) is not None and not product_of(node)[3]:  # type: ignore[index]
            found = node
    return found


def _head_rows(head: fx.Node, share: RankShare) -> Split:
    """Rows of the head, as many on each rank but perhaps the last ones."""
    size, parts = shape_of(head)[-1], share.beside
    each = -(-size // parts)
    if 2 * (size - (parts - 1) * each) < each:
        raise ShardError(f"{head.name}: of a vocabulary of {size} the last of {parts} ranks would have less than half "
                         "of what each of the others has; take fewer ranks")
    at = share.index(share.axes) * each
    return Split(len(shape_of(head)) - 1, ranges([(at, min(at + each, size))]), size, share.axes)
