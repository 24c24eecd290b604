"""Models planned from a config as if they were packed: bytes are those of the folders that `quantize_model` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES
from selection import without

from forebay.open_model import open_model
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.checkpoints.config import meta_model
from forebay.rewriter.checkpoints.packed_config import pack_config
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.predict.model_shapes import capture_config
from forebay.rewriter.predict.preset_models import EXPERT_CONFIGS


def mixtral() -> transformers.MixtralConfig:
    return transformers.MixtralConfig(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64)


@pytest.mark.covering(1)
@pytest.mark.parametrize("format", ["w4g32", "w8g32"])
@pytest.mark.parametrize("config", [mixtral, FAMILIES["llama"], FAMILIES["gpt2"]])
def test_weights_are_as_quantize_writes_them(tmp_path: Path, config, format: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()
    model.save_pretrained(tmp_path / "whole")
    quantize_model(tmp_path / "whole", tmp_path / "packed", Wish(format))
    written = open_model(tmp_path / "packed")[0].weights
    planned = pack_config(capture_model(config(), dtype=torch.float32), meta_model(config()), format).weights
    assert any(spec.stored for spec in planned.values())
    assert {name: spec.stored for name, spec in planned.items()} == {n: s.stored for n, s in written.items()}
    assert {name: spec.nbytes for name, spec in planned.items()} == {n: s.nbytes for n, s in written.items()}


def test_rows_that_no_kernel_reads_are_refused() -> None:
    config = mixtral()
    with pytest.raises(CheckpointError, match=r"no kernel reads such rows of .*name w4g32 or w8g32"):
        pack_config(capture_model(config), meta_model(config), "w4g8")


BILLIONS = {
    "qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9, "mixtral-8x7b": 46.7, "gpt-oss-120b": 116.8, "qwen3-235b-a22b": 235.1,
    "qwen3-next-80b-a3b": 79.7, "glm-4.5-air": 103.5, "llama-4-scout": 107.8, "minimax-m2": 228.7, "deepseek-v3": 671.0,
    "mixtral-8x22b": 140.6, "deepseek-v2": 235.7, "kimi-k2": 1026.4}


@pytest.mark.parametrize(("name", "billions"), without(
    BILLIONS.items(), [each for each in BILLIONS.items() if each[0] != "mixtral-8x7b"]))
def test_presets_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    captured = capture_config(EXPERT_CONFIGS[name])
    assert captured.weight_nbytes / 2e9 == pytest.approx(billions, rel=0.004)
