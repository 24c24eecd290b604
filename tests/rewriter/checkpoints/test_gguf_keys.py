"""Every metadata key of every architecture changes the logits, or a value other than the one taken is refused."""

from __future__ import annotations

import dataclasses
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from converted_gguf import MODELS, write_converted
from selection import without
from tiny_gguf import CONFIGS, write_model
from transformers import AutoModelForCausalLM

from forebay.rewriter.checkpoints import gguf_keys as keys
from forebay.rewriter.checkpoints.gguf_architectures import ARCHITECTURES
from forebay.rewriter.checkpoints.gguf_config import gguf_model
from forebay.rewriter.checkpoints.gguf_header import GgufHeader, read_gguf
from forebay.rewriter.checkpoints.gguf_keys import HARMLESS, NEUTRAL, SAME_IN_WINDOWS
from forebay.rewriter.checkpoints.gguf_tensors import place_tensors
from forebay.rewriter.checkpoints.records import CheckpointError

IDS = torch.tensor([[3, 40, 50, 60] * 12])  # longer than the window of 32
# Another value of each key than the tiny file's and than the default.
FLIPPED: dict[str, Any] = {
    "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 2, "attention.head_count_kv": 4, keys.RMS: 0.5, keys.LAYER_NORM: 0.5,
    keys.WINDOW: 5, keys.PATTERN: (0, 1), keys.WINDOW_BASE: 500.0, keys.ATTENTION_CAP: 0.01, keys.FINAL_CAP: 0.01,
    keys.WIDTH: 8, keys.VALUE_WIDTH: 8, keys.VOCABULARY: 280, keys.DIMENSIONS: 2, keys.BASE: 100.0,
    keys.SCALING: "yarn", keys.FACTOR: 3.0, keys.OLD_FACTOR: 3.0, keys.ATTENTION_FACTOR: 1.5,
    "rope.dimension_sections": (4, 4, 4, 4), "attention.causal": False, "swin_norm": True,
}
# Pairs: a key that counts only beside another one.
BESIDE = {keys.SCALING: {keys.FACTOR: 4.0}}
UNREAD = {keys.ORIGINAL_CONTEXT, keys.YARN_FAST, keys.YARN_SLOW}  # see `test_gguf_config.py`: of some scalings
# GPT-2 asks for as many heads of keys as of queries, of which 4 are just that.
OTHERS = {("gpt2", "attention.head_count_kv"): 2, ("nemotron", keys.DIMENSIONS): 4, ("gpt2", "context_length"): 512,
          ("mamba", "ssm.dt_b_c_rms"): False, ("olmoe", keys.KV_HEADS): 2, ("glm4moe", "expert_weights_norm"): False,
          ("nemotron_h_moe", "expert_weights_norm"): False}
# Keys that count for nothing: of a rotation or a window that there is not, of sections of positions that are equal, and
# of what the file says by another key, too.
IGNORED = {"granitehybrid": {keys.BASE, keys.FACTOR, keys.OLD_FACTOR, keys.SCALING}, "gpt-oss": {keys.OLD_FACTOR},
           "qwen35": {"rope.dimension_sections", "full_attention_interval"}, "qwen3next": {"full_attention_interval"},
           "qwen35moe": {"rope.dimension_sections", "full_attention_interval"}, "glm4moe": {"rope.dimension_sections"},
           "olmo2": {keys.PATTERN, keys.WINDOW_BASE}, "nemotron_h_moe": {"feed_forward_length"},
           "deepseek2": {keys.WIDTH, keys.VALUE_WIDTH, keys.KV_HEADS, "rope.scaling.yarn_log_multiplier"}}


CASES = without(ARCHITECTURES, ARCHITECTURES.keys() - CONFIGS.keys() - {"deepseek2", "qwen35moe"})


@cache
def tiny(architecture: str) -> tuple[GgufHeader, torch.Tensor]:
    """A tiny file's header and logits."""
    path = Path(FOLDER[0]) / f"{architecture}.gguf"
    if architecture in CONFIGS:
        settings = {keys.PATTERN: 2} if architecture == "gemma3" else {}  # else both layers have a window
        write_model(path, architecture, kinds=("F32",), loadable=True, settings=settings)
    else:
        write_converted(path, next(name for name, (own, _) in MODELS.items() if own == architecture))
    header = read_gguf(path)
    return header, logits(header)


FOLDER: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDER[:] = [str(tmp_path_factory.mktemp("keys"))]


def logits(header: GgufHeader) -> torch.Tensor:
    """What the model of a header says, computed with the weights in its file."""
    described = gguf_model(header)
    weights = {name: tensor.values() for name, tensor in place_tensors(header, described).items()}
    model = AutoModelForCausalLM.from_config(described.config, attn_implementation="eager").eval()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    with torch.no_grad():
        return model(IDS).logits


def with_settings(header: GgufHeader, settings: dict[str, Any]) -> GgufHeader:
    added = {f"{header.architecture}.{key}": value for key, value in settings.items()}
    return dataclasses.replace(header, metadata=header.metadata | added)


def flips(architecture: str) -> list[str]:
    table = ARCHITECTURES[architecture]
    return sorted({*table.fields, *table.reads, *NEUTRAL, *SAME_IN_WINDOWS} - UNREAD - table.unread)


@pytest.mark.parametrize("architecture", CASES)
def test_every_key_is_obeyed_or_refused(architecture: str) -> None:
    header, plain = tiny(architecture)
    ignored = []
    for key in flips(architecture):
        value = OTHERS.get((architecture, key), FLIPPED.get(key, 7.0))
        changed = with_settings(header, {key: value} | BESIDE.get(key, {}))
        try:
            found = logits(changed)
        except CheckpointError as error:
            assert str(error).count("\n") == 0
            continue
        if torch.allclose(found, plain, rtol=1e-3):
            ignored.append(key)
    known = IGNORED.get(architecture, set()) | ({"context_length"} & {*flips(architecture)} - {
        "context_length" if architecture == "gpt2" else ""})
    assert {*ignored} == known, "positions that no rotation asks for"


@pytest.mark.parametrize("architecture", CASES)
def test_defaults_and_neutral_values_change_nothing(architecture: str) -> None:
    header, plain = tiny(architecture)
    table = ARCHITECTURES[architecture]
    told = {key: values[0] for key, values in NEUTRAL.items()
            if values and key not in table.fields and key not in table.reads}
    told |= {key: value for key, value in table.defaults.items() if header.get(key) is None}
    assert torch.equal(logits(with_settings(header, told)), plain)
    harmless = dict.fromkeys(HARMLESS - set(table.fields) - table.reads, 3)
    assert torch.equal(logits(with_settings(header, harmless)), plain)


def test_keys_that_nobody_knows_are_passed_over_with_a_warning() -> None:
    header, plain = tiny("qwen2")
    with pytest.warns(UserWarning, match=r"llama\.cpp reads no qwen2\.attention\.sliding_window, qwen2\.of_tomorrow"):
        assert torch.equal(logits(with_settings(header, {"of_tomorrow": 3, keys.WINDOW: 5})), plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(header)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", keys.RMS])
def test_a_key_that_a_model_cannot_do_without_is_named(key: str) -> None:
    header, _ = tiny("llama")
    metadata = {name: value for name, value in header.metadata.items() if name != f"llama.{key}"}
    with pytest.raises(CheckpointError, match=rf"llama\.{key} is missing; convert the model again"):
        gguf_model(dataclasses.replace(header, metadata=metadata))
    for value in ("many", True, (3, 4)):
        with pytest.raises(CheckpointError, match=rf"llama\.{key} "):
            gguf_model(with_settings(header, {key: value}))


def test_values_for_each_layer_are_one_where_they_agree() -> None:
    header, plain = tiny("llama")
    assert torch.equal(logits(with_settings(header, {"attention.head_count_kv": (2, 2)})), plain)
