"""What a GGUF file says of rotary embeddings and of attention's scale is what its model computes with."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gguf import write_model
from transformers import AutoConfig, AutoModelForCausalLM

from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.gguf_config import read_gguf_config
from forebay.rewriter.checkpoints.gguf_header import read_gguf
from forebay.rewriter.checkpoints.gguf_repack import open_gguf
from forebay.rewriter.checkpoints.records import CheckpointError


def config_of(folder: Path, architecture: str, **options: Any) -> Any:
    """What is written beside the weights of a converted file, the same whichever way it is converted."""
    write_model(folder / "m.gguf", architecture, **options)
    config = AutoConfig.from_pretrained(convert_gguf(folder / "m.gguf", folder / "out"))
    assert open_gguf(folder / "m.gguf").model.config.rope_parameters == config.rope_parameters
    return config


def frequencies(config: Any) -> torch.Tensor:
    """Of the rotation of each pair of channels, in radians a position."""
    return AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq


def test_base_and_share_are_the_files(tmp_path: Path) -> None:
    for architecture, base, dims in (("starcoder2", 999999.4, 16), ("stablelm", 20000.0, 8), ("llama", 500000.0, 16)):
        folder = tmp_path / architecture
        folder.mkdir()
        config = config_of(folder, architecture,
                           settings={"rope.freq_base": base, "rope.dimension_count": dims})
        found, wanted = frequencies(config), np.float32(base) ** -(np.arange(0, dims, 2) / dims)
        assert found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_scales_queries_by_its_heads(tmp_path: Path, architecture: str) -> None:
    config = config_of(tmp_path, architecture, settings={"rope.freq_base": 70000.0})
    assert config.query_pre_attn_scalar == config.head_dim == 32, "transformers has 256"
    main = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert main["rope_theta"] == 70000.0
    assert architecture == "gemma2" or config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0


def llama3(factor: float, base: float, dims: int = 16) -> np.ndarray:
    """Divisors as llama.cpp's converter writes them, pair by pair."""
    made = []
    for i in range(0, dims, 2):
        wavelength = 2 * math.pi * base ** (i / dims)
        if wavelength < 8192 / 4:
            made.append(1.0)
        elif wavelength > 8192:
            made.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            made.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(made, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3_are_divided(tmp_path: Path, factor: float) -> None:
    divisors = llama3(factor, 500000.0)
    assert {1.0, factor} < {*divisors.tolist()}
    config = config_of(tmp_path, "llama", settings={"rope.freq_base": 500000.0},
                       factors={"rope_freqs.weight": divisors})
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    assert np.allclose(frequencies(config), plain / divisors, rtol=1e-5)


@pytest.mark.parametrize(("settings", "factor"), [
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4), ({"rope.scaling.factor": 4.0}, 4),
    ({"rope.scale_linear": 4.0}, 4), ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1), ({"rope.scaling.factor": 0.0}, 1),
    ({"rope.scaling.type": "yarn"}, 1),
])
@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_linear_scaling(tmp_path: Path, architecture: str, settings: dict[str, Any], factor: float) -> None:
    write_model(tmp_path / "m.gguf", architecture, settings=settings)
    config = read_gguf_config(read_gguf(tmp_path / "m.gguf"))
    cos, _ = AutoModelForCausalLM.from_config(config).model.rotary_emb(torch.zeros(1), torch.arange(100)[None])
    angles = np.outer(np.arange(100), 10000.0 ** -(np.arange(0, 16, 2) / 16) / factor)
    assert np.allclose(cos[0, :, :8], np.cos(angles), atol=1e-4)


@pytest.mark.parametrize(("fast", "slow"), [(None, None), (8.0, 0.5)])
def test_yarn_divides_low_frequencies(tmp_path: Path, fast: float | None, slow: float | None) -> None:
    told = {} if fast is None else {"rope.scaling.yarn_beta_fast": fast, "rope.scaling.yarn_beta_slow": slow}
    config = config_of(tmp_path, "llama", settings={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                                    "rope.scaling.original_context_length": 64} | told)
    bounds = [8 * math.log(64 / (turns * 2 * math.pi)) / math.log(10000) for turns in (fast or 32, slow or 1)]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), 15)
    divided = np.clip((np.arange(8) - low) / (high - low), 0, 1)
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    assert np.allclose(frequencies(config), plain * (1 - divided) + plain / 4 * divided, rtol=1e-5)


@pytest.mark.parametrize("scale", [None, 1.25])
def test_factors_of_short_and_long_contexts(tmp_path: Path, scale: float | None) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(1, 9, 8, dtype=np.float32)
    told = {} if scale is None else {"rope.scaling.attn_factor": scale}
    config = config_of(tmp_path, "phi3", settings={"rope.scaling.original_context_length": 64} | told,
                       factors={"rope_factors_short.weight": short, "rope_factors_long.weight": long})
    assert config.original_max_position_embeddings == config.rope_parameters["original_max_position_embeddings"] == 64
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    for count, factors in ((64, short), (65, long)):
        cos, _ = rotary(torch.zeros(1), torch.arange(count)[None])
        angles = np.outer(np.arange(count), 10000.0 ** -(np.arange(0, 16, 2) / 16) / factors)
        assert np.allclose(cos[0, :, :8], np.cos(angles) * (scale or 1), atol=1e-4), "llama.cpp scales as it is told"


@pytest.mark.parametrize(("options", "message"), [
    (dict(settings={"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}),
     r"rope.scaling.type 'longrope' with factor 4.0 scales"),
    (dict(settings={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.0}),
     r"yarn_ext_factor is 0.0, and this release computes with -1 or 1 only"),
    (dict(factors={"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}), r"rope_freqs.weight \(F32\) scales"),
    (dict(factors={"rope_freqs.weight": np.ones(8, np.float16) * 2}), r"rope_freqs.weight has type F16, not F32"),
    (dict(factors={"rope_factors_long.weight": np.ones(8, np.float32)}), r"rope_factors_long.weight \(F32\) scales"),
    (dict(factors={"rope_freqs.weight": np.ones(4, np.float32)}), r"is \(4,\), but 8 pairs of channels are rotated"),
    (dict(settings={"rope.scaling.type": "spiral"}), r"rope.scaling.type 'spiral' with factor 1.0 scales"),
    (dict(settings={"rope.scaling.factor": -2.0}), r"rope.scaling.type 'linear' with factor -2.0 scales"),
    (dict(settings={"rope.scaling.attn_factor": 1.5}), r"attn_factor is 1.5, and this release computes with 1 only"),
    (dict(settings={"rope.freq_base": 0.0}), r"llama.rope.freq_base is 0.0; it must be above 0"),
    (dict(settings={"rope.dimension_count": 8}), r"dimension_count is 8, and this release computes with 16 only"),
    (dict(settings={"attention.sliding_window_pattern": "every second"}, architecture="gemma2"),
     r"sliding_window_pattern is 'every second', not a number"),
    (dict(settings={"attn_logit_softcapping": 0.0}, architecture="gemma2"), r"softcapping is 0.0; it must be above 0"),
    (dict(settings={"attention.sliding_window": 0}, architecture="gemma2"), r"window is 0.0; it must be above 0"),
    (dict(settings={"rope.freq_base_swa": 70.0}, architecture="gemma2"), r"computes with 10000.0 only"),
    (dict(settings={"attention.sliding_window_pattern": [True]}, architecture="gemma3"), r"1 entries for 2 layers"),
])
def test_other_scalings_are_refused_by_tensor_and_type(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_model(tmp_path / "m.gguf", **{"architecture": "llama"} | options)
    for read in (open_gguf, lambda path: convert_gguf(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / "m.gguf")


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", factors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert config.rope_parameters["rope_type"] == "default"


def test_heads_that_do_not_divide_are_one_line(tmp_path: Path) -> None:
    """transformers' own check raises what is no ValueError."""
    path = tmp_path / "m.gguf"
    write_model(path, "llama")
    data = path.read_bytes()
    at = data.index(b"llama.attention.head_count") + len(b"llama.attention.head_count") + 4
    path.write_bytes(data[:at] + (7).to_bytes(4, "little") + data[at + 4 :])
    for read in (open_gguf, lambda path: convert_gguf(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match="does not describe a usable model"):
            read(path)


def test_gemmas_windows_and_caps_are_the_files(tmp_path: Path) -> None:
    """Layers with a window, which rotate with a base of their own in Gemma 3."""
    full, sliding = "full_attention", "sliding_attention"
    for number, (architecture, settings, layers, window) in enumerate((
        ("gemma2", {}, [sliding, full], 32),
        ("gemma2", {"attention.sliding_window_pattern": 1, "attention.sliding_window": 5}, [full, full], 5),
        ("gemma3", {}, [sliding, sliding], 32),
        ("gemma3", {"attention.sliding_window_pattern": [False, True]}, [full, sliding], 32),
        ("gemma3", {"attention.sliding_window": 0}, [full, full], 128),
    )):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = config_of(folder, architecture, settings=settings)
        assert (config.layer_types, config.sliding_window) == (layers, window)
        AutoModelForCausalLM.from_config(config)(torch.tensor([[3, 4]]))
    (tmp_path / "caps").mkdir()
    config = config_of(tmp_path / "caps", "gemma2",
                       settings={"attn_logit_softcapping": 7.0, "final_logit_softcapping": 9.0})
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (7.0, 9.0), "transformers has 50 and 30"
    (tmp_path / "bases").mkdir()
    config = config_of(tmp_path / "bases", "gemma3", settings={
        "rope.freq_base": 90000.0, "rope.freq_base_swa": 700.0, "rope.scaling.factor": 8.0,
        "final_logit_softcapping": 9.0})
    assert config.rope_parameters == {
        full: {"rope_type": "linear", "factor": 8.0, "rope_theta": 90000.0},
        sliding: {"rope_type": "default", "rope_theta": 700.0}}, "only full layers are scaled"
    assert config.final_logit_softcapping == 9.0


def test_what_transformers_reads_from_another_key_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for architecture, settings, field, value in (
        ("nemotron", {"attention.layer_norm_epsilon": 0.5}, "norm_eps", 0.5),
        ("qwen3", {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
         "head_dim", 16),
        ("gpt2", {"context_length": 512}, "n_positions", 512), ("gpt2", {"feed_forward_length": 80}, "n_inner", 80),
        ("phi3", {"attention.sliding_window": 9}, "sliding_window", 9),
        ("phi3", {"attention.sliding_window": 0}, "sliding_window", None),
        ("stablelm", {"rope.dimension_count": 16}, "rope_parameters",
         {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}),
    ):
        write_model(path, architecture, settings=settings)
        assert getattr(read_gguf_config(read_gguf(path)), field) == value


def test_a_head_count_of_keys_that_is_not_said_is_that_of_queries(tmp_path: Path) -> None:
    """transformers' default for Qwen2 is 32."""
    write_model(tmp_path / "m.gguf", "qwen2")
    header = read_gguf(tmp_path / "m.gguf")
    metadata = {key: value for key, value in header.metadata.items() if not key.endswith("head_count_kv")}
    assert read_gguf_config(dataclasses.replace(header, metadata=metadata)).num_key_value_heads == 4


def test_special_tokens_are_the_files_or_none(tmp_path: Path) -> None:
    """Not those of a config class: token 50256 of GPT-2, 2 of Llama."""
    write_model(tmp_path / "m.gguf", "llama")
    header = read_gguf(tmp_path / "m.gguf")
    absent = {key: value for key, value in header.metadata.items() if not key.endswith("_token_id")}
    for metadata, ids in ((absent, (None, None, None)),
                          (absent | {"tokenizer.ggml.model": "llama"}, (1, 2, None)),
                          (header.metadata | {"tokenizer.ggml.padding_token_id": 2**32 - 1}, (0, 1, None))):
        config = read_gguf_config(dataclasses.replace(header, metadata=metadata))
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == ids
