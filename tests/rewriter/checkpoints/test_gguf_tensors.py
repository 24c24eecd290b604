"""Every tensor of a GGUF file is a parameter of the model, or the file is refused by the tensor's name."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_gguf import write_model
from transformers import AutoModelForCausalLM

from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.gguf_config import gguf_model
from forebay.rewriter.checkpoints.gguf_header import read_gguf
from forebay.rewriter.checkpoints.gguf_repack import open_gguf
from forebay.rewriter.checkpoints.gguf_tensors import place_tensors
from forebay.rewriter.checkpoints.records import CheckpointError

QKV = {f"blk.{i}.attn_{x}.bias": n for i in range(2) for x, n in (("q", 64), ("k", 32), ("v", 32))}
OUT = {f"blk.{i}.attn_output.bias": 64 for i in range(2)}
MLP = {f"blk.{i}.ffn_{x}.bias": n for i in range(2) for x, n in (("gate", 96), ("up", 96), ("down", 64))}
NARROW = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}


def drawn(sizes: dict[str, int]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {name: random.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}


@pytest.mark.parametrize(("architecture", "sizes"), [
    ("llama", QKV), ("llama", QKV | OUT), ("llama", MLP), ("llama", QKV | OUT | MLP), ("qwen3", QKV | OUT),
    ("gemma2", QKV | OUT), ("stablelm", QKV)])
def test_biases_are_added(tmp_path: Path, architecture: str, sizes: dict[str, int]) -> None:
    """The outputs differ from those without by what the biases say, with heads in the model's order."""
    path, biases = tmp_path / "m.gguf", drawn(sizes)
    if architecture in ("qwen3", "gemma2"):  # whose tiny models have wide heads
        biases = drawn({name: {"q": 4, "k": 2, "v": 2}[name[11]] * (128 if architecture == "qwen3" else 32)
                        if name in QKV else size for name, size in sizes.items()})
    write_model(path, architecture, kinds=("F32",), loadable=True, factors=biases)
    loaded = AutoModelForCausalLM.from_pretrained(convert_gguf(path, tmp_path / "out"))
    parameters = dict(loaded.named_parameters())
    named = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}
    for name, values in biases.items():
        _, layer, kind, _ = name.split(".")
        found = parameters[f"model.layers.{layer}.{named[kind]}.bias"].detach().numpy()
        if architecture == "llama" and kind in ("attn_q", "attn_k"):  # the file has pairs, the model halves of a head
            values = values.reshape(-1, 8, 2).swapaxes(1, 2).reshape(-1)
        assert np.array_equal(found, values), name


@pytest.mark.parametrize(("architecture", "extra", "message"), [
    ("llama", "blk.0.unknown.weight", r"place for blk\.0\.unknown\.weight \(1 in all\), and left out"),
    ("qwen3", "blk.1.attn_q.bias", r"architecture qwen3 has no place for blk\.1\.attn_q\.bias"),
    ("phi3", "blk.0.attn_qkv.bias", r"blk\.0\.attn_qkv\.bias"), ("qwen2", "output.bias", r"output\.bias"),
    ("llama", "blk.0.attn_q.scale", r"blk\.0\.attn_q\.scale"),
    ("stablelm", "blk.0.attn_q_norm.weight", r"blk\.0\.attn_q_norm\.weight"),
    ("gpt2", "rope_freqs.weight", r"rope_freqs\.weight"), ("gemma2", "blk.2.attn_norm.weight", r"blk\.2\.attn_norm"),
    ("llama", "blk.1.attn_q.bias", r"place for blk\.1\.attn_q\.bias"),
    ("llama", "blk.0.attn_output.bias", r"no tensor for model\.layers\.0\.self_attn\.q_proj\.bias"),
])
def test_a_tensor_without_a_place_is_refused_by_name(
    tmp_path: Path, architecture: str, extra: str, message: str
) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, architecture, factors={extra: np.ones(64, np.float32)})
    for read in (open_gguf, lambda path: convert_gguf(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=message):
            read(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_what_is_for_images_alone_is_left_out(tmp_path: Path) -> None:
    """Some files of Gemma 3 hold a model for images beside that for text."""
    path = tmp_path / "m.gguf"
    write_model(path, "gemma3", settings={"vision.block_count": 1},
                factors={"v.blk.0.attn_q.weight": np.ones((8, 8), np.float32), "mm.weight": np.ones(8, np.float32)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {tensor.name for tensor in open_gguf(path).tensors if "layers" not in tensor.name} == {
            "model.embed_tokens.weight", "model.norm.weight"}
    write_model(path, "llama", factors={"v.blk.0.attn_q.weight": np.ones((8, 8), np.float32)})
    with pytest.raises(CheckpointError, match=r"has no place for v\.blk\.0\.attn_q\.weight"):
        open_gguf(path)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_matrix_of_the_other_shape_is_refused(tmp_path: Path, architecture: str) -> None:
    """It has as many elements as that of the model, and reads as another one."""
    path = tmp_path / "m.gguf"
    write_model(path, architecture, drop="blk.1.ffn_up.weight", kinds=("F32",), loadable=True,
                factors={"blk.1.ffn_up.weight": np.ones((64, 96 if architecture == "llama" else 256), np.float32)})
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight is \(64, \d+\), but .* of this model is"):
        open_gguf(path)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "starcoder2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_is_the_one_computed_with(tmp_path: Path, architecture: str, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, architecture, tied=tied, kinds=("F32",), loadable=True)
    header = read_gguf(path)
    model = gguf_model(header)
    placed = place_tensors(header, model)
    head = placed.get("lm_head.weight")
    assert (head is None) == tied == model.config.tie_word_embeddings
    folder = convert_gguf(path, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    wanted = header.find("token_embd.weight" if tied else "output.weight")
    assert wanted is not None
    values = np.fromfile(path, np.float32, loaded.lm_head.weight.numel(), offset=wanted.offset)
    assert torch.equal(loaded.lm_head.weight.flatten(), torch.from_numpy(values))
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
