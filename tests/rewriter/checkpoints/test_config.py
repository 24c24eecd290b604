"""What a model's folder says of itself: Python that it brings along is never run, whatever stdin answers."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import GPTJConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config

import forebay
from forebay.commands.prompts import load_tokenizer
from forebay.commands.terminal import JobError
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.checkpoints.config import meta_model, read_config, read_generation_config
from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError
from tests.rewriter.checkpoints.test_gguf import write_model

ROOT = Path(forebay.__file__).parents[2]
AUTO = {"AutoConfig": "planted.PlantedConfig", "AutoModelForCausalLM": "planted.PlantedModel",
        "AutoTokenizer": ["planted.PlantedTokenizer", "planted.PlantedTokenizer"],
        "AutoProcessor": "planted.PlantedProcessor"}


class Planted:
    """A model's folder with a Python file that leaves a mark when it is run; `asked` counts questions on stdin."""

    def __init__(self, folder: Path, mark: Path) -> None:
        self.folder, self.mark, self.asked = folder, mark, 0

    def write(self, name: str, **settings: object) -> None:
        path = self.folder / name
        known = json.loads(path.read_bytes()) if path.exists() else {}
        path.write_text(json.dumps(known | settings | {"auto_map": AUTO}))

    def answer(self, prompt: str = "") -> str:
        self.asked += 1
        return "y"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """A Llama's folder where every loader finds code to run, and a stdin that says yes."""
    folder = tmp_path / "model"
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(64)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="w0"))
                            ).save_pretrained(folder)
    found = Planted(folder, tmp_path / "ran")
    source = (f"open({str(found.mark)!r}, 'w').close()\n"
              "from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast\n"
              "class PlantedConfig(PreTrainedConfig): model_type = 'planted'\n"
              "class PlantedModel(PreTrainedModel): config_class = PlantedConfig\n"
              "class PlantedTokenizer(PreTrainedTokenizerFast): pass\n"
              "class PlantedProcessor: pass\n")
    (folder / "planted.py").write_text(source)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(source)
    monkeypatch.setattr("builtins.input", found.answer)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    yield found  # type: ignore[misc]
    assert not found.mark.exists() and found.asked == 0
    assert not any("planted" in name for name in sys.modules)


def test_a_config_of_an_unknown_type_with_code_is_refused_by_name(planted: Planted) -> None:
    planted.write("config.json", model_type="planted")
    with pytest.raises(CheckpointError, match=r"config.json names Python code of its own \(auto_map\), which is never"):
        read_config(planted.folder)
    with pytest.raises(CheckpointError, match="auto_map"):
        forebay.wrap(planted.folder, "device=1MiB")


def test_a_known_config_with_code_is_read_as_the_architecture_it_names(planted: Planted) -> None:
    planted.write("config.json")
    assert type(read_config(planted.folder)) is LlamaConfig
    quantize_model(planted.folder, planted.folder.with_name("quantized"), Wish("w8g32"))
    with forebay.wrap(planted.folder, "device=2MiB", prompt=4, new_tokens=2) as lm:
        assert lm.generate(torch.tensor([[3, 4]]), max_new_tokens=2).shape == (1, 4)


def test_a_config_without_a_causal_model_does_not_bring_its_own(planted: Planted) -> None:
    config = T5Config()
    config.auto_map = AUTO
    config._name_or_path = str(planted.folder)
    with pytest.raises(CheckpointError, match="'t5' is not a causal language model"):
        meta_model(config)


@pytest.mark.parametrize("kind", ["PlantedTokenizer", "PreTrainedTokenizerFast", None])
def test_a_tokenizer_with_code_is_not_run(planted: Planted, kind: str | None) -> None:
    planted.write("tokenizer_config.json", tokenizer_class=kind)
    try:
        assert type(load_tokenizer(planted.folder)).__module__.startswith("transformers.")
    except JobError as error:
        assert "tokenizer" in str(error)


def test_processor_and_generation_config_with_code_are_not_run(planted: Planted) -> None:
    for name in ("processor_config.json", "preprocessor_config.json", "generation_config.json", "chat_template.json"):
        planted.write(name, processor_class="PlantedProcessor", custom_generate="generate.py")
    load_tokenizer(planted.folder)
    with forebay.wrap(planted.folder, "device=2MiB", prompt=4, new_tokens=2) as lm:
        lm.generate(torch.tensor([[3, 4]]), max_new_tokens=2)


def test_code_beside_a_gguf_file_is_not_run(planted: Planted) -> None:
    planted.write("config.json", model_type="planted")
    planted.write("tokenizer_config.json", tokenizer_class="PlantedTokenizer")
    path = planted.folder / "m.gguf"
    write_model(path, "llama")
    convert_gguf(path, planted.folder.with_name("converted"))
    quantize_model(path, planted.folder.with_name("quantized"), Wish("keep"))


def test_an_attention_that_the_config_names_is_not_fetched(planted: Planted) -> None:
    settings = json.loads((planted.folder / "config.json").read_bytes())
    for name in ("attn_implementation", "_attn_implementation"):
        (planted.folder / "config.json").write_text(json.dumps(settings | {name: "somebody/attention"}))
        config = read_config(planted.folder)
        assert meta_model(config).config._attn_implementation == "eager"


def test_no_loader_of_transformers_is_called_without_forbidding_code() -> None:
    """Every call of an Auto class in the package, the examples and the benchmarks says so itself, or by LOCAL_ONLY."""
    seen = 0
    for part in ("rewriter", "passes", "kernels", "runtime", "src/forebay", "examples"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not _is_auto_load(node):
                    continue
                seen += 1
                given = {k.arg: k.value for k in node.keywords}  # type: ignore[attr-defined]
                forbidden = isinstance(given.get("trust_remote_code"), ast.Constant) and (
                    given["trust_remote_code"].value is False)  # type: ignore[union-attr]
                spread = ast.unparse(given[None]) if None in given else ""
                assert forbidden or spread == "LOCAL_ONLY", f"{path}:{node.lineno}"  # type: ignore[attr-defined]
    assert seen >= 5


def _is_auto_load(node: Any) -> bool:
    return (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("from_pretrained", "from_config")
            and ast.unparse(node.func.value).rpartition(".")[2].startswith("Auto"))


def test_the_folder_of_the_fixture_would_run_its_code_if_it_were_trusted(planted: Planted) -> None:
    """What the other tests rely on: with a yes that is heard, the file is run."""
    from transformers import AutoConfig

    planted.write("config.json", model_type="planted")
    AutoConfig.from_pretrained(planted.folder, local_files_only=True)
    assert planted.mark.exists() and planted.asked == 1
    planted.mark.unlink()
    planted.asked = 0
    for name in [n for n in sys.modules if "planted" in n]:
        del sys.modules[name]
    shutil.rmtree(planted.folder)


@pytest.mark.parametrize(("name", "value"), [
    ("num_hidden_layers", 1_000_000), ("num_hidden_layers", 10**30), ("num_hidden_layers", 1e9), ("n_layer", 1 << 40),
    ("hidden_size", 1 << 40), ("vocab_size", 1 << 50), ("intermediate_size", 1 << 45), ("num_attention_heads", 1 << 33),
    ("head_dim", 1 << 33), ("num_local_experts", 1 << 33), ("num_local_experts", 2000), ("moe_num_experts", 2000),
    ("num_nextn_predict_layers", 2000), ("depths", [1, 2000]), ("num_codebooks", 1e9), ("altup_num_inputs", 10**8),
])
def test_sizes_that_no_tensor_bears_out_are_refused_before_anything_is_built(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    from transformers import AutoConfig

    monkeypatch.setattr(AutoConfig, "from_pretrained", None)  # not reached
    for nested in (False, True):
        known = json.loads((planted.folder / "config.json").read_bytes())
        (planted.folder / "config.json").write_text(json.dumps(
            known | ({"text_config": {name: value}} if nested else {name: value})))
        with pytest.raises(CheckpointError, match=rf"config.json: {name} is .* but the checkpoint has \d+ "):
            forebay.wrap(planted.folder, "device=1MiB")
        with pytest.raises(CheckpointError, match=rf"config.json: {name} is "):
            quantize_model(planted.folder, planted.folder.with_name("out"), Wish("w8g32"))
        (planted.folder / "config.json").write_text(json.dumps(known))


@pytest.mark.parametrize("value", [1_000_000, 10**8, 1e8])
def test_labels_that_a_config_only_counts_are_refused(planted: Planted, value: float) -> None:
    """transformers makes a name for each, a kilobyte of memory; those that a config spells out are as long as it is."""
    planted.write("config.json", num_labels=value)
    (planted.folder / "generation_config.json").unlink()  # then it is made of config.json
    for read in (lambda: read_config(planted.folder), lambda: forebay.wrap(planted.folder, "device=1MiB"),
                 lambda: read_generation_config(planted.folder)):
        with pytest.raises(CheckpointError, match=r"config.json: num_labels is 1.*, more than any model has"):
            read()
    planted.write("config.json", num_labels=3, id2label={str(i): "layers" for i in range(3)}, label2id={"layers": 9999})
    assert read_config(planted.folder).num_labels == 3


def test_numbers_that_size_nothing_may_be_large(planted: Planted) -> None:
    """Parameters that are counted for readers, positions that are computed, and what a tiny model has by default."""
    planted.write("config.json", num_parameters=10**12, rope_theta=10**9, max_position_embeddings=10_485_760,
                  sliding_window=1 << 30, max_window_layers=1000, layer_norm_eps=1e-6, seed=1 << 62, block_size=1 << 20)
    assert read_config(planted.folder, open_checkpoint(planted.folder).tensors).max_position_embeddings == 10_485_760


def test_tables_that_no_checkpoint_holds_are_bounded() -> None:
    """GPT-J computes a row of sines for each position when it is made."""
    config = GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8, n_positions=1 << 24)
    with pytest.raises(CaptureError, match=r"tables that no checkpoint holds.*embed_positions of \[16777216, 8\]"):
        capture_model(config)
