"""What a GGUF file says of rotary embeddings and of attention's scale is what its model computes with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gguf import write_model
from transformers import AutoConfig, AutoModelForCausalLM

from forebay.rewriter.checkpoints.checkpoint import CheckpointError
from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.gguf_repack import open_gguf


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


def test_linear_scaling(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", settings={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert np.allclose(frequencies(config), 10000.0 ** -(np.arange(0, 16, 2) / 16) / 4, rtol=1e-5)


def test_factors_of_short_and_long_contexts(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(1, 9, 8, dtype=np.float32)
    config = config_of(tmp_path, "phi3", settings={"rope.scaling.original_context_length": 64},
                       factors={"rope_factors_short.weight": short, "rope_factors_long.weight": long})
    assert config.original_max_position_embeddings == config.rope_parameters["original_max_position_embeddings"] == 64
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    for count, factors in ((64, short), (65, long)):
        cos, _ = rotary(torch.zeros(1), torch.arange(count)[None])
        angles = np.outer(np.arange(count), 10000.0 ** -(np.arange(0, 16, 2) / 16) / factors)
        scale = math.sqrt(1 + math.log(2) / math.log(64))  # of 128 positions over 64
        assert np.allclose(cos[0, :, :8], np.cos(angles) * scale, atol=1e-4)


@pytest.mark.parametrize(("options", "message"), [
    (dict(settings={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}), r"rope.scaling.type 'yarn' scales"),
    (dict(factors={"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}), r"rope_freqs.weight \(F32\) scales"),
    (dict(factors={"rope_freqs.weight": np.ones(8, np.float16) * 2}), r"rope_freqs.weight has type F16, not F32"),
    (dict(factors={"rope_factors_long.weight": np.ones(8, np.float32)}), r"rope_factors_long.weight \(F32\) scales"),
])
def test_other_scalings_are_refused_by_tensor_and_type(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_model(tmp_path / "m.gguf", "llama", **options)
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
