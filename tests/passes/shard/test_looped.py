"""Products in pieces whose sums are exchanged one beside the product of the next, or whose inputs are gathered so: what
is cut, and in which order."""

from __future__ import annotations

import math
from dataclasses import replace

import families
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection import without
from torch import fx
from torch.fx.node import map_aggregate

from forebay.passes.place.shorten_lifetimes import shorten_lifetimes
from forebay.passes.shard.looped import PIECE, InChunks, piece_name, portion, whole_name
from forebay.passes.shard.split import ShardError
from forebay.rewriter.ir.graph import CapturedModel, is_collective, weight_name
from forebay.rewriter.ir.share import RankShare, count, ranges
from forebay.rewriter.pipeline.shard_captured import WeightParts, shard_captured
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.graph import check_captured

LINE, GRID = RankShare((2,), 0, chunks=(4, 2)), RankShare((2, 2), 0, 1, "2d", chunks=(2, 2))
GATHERING = RankShare((2, 2), 0, 1, "2d", gather_chunks=(4, 2))


def sharded(family: str, share: RankShare) -> tuple[CapturedModel, WeightParts]:
    return shard_captured(families.captured(family), share, Switches())


def products_and_exchanges(gm: fx.GraphModule) -> list[str]:
    """Pieces by their names, and exchanges, in order; other products left out."""
    found = []
    for node in gm.graph.nodes:
        pieces = [name for n in node.all_input_nodes if PIECE in (name := weight_name(n) or "")]
        if node.op == "call_function":
            found += [str(node.target).split(".")[1]] if is_collective(node) else [
                name.split(".")[-3] + name[-1] for name in pieces if not name.split(PIECE)[0].endswith("bias")]
    return found


def test_a_chunk_is_exchanged_before_the_next_is_multiplied() -> None:
    """In steps over several tokens in four chunks; over one the same pieces in two."""
    model, parts = sharded("llama", LINE)
    assert model.prefill is not None and model.prefill.weights == model.weights
    (prefill,), (decode,) = (each.blocks().values() for each in (model.prefill, model))
    once = "all_reduce"
    assert products_and_exchanges(prefill) == [
        *(x for i in range(4) for x in (f"o_proj{i}", once)), *(x for i in range(4) for x in (f"down_proj{i}", once))]
    assert products_and_exchanges(decode) == [
        "o_proj0", "o_proj1", once, "o_proj2", "o_proj3", once,
        "down_proj0", "down_proj1", once, "down_proj2", "down_proj3", once]
    assert {n for name in parts if PIECE in name for n in [whole_name(name)]}.isdisjoint(model.weights)


def test_of_parallel_blocks_both_products_of_a_chunk_are_added_up_at_once() -> None:
    model, _ = sharded("gpt_neox", replace(LINE, chunks=(2, 2)))
    (block,) = model.blocks().values()
    assert products_and_exchanges(block) == [
        "dense_4h_to_h0", "dense0", "all_reduce", "dense_4h_to_h1", "dense1", "all_reduce"]
    assert model.prefill is None


def test_inputs_in_chunks_are_on_their_way_before_the_first_is_multiplied() -> None:
    """And each product comes before what puts together the next one's input, which waits for it."""
    model, _ = sharded("llama", GATHERING)
    assert model.prefill is not None and model.prefill.weights == model.weights
    (prefill,), (decode,) = (each.blocks().values() for each in (model.prefill, model))
    first, sums, gather = ["all_reduce", "reduce_scatter_tensor"], "all_reduce", "all_gather_into_tensor"
    for block, exchanges in ((prefill, 4), (decode, 2)):
        assert products_and_exchanges(block) == [
            x for name in ("o_proj", "down_proj") for x in (
                *first, *[gather] * exchanges, *(f"{name}{i}" for i in range(4)), sums)]
    aten = torch.ops.aten
    waits = [i for i, node in enumerate(prefill.graph.nodes) if node.target is aten.cat.default and any(
        n.target is aten.slice.Tensor and n.args[0].target is aten.select.int for n in node.all_input_nodes)]
    products = [i for i, node in enumerate(prefill.graph.nodes)
                if any(PIECE in (weight_name(n) or "") for n in node.all_input_nodes)]
    assert len(waits) == 8 and sorted((*waits, *products)) == [i for both in zip(waits, products, strict=True)
                                                               for i in both]


def test_of_parallel_blocks_both_inputs_of_a_chunk_are_gathered_at_once() -> None:
    model, _ = sharded("gpt_neox", replace(GATHERING, chunks=(2, 1), gather_chunks=(2, 2)))
    block, = (model.prefill or model).blocks().values()
    assert products_and_exchanges(block)[-7:] == [
        "all_gather_into_tensor", "all_gather_into_tensor", "dense_4h_to_h0", "dense0", "dense_4h_to_h1", "dense1",
        "all_reduce"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", without(families.FAMILIES, ("qwen3", "llama4", "phi3", "mistral", "gemma2")))
@pytest.mark.parametrize("share", [LINE, GRID, replace(GRID, attention="batch", chunks=(3, 1)), GATHERING,
                                   replace(GRID, attention="batch", gather_chunks=(3, 1))])
def test_pieces_have_every_element_of_a_rank_once(family: str, share: RankShare) -> None:
    for each in share.all:
        whole, _ = sharded(family, replace(each, chunks=(1, 1), gather_chunks=(1, 1)))
        model, parts = sharded(family, each)
        for graphs in (model, model.prefill or model):
            check_captured(graphs.step, "shard")
        sizes = dict.fromkeys(whole.weights, 0)
        for name, spec in model.weights.items():
            sizes[whole_name(name)] += math.prod(spec.shape)
        assert sizes == {name: math.prod(spec.shape) for name, spec in whole.weights.items()}
        pieces: dict[str, list] = {}
        for name, (source, cut) in parts.items():
            assert source == whole_name(name).removesuffix(".rows")
            if PIECE in name:
                pieces.setdefault(source, []).append(dict(cut))
        assert pieces
        for cuts in pieces.values():
            assert len(cuts) in (share.pieces, share.gather_pieces)
            along = [dim for dim in cuts[0] if len({cut[dim] for cut in cuts}) > 1]
            assert len(along) == 1, "pieces differ in one dimension"
            held = [piece for cut in cuts for piece in cut[along[0]]]
            assert sum(b - a for a, b in held) == count(ranges(held)), "and no index is in two"


def test_more_chunks_than_features_and_a_weight_of_two_products_are_refused() -> None:
    with pytest.raises(ShardError, match="do not fall into 128 pieces; take fewer chunks"):
        sharded("llama", replace(LINE, chunks=(128, 1)))
    with pytest.raises(ShardError, match="do not fall into 64 pieces; take fewer gather_chunks"):
        sharded("llama", replace(GATHERING, gather_chunks=(64, 1)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 4))
def test_portions_are_all_indices_in_order(sizes: list[int], parts: int, unit: int) -> None:
    at, held = 0, []
    for size in sizes:
        held.append((at + 1, at + 1 + size))
        at += size + 2
    found = [portion(tuple(held), parts, i, unit) for i in range(parts)]
    assert [i for part in found for a, b in part for i in range(a, b)] == [i for a, b in held for i in range(a, b)]
    assert max(map(count, found)) - min(map(count, found)) < 2 * unit
    assert all(count(part) % unit == 0 for part in found[:-1])


def test_names_of_pieces_are_told_from_others() -> None:
    assert whole_name(piece_name("layers.0.weight", 12)) == "layers.0.weight"
    assert whole_name("odd.pieces.weight") == "odd.pieces.weight" and whole_name("odd.piece") == "odd.piece"
    assert [list(turn) for turn in InChunks(4, 2).turns] == [[0, 1], [2, 3]]


def test_exchanges_keep_their_order_where_lifetimes_are_shortened() -> None:
    """Though what the second takes weighs more, which is why it would come first: ranks have unequal parts."""
    aten, graph = torch.ops.aten, fx.Graph()
    hidden = graph.placeholder("hidden")
    hidden.meta["val"] = torch.empty(4, 64, device="meta")

    def made(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        values = map_aggregate(args, lambda a: a.meta["val"] if isinstance(a, fx.Node) else a)  # type: ignore[arg-type]
        node.meta["val"] = values[0].clone() if is_collective(node) else target(*values)  # type: ignore[operator, index]
        return node

    small, large = made(aten.slice.Tensor, hidden, 1, 0, 8), made(aten.cat.default, [hidden, hidden, hidden], 1)
    own = [made(aten.clone.default, each) for each in (small, large)]
    wide = made(aten.cat.default, [hidden, hidden, hidden], 1)
    sums = [made(torch.ops._c10d_functional.all_reduce.default, each, "sum", "ranks:0,1") for each in own]
    means = [made(aten.mean.dim, each, [1], True) for each in (sums[1], wide)]
    graph.output(made(aten.cat.default, [sums[0], *means], 1))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    shorten_lifetimes(gm)
    assert [node for node in gm.graph.nodes if is_collective(node)] == sums
    order = list(gm.graph.nodes)
    assert order.index(wide) > order.index(sums[1]), "what is no exchange was moved"
