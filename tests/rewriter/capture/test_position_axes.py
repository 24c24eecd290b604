"""Tables of positions on three axes are chosen, not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from forebay.exported.graph_data import graph_to_data
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.position_axes import choose_axes

SIZES: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128)
GLM = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5,  # as checkpoints say
                                mrope_section=[8, 12, 12]))
ROTARY: dict[str, type[torch.nn.Module]] = {
    "qwen3_5_text": Qwen3_5TextRotaryEmbedding, "qwen3_vl_text": Qwen3VLTextRotaryEmbedding,
    "glm4v_text": Glm4vTextRotaryEmbedding}


@pytest.mark.parametrize("kind", ROTARY)
def test_tables_are_those_of_transformers(kind: str) -> None:
    """Bit for bit, for axes that differ; a class of another order stays as it is."""
    rotary = ROTARY[kind](CONFIG_MAPPING[kind](**GLM if kind == "glm4v_text" else {}))
    positions = torch.randint(0, 500, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    expected = rotary(torch.zeros(1), positions)
    choose_axes(rotary)
    assert ("recomposition_frequencies" in vars(rotary)) is kind.startswith("qwen3")
    for found, want in zip(rotary(torch.zeros(1), positions), expected, strict=True):
        assert torch.equal(found, want)


def test_a_graph_has_the_form_of_a_file() -> None:
    captured = capture_model(CONFIG_MAPPING["qwen3_5_text"](
        **SIZES, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16))
    assert graph_to_data(captured.step, "the model outside its layers")
