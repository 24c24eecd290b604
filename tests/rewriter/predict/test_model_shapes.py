"""Model shapes: closed forms and captured graphs give the same bytes and operations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import at_length

from forebay.rewriter.partition.layouts import BlockWidths
from forebay.rewriter.predict.model_shapes import (
    ATTENTION,
    MLP,
    PRESET_MODELS,
    LayerShape,
    ModelError,
    ModelShape,
    capture_config,
    load_model_shape,
    shape_from_config,
    shape_from_graphs,
)

TINY: dict[str, dict[str, Any]] = {
    "opt": {"hidden_size": 64, "num_hidden_layers": 3, "ffn_dim": 256, "num_attention_heads": 4,
            "word_embed_proj_dim": 64, "vocab_size": 128, "max_position_embeddings": 64},
    "llama": {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 160, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 128},
    "qwen2": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 160, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True},
    "qwen3": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 160, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 32},
}


def captured(kind: str, dtype: torch.dtype = torch.float16, **values: Any) -> ModelShape:
    from transformers import CONFIG_MAPPING

    from forebay.rewriter.capture.language_model import capture_model

    return shape_from_graphs(capture_model(CONFIG_MAPPING[kind](**values), dtype=dtype, runs=False))


@pytest.mark.parametrize("kind", TINY)
def test_graphs_agree_with_closed_forms(kind: str) -> None:
    graphs = captured(kind, **TINY[kind])
    numbers = shape_from_config({"model_type": kind, "dtype": "float16", **TINY[kind]})
    assert graphs.weight_nbytes == numbers.weight_nbytes
    assert graphs.head_elements == numbers.head_elements
    assert len(graphs.layers) == len(numbers.layers) == 1
    ours, theirs = graphs.layers[0], numbers.layers[0]
    for stage in (ATTENTION, MLP):
        assert ours.elements(stage) == theirs.elements(stage)
        assert ours.flops(stage) == theirs.flops(stage)
    for field in ("count", "hidden", "heads", "kv_heads", "head_dim", "window", "kv_elements"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert theirs.activation_elements <= ours.activation_elements <= 2 * theirs.activation_elements


def test_windows_make_kinds_of_layers() -> None:
    shape = captured("gemma3_text", hidden_size=64, num_hidden_layers=7, intermediate_size=160, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=128, head_dim=16, sliding_window=32)
    assert [(k.count, k.window) for k in shape.layers] == [(6, 32), (1, 0)]
    assert shape.kv_nbytes(100) == 2 * 64 * (6 * 32 + 100)


def test_experts_cost_what_one_token_uses() -> None:
    shape = captured("mixtral", torch.bfloat16, hidden_size=64, num_hidden_layers=2, intermediate_size=160,
                     num_attention_heads=4, num_key_value_heads=2, vocab_size=128, num_local_experts=4,
                     num_experts_per_tok=2)
    layer = shape.layers[0]
    assert layer.elements(MLP) == 4 * 3 * 64 * 160 + 4 * 64 + 64  # four experts, the router, a norm
    assert layer.mlp_flops == 2 * (2 * 3 * 64 * 160 + 4 * 64)  # two of them


def test_latents_are_one_row_a_token() -> None:
    shape = captured("deepseek_v3", torch.bfloat16, hidden_size=64, num_hidden_layers=2, intermediate_size=96,
                     moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
                     num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16,
                     q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, vocab_size=128)
    products = 64 * 24 + 24 * 4 * 24 + 64 * 24 + 16 * 4 * 32 + 64 * 4 * 16
    assert shape.kv_nbytes(100) == 2 * 2 * 100 * (16 + 8)
    assert {(kind.latent, kind.made) for kind in shape.layers} == {(16, 16 + 16)}
    dense, experts = shape.layers
    for kind in shape.layers:
        assert sum(n * k for n, k in kind.matrices(ATTENTION)) == products == kind.flops(ATTENTION) / 2
        widths = BlockWidths.of(kind)
        assert widths.query == (products // 64 - 24) // 2
        assert widths.elements == pytest.approx(kind.elements(ATTENTION) + kind.elements(MLP), rel=0.02)
    routed = 8 * 3 * 64 * 32
    one = experts.elements(ATTENTION) + experts.elements(MLP) - routed
    for rows in (1, 3, 10):  # whatever token picks what, shared experts are read once
        assert experts.read_elements(rows) == pytest.approx(one + routed * (1 - (1 - 2 / 8) ** rows))
    assert experts.read_elements(1e6) == experts.elements(ATTENTION) + experts.elements(MLP)
    assert dense.read_elements(1) == dense.elements(ATTENTION) + dense.elements(MLP)


@pytest.mark.all
def test_a_layer_may_attend_twice_and_pick_experts_that_have_no_weights() -> None:
    """LongCat: of 11 choices 8 have weights, so a token reads 8/11 of its picks."""
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    shape = captured("longcat_flash", torch.bfloat16, hidden_size=64, num_hidden_layers=2, ffn_hidden_size=96,
                     expert_ffn_hidden_size=32, moe_topk=3, zero_expert_num=3, n_routed_experts=8, head_dim=8,
                     num_attention_heads=4, num_key_value_heads=4, vocab_size=128, **sizes)
    (layer,) = shape.layers
    products = 64 * 24 + 24 * 4 * 24 + 64 * 24 + 16 * 4 * 32 + 64 * 4 * 16
    assert sum(n * k for n, k in layer.matrices(ATTENTION)) == 2 * products == layer.flops(ATTENTION) / 2
    assert shape.kv_nbytes(100) == 2 * 2 * 100 * (16 + 8) and (layer.latent, layer.made) == (16, 16 + 16)
    once = replace(layer, attentions=1)
    assert layer.attended_flops(3, 4, 5, 9) == 2 * once.attended_flops(3, 4, 5, 9)
    expert, dense = 3 * 64 * 32, 2 * 3 * 64 * 96
    assert layer.flops(MLP) == 2 * dense + round(2 * 3 * 8 / 11 * expert)
    rest = layer.elements(ATTENTION) + layer.elements(MLP) - 8 * expert
    assert layer.read_elements(2) == pytest.approx(rest + 8 * expert * (1 - (1 - 3 / 11) ** 2))
    assert BlockWidths.of(layer).mixture


DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
             num_key_value_heads=2, head_dim=16)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_d_conv=4, mamba_expand=2,
             num_key_value_heads=2, head_dim=16)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


@pytest.mark.parametrize(("kind", "sizes", "recurrent"), [
    ("qwen3_next", DELTA | EXPERTS | dict(shared_expert_intermediate_size=32,
                                          layer_types=["linear_attention", "full_attention", "linear_attention"]),
     2 * (3 * (2 * 2 * 16 + 4 * 16) * 2 + 4 * 16 * 16 * 4)),
    at_length("granitemoehybrid", MAMBA | EXPERTS | dict(shared_intermediate_size=64,
                                                         layer_types=["mamba", "attention", "mamba"]),
              2 * (3 * (8 * 16 + 2 * 2 * 16) * 2 + 8 * 16 * 16 * 4)),
    at_length("falcon_h1", MAMBA | dict(mamba_d_ssm=128), 3 * (3 * (8 * 16 + 2 * 2 * 16) * 2 + 8 * 16 * 16 * 4)),
    ("mamba2", dict(state_size=16, num_heads=8, n_groups=2, head_dim=16), 3 * (3 * (8 * 16 + 2 * 2 * 16) * 2
                                                                               + 8 * 16 * 16 * 4))])
def test_states_of_one_size_are_counted_by_sequence(kind: str, sizes: dict[str, Any], recurrent: int) -> None:
    """The last inputs of a convolution, and a recurrence's numbers in fp32; K and V of the layers that attend."""
    shape = captured(kind, torch.bfloat16, **dict(
        hidden_size=64, num_hidden_layers=3, intermediate_size=96, num_attention_heads=4, vocab_size=128) | sizes)
    attending = {"falcon_h1": 3, "mamba2": 0}.get(kind, 1)
    assert shape.state_nbytes == recurrent and shape.kv_nbytes(100) == attending * 100 * 2 * 2 * 16 * 2
    recurring = [layer for layer in shape.layers if layer.state_nbytes]
    assert sum(layer.count for layer in recurring) == (2 if attending == 1 else 3)
    for layer in recurring:
        numbers = 4 * 16 * 16 if kind == "qwen3_next" else 8 * 16 * 16
        channels = (2 * 2 * 16 + 4 * 16) if kind == "qwen3_next" else 8 * 16 + 2 * 2 * 16
        assert layer.state_flops == (7 if kind == "qwen3_next" else 5) * numbers + 2 * 4 * channels
        widths = BlockWidths.of(layer)
        assert widths.elements == pytest.approx(layer.elements(ATTENTION) + layer.elements(MLP), rel=0.05)
        if kind != "falcon_h1":  # nothing attends
            assert layer.attended_flops(3, 1, 5, 9) == 0 == layer.kv_elements


def test_chunks_of_tokens_are_kept_like_windows() -> None:
    shape = captured("llama4_text", hidden_size=64, num_hidden_layers=2, intermediate_size=32, intermediate_size_mlp=64,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128, num_local_experts=4,
                     attention_chunk_size=32, layer_types=["chunked_attention", "full_attention"])
    assert [kind.window for kind in shape.layers] == [32, 0]
    assert shape.kv_nbytes(100) == 2 * 2 * 2 * 16 * (32 + 100)


@pytest.mark.parametrize(("queries", "tokens"), [(1, 100), (5, 9), (100, 100), (30, 100)])
def test_attention_to_latents_is_the_cheaper_of_two_ways(queries: int, tokens: int) -> None:
    """Each query and token counted by itself."""
    layer = LayerShape(1, (), (), 0, 0, 64, 4, 1, 16 + 8, 0, 0, 16, 6 + 10)  # keys of 6 + 8 numbers, values of 10
    pairs = sum(tokens - queries + 1 + query for query in range(queries))
    absorbed, expanded = 2 * pairs * (24 + 24), 2 * pairs * (14 + 10) + 2 * tokens * 16 * (6 + 10)
    assert layer.attended_flops(3, 2, queries, tokens) == 3 * 2 * min(absorbed, expanded)


def test_published_sizes() -> None:
    billions = {"opt-6.7b": 6.66, "opt-30b": 29.97, "opt-175b": 174.6, "llama-2-7b": 6.74, "llama-3-8b": 8.03,
                "codellama-34b": 33.74, "llama-3.1-405b": 405.9, "qwen2.5-7b": 7.62, "qwen3-8b": 8.19}
    for name, wanted in billions.items():
        assert PRESET_MODELS[name].weight_nbytes / 2e9 == pytest.approx(wanted, rel=0.003), name


def test_opt_layer_is_the_papers_closed_form() -> None:
    layer = PRESET_MODELS["opt-175b"].layers[0]
    h1, h2 = 12288, 49152
    assert layer.attention_flops + layer.mlp_flops == 8 * h1 * h1 + 4 * h1 * h2
    assert 2 * (layer.elements(ATTENTION) + layer.elements(MLP)) == pytest.approx(8 * h1 * h1 + 4 * h1 * h2, rel=1e-3)
    assert 2 * layer.kv_elements == 4 * h1


def test_loading(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **TINY["llama"]}))
    assert load_model_shape(str(folder)).name == "mine"
    assert load_model_shape("facebook/OPT-30B") is PRESET_MODELS["opt-30b"]


@pytest.mark.parametrize(("change", "says"), [
    ({"hidden_size": 0}, "config.hidden_size"), ({"num_hidden_layers": "many"}, "config.num_hidden_layers"),
    ({"num_attention_heads": 5}, "does not divide"), ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"model_type": "no-such"}, "model_type"), ({"model_type": None}, "model_type"),
    ({"dtype": "int3"}, "config.dtype"), ({"head_dim": "x"}, "config.head_dim"), ({"head_dim": []}, "config.head_dim"),
    ({"head_dim": float("inf")}, "config.head_dim"),
])
def test_bad_configs_are_refused_by_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        shape_from_config({"model_type": "llama", **TINY["llama"], **change})


@pytest.mark.parametrize(("change", "field"), [
    ({"num_hidden_layers": 10**6}, "num_hidden_layers"), ({"vocab_size": 1 << 40}, "vocab_size"),
    ({"rope": {"d_model": 1e300}}, "d_model"),
])
def test_sizes_that_nothing_bears_out_are_refused_before_anything_is_built(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError, match=rf"config.{field}: .* than any"):
        capture_config({"model_type": "llama", **TINY["llama"], **change})


@pytest.mark.parametrize(("change", "says"), [
    ({"num_attention_heads": 0}, "config of a llama: a number of its sizes or heads is 0"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "a number of heads that divides q's 4, got 3")])
def test_what_cannot_be_computed_is_told_of_the_config(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        capture_config({"model_type": "llama", **TINY["llama"], **change})


def test_unknown_model_lists_presets(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="opt-30b"):
        load_model_shape("opt-31b")
    bad = tmp_path / "c.json"
    bad.write_text("[]")
    with pytest.raises(ModelError, match="expected an object"):
        load_model_shape(str(bad))
