"""Checkpoints put into captured graphs: refused before anything is changed, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import gpt2, llama, llama4, opt
from multimodal import CONFIGS
from selection import at_length
from small_experts import small_config
from transformers import CONFIG_MAPPING, BloomConfig, Gemma3TextConfig

from forebay.kernels.cache.kv_append_q.operator import KV_APPEND_Q
from forebay.passes.checkpoint.checkpoint_kv import follows_positions
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.cache_layout import block_nbytes, checkpoint_tokens
from forebay.rewriter.ir.graph import META, CapturedModel
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.state import CheckpointState, KVState, StateInput
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches


def captured(config: Any, cache_format: str = "native") -> CapturedModel:
    return rewrite_captured(capture_model(config, dtype=torch.float32), Switches(), cache_format)


def gemma3() -> Gemma3TextConfig:
    """Its norms add 1 to their weights, that of keys behind the first product of the layer."""
    return Gemma3TextConfig(vocab_size=199, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
                            intermediate_size=96, num_key_value_heads=2, sliding_window=6, max_position_embeddings=128)


def bloom() -> BloomConfig:
    return BloomConfig(vocab_size=199, hidden_size=64, n_layer=2, n_head=4)


@pytest.mark.parametrize("make", [opt, at_length(gpt2), at_length(lambda: llama(2)), gemma3])
def test_weights_are_read_as_often_as_before(make: Any) -> None:
    """New tokens and checkpoints share a product, so a weight that streams is brought once."""
    plain = captured(make())
    assert plain.choices is not None
    kept = plain.choices.checkpointed("native")
    for name, block in plain.blocks().items():
        other = kept.blocks()[name]
        for node in block.graph.find_nodes(op="placeholder"):
            again = next(n for n in other.graph.nodes if n.name == node.name)
            if not isinstance(node.meta.get(META), StateInput) and node.name.endswith("_weight"):
                assert len(again.users) == len(node.users), node.name
    assert all(len(states) == 2 for states in kept.states) and all(len(states) == 1 for states in plain.states)


def test_tokens_that_see_each_other() -> None:
    """Where they end is an input of blocks with the sizes of a mask, not those of a cache."""
    config = CONFIG_MAPPING["paligemma"](**CONFIGS["paligemma"])
    plain = rewrite_captured(capture_model(config, dtype=torch.float32, embeds=True), Switches(), "native")
    assert plain.choices is not None
    for block in plain.choices.checkpointed("native").blocks().values():
        ends, hidden = (next(n for n in block.graph.nodes if n.name == name) for name in ("attention_mask", "hidden"))
        assert ends.meta["val"].shape[::3] == hidden.meta["val"].shape[:2]


def test_queries_that_are_scaled_by_their_positions() -> None:
    """The scales [B, 1, S, 1] of Beam have a token's size where a cache has its own."""
    plain = captured(small_config("beam", num_hidden_layers=1, layer_types=["full_attention"], sliding_window=6,
                                  mlp_layer_types=["dense"]))
    assert plain.choices is not None
    for block in plain.choices.checkpointed("native").blocks().values():
        scales, hidden = (next(n for n in block.graph.nodes if n.name == name)
                          for name in ("attention_scaling", "hidden"))
        assert scales.meta["val"].shape[::2] == hidden.meta["val"].shape[:2]


def test_the_plain_graphs_stay_as_they_are() -> None:
    plain = captured(opt())
    before = str(plain.step.graph), [str(block.graph) for block in plain.blocks().values()]
    assert plain.choices is not None
    assert plain.choices.checkpointed("native") is plain.choices.checkpointed("native")
    assert before == (str(plain.step.graph), [str(block.graph) for block in plain.blocks().values()])


def test_packed_keys_and_values_are_made_again() -> None:
    """Restored rows are packed by the same operator as new ones; the plain graphs stay as they are."""
    packed = captured(opt(), "kv8")
    before = str(packed.step.graph)
    assert packed.choices is not None
    for block in packed.choices.checkpointed("native").blocks().values():
        appends = block.graph.find_nodes(op="call_function", target=KV_APPEND_Q.overload)
        assert len(appends) == 2 and appends[0].args[5:] == appends[1].args[5:]
        assert [node.args[4].meta["val"].dim() for node in appends] == [2, 1]
    assert str(packed.step.graph) == before


@pytest.mark.parametrize("make", [bloom, llama4])
def test_layers_that_count_positions_themselves_are_refused(make: Any) -> None:
    """Keys of ALiBi hold positions, those of Llama 4 are turned by tables made in the layer: of new tokens alone."""
    made = captured(make()).choices
    assert made is not None
    with pytest.raises(PlanError, match="K and V follow from the positions of a call's tokens"):
        made.checkpointed("native")


def test_a_format_that_is_none_is_refused() -> None:
    made = captured(opt()).choices
    assert made is not None
    with pytest.raises(PlanError, match=r"checkpoint_format: no checkpoint format 'act4'; there are native, act8"):
        made.checkpointed("act4")


def test_what_follows_positions() -> None:
    step = captured(llama(2)).step
    call = step.graph.find_nodes(op="call_module")[0]
    follows = [follows_positions(arg) for arg in call.args[:3]]
    assert follows == [False, True, True]  # the hidden state, and the two tables


def test_blocks_are_a_little_larger_where_that_makes_room_for_twice_the_tokens() -> None:
    """16 tokens of fp16 K and V, 32 heads of 128: 262 144 bytes, of 32 checkpoints as they are, of 60 in 8 bits; 17/16
    of these bytes have room for 64."""
    def blocks(*kept: CheckpointState) -> tuple[int, int]:
        made = SimpleNamespace(states=((KVState(32, 128, torch.float16), *kept),))
        return block_nbytes(made.states[0], 16), checkpoint_tokens(made.states, 16) if kept else 0  # type: ignore[arg-type]

    assert blocks() == (262_144, 0)
    assert blocks(CheckpointState(4096, torch.float16)) == (262_144, 32)
    assert blocks(CheckpointState(4352, torch.uint8)) == (278_528, 64)
