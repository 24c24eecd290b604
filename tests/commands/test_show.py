"""`forebay show`: what a model's files say of it, and whether it runs."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from embedding.folders import save as save_texts
from embedding.folders import save_modules
from families import llama
from lora_folders import write_lora
from modules.test_encoder_decoder import save as save_both
from quantized_folders import change_settings, make
from quantized_model import write_quantized
from safetensors.torch import load_file, save_file
from selection import at_length
from small_experts import small
from tiny_gguf import VOCAB, copy_of, write_model
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.commands.show import description_text
from forebay.describe_model import ModelDescription, describe_model
from forebay.exported.export import export
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from tests.rewriter.checkpoints.test_mlx import CASES as MLX
from tests.rewriter.checkpoints.test_mlx import SHAPE as MLX_SHAPE

RUNNER = CliRunner()


def held(found: ModelDescription, kind: str, format: str = "") -> tuple[int, int, int]:
    """Tensors, parameters and bytes of a kind."""
    own = [group for group in found.weights if group.kind == kind and group.format.startswith(format)]
    return (sum(g.tensors for g in own), sum(g.parameters for g in own), sum(g.nbytes for g in own))


def assert_adds_up(found: ModelDescription, model: Any) -> None:
    """All parameters are counted once, and all bytes of tensors."""
    total = sum(each.numel() for each in model.parameters())
    assert found.runs and not found.reason and found.parameters == total
    assert sum(group.parameters for group in found.weights) == total
    assert (found.layers, found.vocabulary) == (model.config.num_hidden_layers, model.config.vocab_size)
    text = description_text(found)
    assert "runs            yes" in text and found.architecture in text


def test_the_folder_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base and its adapters, each under its own name."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    model = transformers.AutoModelForCausalLM.from_config(llama(2))
    model.save_pretrained(tmp_path / "base")
    adapter = write_lora(tmp_path / "poems", model, r".*\.q_proj", tmp_path / "base", r=3)
    found = describe_model(str(adapter))
    assert (found.path, found.adapters) == (str(tmp_path / "base"), {"": str(adapter)})
    held_in = sum(each.numel() for each in load_file(adapter / "adapter_model.safetensors").values())
    assert held(found, "adapter", "float32") == (4, held_in, 4 * held_in)
    assert found.parameters == sum(each.numel() for each in model.parameters())
    assert f"adapter         {adapter}\n" in description_text(found)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder(tmp_path: Path, tied: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_config(llama(2, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    found = describe_model(str(tmp_path))
    assert_adds_up(found, model)
    assert (found.container, found.files, found.opens) == ("safetensors", 1, "read in place")
    assert found.active_parameters == found.parameters and found.tokenizer and found.dtype == "float32"
    embedding = model.get_input_embeddings().weight
    assert held(found, "embedding and head" if tied else "head") == (1, embedding.numel(), 4 * embedding.numel())
    assert sum(g.nbytes for g in found.weights) == sum(t.nbytes for t in load_file(
        tmp_path / "model.safetensors").values())
    assert held(found, "self_attn")[0] == 8 and held(found, "mlp")[0] == 6


def test_experts_in_every_container(tmp_path: Path) -> None:
    """A token meets two of eight; a table of a bundle is its matrices."""
    model = small("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    config, experts = model.config, sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    active = sum(p.numel() for p in model.parameters()) - experts + experts * config.num_experts_per_tok // (
        config.num_experts)
    quantize_model(tmp_path / "model", tmp_path / "q", Wish("w8g32"))
    export(tmp_path / "model", tmp_path / "bundle", budget="8MB", prompt=8, new_tokens=2)
    for name, container, format in (("model", "safetensors", "float32"), ("q", "forebay quantize", "w8g32"),
                                    ("bundle", "bundle", "float32")):
        found = describe_model(str(tmp_path / name))
        assert_adds_up(found, model)
        assert found.container == container and found.active_parameters == active
        assert held(found, "experts", format)[1] == experts and not held(found, "not read")[0]


@pytest.mark.parametrize("family", ["dbrx", "jetmoe", at_length("gpt_oss"), at_length("hunyuan_v1_moe")])
def test_active_parameters_are_those_that_a_token_changes(tmp_path: Path, family: str) -> None:
    """Experts in attention too, matrices in two dimensions, biases."""
    model = small(family)
    model.save_pretrained(tmp_path)
    with torch.no_grad():  # queries count where there are several keys
        before = model(torch.tensor([[3]]), use_cache=True).past_key_values
    model(torch.tensor([[5]]), past_key_values=before).logits.square().sum().backward()
    active = 0
    for name, parameter in model.named_parameters():
        of_experts = parameter.dim() > 1 and "router" not in name and "gate.wg" not in name and any(
            part in name for part in ("experts.", "input_linear", "output_linear"))
        active += int(parameter.grad.view(8, -1).any(1).sum()) * parameter.numel() // 8 if of_experts else (
            parameter.numel())
    found = describe_model(str(tmp_path))
    assert found.runs and found.active_parameters == active < found.parameters


@pytest.mark.parametrize("method", [at_length("gptq"), at_length("awq"), "compressed-tensors"])
def test_weights_that_other_tools_quantized(tmp_path: Path, method: str) -> None:
    make(tmp_path, method)
    found = describe_model(str(tmp_path))
    plain = transformers.AutoConfig.from_pretrained(tmp_path)
    assert_adds_up(found, transformers.AutoModelForCausalLM.from_config(plain))
    assert (found.container, found.opens) == (method, "packed once into the cache folder")
    assert held(found, "self_attn", method)[1] == held(found, "self_attn")[1] > 0
    change_settings(tmp_path, rotation="hadamard")
    found = describe_model(str(tmp_path))
    assert not found.runs and "rotation = 'hadamard'" in found.reason and found.parameters


def test_codes_that_have_the_name_of_a_matrix(tmp_path: Path) -> None:
    """Every tensor of such a matrix is one of the tool's; the others are what they are."""
    (settings, written, _), shape = MLX["4 bits"], MLX_SHAPE
    model, values = write_quantized(tmp_path, shape, settings, written)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": settings}))
    found = describe_model(str(tmp_path))
    assert_adds_up(found, model)
    assert found.container == "mlx" and not held(found, "mlp", "uint32")[0] and not held(found, "self_attn", "u")[0]
    assert held(found, "mlp", "mlx")[:2] == (9, sum(value.numel() for name, value in values.items() if ".mlp." in name))
    assert held(found, "head", "float32")[0] == held(found, "embedding", "float32")[0] == 1


def test_a_gguf_file(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama", kinds=("Q8_0", "Q4_0"))
    copy_of(tmp_path / "m.gguf", tmp_path / "n.gguf", {"tokenizer.chat_template": "plain",
                                                       "tokenizer.chat_template.tool_use": "tools"})
    found = describe_model(str(tmp_path / "n.gguf"))
    tensors = gguf.GGUFReader(tmp_path / "n.gguf").tensors
    assert found.runs and found.parameters == sum(math.prod(map(int, t.shape)) for t in tensors)
    for kind in ("Q8_0", "Q4_0", "F32"):
        of_kind = [t for t in tensors if t.tensor_type.name == kind]
        assert sum(g.nbytes for g in found.weights if g.format == kind) == sum(t.n_bytes for t in of_kind)
    assert (found.context, found.vocabulary, found.container) == (128, VOCAB, "GGUF")
    assert sorted(found.chat_templates) == ["default", "tool_use"] and found.ends == ("</s>",)
    assert found.special_tokens["bos_token"] == "<s>"


@pytest.mark.parametrize("how", ["architecture", "order of groups", "model type", "dtype", "lost weights", "pickle"])
def test_what_is_refused_is_described_as_far_as_it_goes(tmp_path: Path, how: str) -> None:
    """By the command too, whose exit is 0: the question was what the model is."""
    path, known = tmp_path / "model", True
    if how == "architecture":
        path, known = tmp_path / "m.gguf", False
        write_model(tmp_path / "n.gguf", "llama", kinds=("F32",))
        writer = gguf.GGUFWriter(path, "falcon")
        writer.add_block_count(2)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
    elif how == "order of groups":
        make(path, "gptq")
        tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.up_proj.g_idx"
        save_file(tensors | {name: tensors[name].flip(0).contiguous()}, path / "model.safetensors", {"format": "pt"})
    else:
        transformers.AutoModelForCausalLM.from_config(llama(1)).save_pretrained(path)
        file = path / "model.safetensors"
        if how == "model type":
            (path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
            known = False
        elif how == "dtype":
            name = "model.layers.0.mlp.up_proj.weight"
            tensors = load_file(file)
            save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fnuz)}, file, {"format": "pt"})
        elif how == "lost weights":
            tensors = load_file(file)
            save_file({n: t for n, t in tensors.items() if "up_proj" not in n}, file, {"format": "pt"})
        else:
            shutil.move(file, path / "pytorch_model.bin")
            known = False
    said = {"architecture": "GGUF architecture 'falcon'", "order of groups": r"layers.1.mlp.up_proj.weight",
            "model type": "describes no model", "dtype": "F8_E4M3FNUZ", "lost weights": "up_proj.weight",
            "pickle": "arbitrary code"}[how]
    called = RUNNER.invoke(app, ["show", str(path), "--json"])
    assert called.exit_code == 0, called.output
    found = json.loads(called.stdout)
    assert not found["runs"] and said in found["reason"] and bool(found["parameters"]) == known
    assert f"no: {found['reason']}" in RUNNER.invoke(app, ["show", str(path)]).stdout


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    called = RUNNER.invoke(app, ["show", str(tmp_path / "none")])
    assert called.exit_code == 2 and "no model at" in called.stderr


def _read_nbytes() -> int:
    """Bytes that this process has asked files for."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="the kernel does not count reads")
def test_no_weight_is_read(tmp_path: Path) -> None:
    """Once what describes them is imported."""
    config = llama(1, vocab_size=100_000, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    quantize_model(tmp_path, tmp_path / "q", Wish("w8g32"))
    for folder in (tmp_path, tmp_path / "q"):
        describe_model(str(folder))
        before = _read_nbytes()
        found = describe_model(str(folder))
        assert found.runs and _read_nbytes() - before < found.nbytes // 4


@pytest.mark.parametrize(("kind", "gives", "architecture"), [
    ("t5", "text", "T5ForConditionalGeneration"), ("mpnet", "embeddings", "MPNetModel"),
    ("bert", "scores", "BertForSequenceClassification")])
def test_models_with_an_encoder(kind: str, gives: str, architecture: str, tmp_path: Path) -> None:
    """They run by other ways than a language model, and transformers has no causal model of some."""
    if kind == "t5":
        save_both(kind, tmp_path)
    elif gives == "scores":
        save_texts(kind, tmp_path, transformers.AutoModelForSequenceClassification, num_labels=1)
    else:
        save_texts(kind, tmp_path)
        save_modules(tmp_path, {"pooling_mode": "mean"})
    found = describe_model(str(tmp_path))
    assert (found.runs, found.gives, found.architecture, found.reason) == (True, gives, architecture, "")
    assert sum(group.parameters for group in found.weights) == found.parameters
    assert sum(group.nbytes for group in found.weights if group.kind != "not read") == 4 * found.parameters
    assert ("gives           " + gives in description_text(found)) == (gives != "text")
