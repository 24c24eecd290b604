"""The pass `shard`: what ranks have of each family's layers, that their parts are the whole, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import families
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection import without
from small_experts import small_config
from torch import fx

from forebay.passes.shard.collectives import stretches_of
from forebay.passes.shard.demand import heads_of
from forebay.passes.shard.shard import shard
from forebay.passes.shard.split import ShardError
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.checkpoints.cut_weights import cut_file
from forebay.rewriter.ir.graph import META, CapturedModel, is_collective
from forebay.rewriter.ir.share import Ranges, RankShare, WeightCut, count, even_part, ranges, ranks_of
from forebay.rewriter.pipeline.rewrite_captured import with_blocks
from forebay.rewriter.pipeline.shard_captured import rank_files, shard_captured
from forebay.rewriter.switches import SwitchError, Switches
from forebay.rewriter.verify.graph import check_captured


def sharded(family: str, ranks: int, rank: int) -> CapturedModel:
    return shard_captured(families.captured(family), RankShare((ranks,), rank), Switches())[0]


def collectives(gm: fx.GraphModule) -> list[str]:
    return [str(node.target).split(".")[1] for node in gm.graph.nodes if is_collective(node)]


@pytest.mark.parametrize("family", without(
    families.FAMILIES, ("qwen2", "mistral", "phi3", "opt_projected", "gpt_neox")))
def test_parts_of_all_ranks_are_the_whole(family: str) -> None:
    whole, ranks = families.captured(family), 2
    parts = [shard_captured(whole, RankShare((ranks,), rank), Switches()) for rank in range(ranks)]
    divided = set(parts[0][1])
    assert {name for name in whole.layer_weights[0].values() if len(whole.weights[name].shape) == 2} <= divided
    for name, (source, cut) in parts[0][1].items():
        for (dim, held), (other, theirs) in zip(cut, parts[1][1][name][1], strict=True):
            size = whole.weights[source].shape[dim]
            assert dim == other and ranges((*held, *theirs)) == ((0, size),), name  # each index is somebody's
    for model, _ in parts:
        check_captured(model.step, "shard")
        assert sum(spec.kv_heads for (spec,) in model.states) < sum(spec.kv_heads for (spec,) in whole.states)
        for block in model.blocks().values():  # one sum for attention, one for the feed-forward
            assert collectives(block) in (["all_reduce"] * 2, ["all_reduce"])
        assert collectives(model.step) == ["all_gather_into_tensor"]
    assert all(not collectives(block) for block in whole.blocks().values()), "the captured graphs were changed"


def test_parallel_blocks_add_up_attention_and_feed_forward_at_once() -> None:
    (block,) = sharded("gpt_neox", 2, 0).blocks().values()
    sums = [node for node in block.graph.nodes if is_collective(node)]
    assert [ranks_of(node.args[2]) for node in sums] == [(0, 1)]


def test_tied_heads_read_rows_of_their_own() -> None:
    whole = families.captured("gpt2")
    model, parts = shard_captured(whole, RankShare((2,), 1), Switches())
    name = "transformer.wte.weight"
    assert model.weights[name].shape == whole.weights[name].shape  # every rank looks all tokens up
    assert parts[f"{name}.rows"] == (name, ((0, ((100, 199),)),)) and model.weights[f"{name}.rows"].shape == (99, 64)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 12))
def test_heads_are_shared_out_once(kv_heads: int, each: int, ranks: int) -> None:
    if ranks > kv_heads * each:
        with pytest.raises(ShardError, match="fewer ranks"):
            [heads_of(RankShare((ranks,), rank), (0,), kv_heads * each, kv_heads) for rank in range(ranks)]
        return
    if any(len(even_part(ranks, kv_heads, h)) and count(even_part(ranks, kv_heads, h)) > each for h in range(kv_heads)):
        return  # more ranks for a head than it has queries
    held: list[int] = []
    for rank in range(ranks):
        queries, kv = heads_of(RankShare((ranks,), rank), (0,), kv_heads * each, kv_heads)
        mine = [h for a, b in queries.held for h in range(a, b)]
        held += mine
        assert mine and {h // each for h in mine} == {h for a, b in kv.held for h in range(a, b)}
        assert len(mine) % kv.count == 0  # equal groups, as attention counts heads
    assert sorted(held) == list(range(kv_heads * each))


def test_each_expert_is_on_one_rank_and_what_all_give_is_added_up() -> None:
    whole = capture_model(small_config("qwen3_moe"))
    seen = []
    for rank in range(3):  # of 8 experts
        model, parts = shard_captured(whole, RankShare((3,), rank), Switches())
        check_captured(model.step, "shard")
        tables = {name for name, (source, _) in parts.items() if whole.weights[source].table}
        assert len(tables) == 3
        (((dim, ((first, end),)),),) = {parts[name][1] for name in tables}
        assert dim == 0 and {model.weights[name].shape[0] for name in tables} == {end - first}
        seen += range(first, end)
        for block in model.blocks().values():
            assert collectives(block) == ["all_reduce"] * 2
            (table,) = [n for n in block.graph.find_nodes(op="placeholder") if "table" in n.name]
            assert table.meta[META].among == 8
    assert seen == list(range(8))


def test_experts_are_not_divided_in_two_dimensions_and_there_are_enough() -> None:
    whole = capture_model(small_config("qwen3_moe"))
    with pytest.raises(ShardError, match="experts are given whole hidden states"):
        shard_captured(whole, RankShare((1, 2), 0, 1, "2d"), Switches())
    few = capture_model(small_config("qwen3_moe", num_experts=2, num_local_experts=2))
    with pytest.raises(ShardError, match="2 experts are too few for 3 ranks"):
        shard_captured(few, RankShare((3,), 0), Switches())


def test_latent_attention_has_its_heads_divided_and_its_rows_whole() -> None:
    whole = capture_model(small_config("deepseek_v3", head_dim=8, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16,
                                       qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4))
    for rank in range(2):
        model, parts = shard_captured(whole, RankShare((2,), rank), Switches())
        check_captured(model.step, "shard")
        assert model.states == whole.states
        name = "model.layers.0.self_attn.kv_b_proj.weight"
        size = whole.weights[name].shape[0] // 2
        assert parts[name] == (name, ((0, ((rank * size, (rank + 1) * size),)),))
        for block in model.blocks().values():
            assert set(collectives(block)) == {"all_reduce"}
    with pytest.raises(ShardError, match=r"mean.*part of its operands; take attention=heads, or stages"):
        shard_captured(whole, RankShare((2,), 0, attention="batch"), Switches())


def test_one_rank_has_all_and_more_than_there_are_heads_is_refused() -> None:
    with pytest.raises(ShardError, match="8 ranks cannot share 4 heads"):
        sharded("llama", 8, 7)
    whole = families.captured("llama")
    model, parts = shard_captured(whole, RankShare((1,), 0), Switches())
    assert all(model.weights[name].shape == whole.weights[source].shape for name, (source, _) in parts.items())


def test_graphs_of_a_rank_are_not_divided_again_and_an_unknown_operator_is_named() -> None:
    with pytest.raises(ValueError, match="open the checkpoint"):
        shard_captured(families.rewritten("llama"), RankShare((2,), 0), Switches())
    whole = families.captured("llama")
    step = with_blocks(whole)
    block = step.get_submodule("block_0")
    silu = next(n for n in block.graph.nodes if n.target is torch.ops.aten.silu.default)
    with block.graph.inserting_after(silu):
        odd = block.graph.call_function(torch.ops.aten.flip.default, (silu, [-1]))
    odd.meta = dict(silu.meta)
    silu.replace_all_uses_with(odd, lambda user: user is not odd)
    with pytest.raises(ShardError, match=r"flip.*not known to work on a part"):
        shard(step, RankShare((2,), 0), {})


def elements(shape: tuple[int, ...], cut: WeightCut) -> torch.Tensor:
    """1 where a rank has an element of a weight, 0 elsewhere."""
    held = torch.ones(shape)
    for dim, pieces in cut:
        mask = torch.zeros(shape[dim])
        for first, end in pieces:
            mask[first:end] = 1
        held *= mask.reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return held


@pytest.mark.parametrize("family", without(families.FAMILIES, ("opt_projected", "qwen2", "mistral")))
def test_two_dimensions_have_every_element_of_a_matrix_once(family: str) -> None:
    """Heads of keys and values that ranks share are theirs together."""
    whole = families.captured(family)
    seen = {name: torch.zeros(spec.shape) for name, spec in whole.weights.items()}
    for rank in range(4):
        model, parts = shard_captured(whole, RankShare((2, 2), rank, 1, "2d"), Switches())
        check_captured(model.step, "shard")
        for name, (source, cut) in parts.items():
            held = elements(whole.weights[source].shape, cut)
            own = {dim: count(pieces) for dim, pieces in cut}
            assert model.weights[name].shape == tuple(own.get(dim, size) for dim, size in enumerate(held.shape))
            seen[source] += held
    for names in whole.layer_weights:
        for name in names.values():
            if seen[name].dim() == 2:
                shared = "k_proj" in name or "v_proj" in name or "qkv" in name
                assert set(seen[name].unique().tolist()) <= ({1.0, 2.0} if shared else {1.0}), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", without(families.FAMILIES, ("qwen2", "mistral", "phi3", "opt_projected", "gpt2")))
@pytest.mark.parametrize("share", [RankShare((4,), 0, attention="batch"), RankShare((2, 2), 0, 1, "2d", "batch")])
def test_attention_over_the_batch_has_every_row_once_and_all_heads(family: str, share: RankShare) -> None:
    """In one dimension ranks have different rows of what attention reads; in two, peers have them together."""
    whole = families.captured(family)
    seen = {name: torch.zeros(spec.shape) for name, spec in whole.weights.items()}
    for each in share.all:
        model, parts = shard_captured(whole, each, Switches())
        check_captured(model.step, "shard")
        assert [(spec.kv_heads, spec.parts) for (spec,) in model.states] == [
            (spec.kv_heads, 4) for (spec,) in whole.states]
        for block in model.blocks().values():
            assert collectives(block).count("all_to_all_single") == 2
        for source, cut in parts.values():
            held = elements(whole.weights[source].shape, cut)
            seen[source] += held
    for names in whole.layer_weights:
        for name in names.values():
            if seen[name].dim() == 2:
                assert (seen[name] == 1).all(), name


def test_weights_that_ranks_have_unequal_parts_of_are_not_gathered() -> None:
    """Of 64 features 9 ranks have 7 or 8 each."""
    with pytest.raises(ShardError, match="64 cannot be divided evenly"):
        shard_captured(families.captured("llama"), RankShare((3, 3), 0, 1, "2d", "batch", (0, 1)), Switches())


@pytest.mark.parametrize(("wanted", "part", "stretches"), [
    (((10, 18),), ((12, 14),), 1), (((10, 18),), ((11, 12), (15, 16)), 2), (((0, 4), (10, 14)), ((1, 2), (11, 12)), 2),
    (((10, 18),), ((10, 12),), 0), (((10, 18),), ((11, 12), (16, 17)), 0), (((10, 18),), ((11, 12),), 0),
    (((0, 4), (10, 14)), ((3, 5),), 0)])
def test_gathered_parts_are_equal_parts_of_equal_stretches(wanted: Ranges, part: Ranges, stretches: int) -> None:
    """As of gate and up in one matrix, of each of which the second of four ranks has the second part."""
    assert stretches_of(wanted, part, 4, 1) == stretches


def test_what_attention_shares_with_others_is_not_computed_for_some_sequences_alone() -> None:
    step = with_blocks(families.captured("opt"))
    block = step.get_submodule("block_0")
    query = next(n for n in block.graph.nodes if n.op == "call_function" and "q_proj" in str(n.args))
    with block.graph.inserting_after(query):
        also = block.graph.call_function(torch.ops.aten.relu.default, (query,))
    also.meta = dict(query.meta)
    with pytest.raises(ShardError, match="read by attention and by relu"):
        shard(step, RankShare((2,), 0, attention="batch"), {})


def test_packed_groups_are_not_cut() -> None:
    packed = families.packed(families.captured("llama"))
    model, parts = shard_captured(packed, RankShare((2,), 0), Switches())
    down = next(name for name in parts if "down_proj" in name)
    assert model.weights[down].stored.in_features == 64 and model.weights[down].shape == (64, 64)  # of 96: whole groups
    small = replace(packed, weights={name: replace(spec, stored=None if spec.stored is None else replace(
        spec.stored, group_size=64)) for name, spec in packed.weights.items()})
    _, parts = shard_captured(small, RankShare((2,), 0), Switches())
    with pytest.raises(ValueError, match=r"o_proj.*cut a group of 64"):
        rank_files(small, parts, {name: _slice(spec.nbytes) for name, spec in small.weights.items()})


def test_packed_groups_of_16_are_cut_in_pairs_as_products_take_them() -> None:
    """Of 96 features 64 and 32, not 48 each; three heads of 16 on a rank are refused before anything runs."""
    packed = families.packed(families.captured("llama"))
    small = replace(packed, weights={name: replace(spec, stored=None if spec.stored is None else replace(
        spec.stored, group_size=16, row_nbytes=spec.stored.packing(spec.stored.in_features).row_nbytes))
        for name, spec in packed.weights.items()})
    model, parts = shard_captured(small, RankShare((2,), 1), Switches())
    down = next(name for name in parts if "down_proj" in name)
    assert model.weights[down].stored.in_features == 32
    o_proj = next(name for name in parts if "o_proj" in name)
    spec = small.weights[o_proj]
    with pytest.raises(ValueError, match=r"o_proj.*48 of 64 columns.*in pairs"):
        cut_file(spec, ((1, ((0, 48),)),), _slice(spec.nbytes))


def _slice(nbytes: int):  # type: ignore[no-untyped-def]
    from forebay.rewriter.ir.program import FileSlice

    return FileSlice("weights", 0, nbytes)


def test_it_cannot_be_left_out() -> None:
    with pytest.raises(SwitchError, match="shard"):
        from forebay.rewriter.pipeline.pass_list import PASSES
        from forebay.rewriter.pipeline.run_passes import check_switches

        check_switches(PASSES, replace(Switches(), skip=("shard",)))
