"""Graphs that the cache folder keeps: the second start captures nothing, and gives what the first gave."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from selection import at_length
from transformers import AutoModelForCausalLM

import forebay.commands.plan_config as planning
import forebay.kept_graphs as kept_graphs
import forebay.kept_texts as kept_texts
import forebay.open_model as opening
import forebay.rewriter.capture.language_model as capturing
from forebay.api import wrap
from forebay.commands.plan_serving import plan_serving
from forebay.rewriter.capture.family import FAMILIES, Family
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import log_once
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline import pass_list
from forebay.rewriter.planning.options import Options

IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, with what is compiled; graphs are read from it, not from memory."""
    mine = tmp_path / "cache"
    shutil.copytree(os.environ["FOREBAY_CACHE"], mine, symlinks=True, ignore=shutil.ignore_patterns("graphs"))
    monkeypatch.setenv("FOREBAY_CACHE", str(mine))
    monkeypatch.setattr(opening, "read_graphs", kept_graphs.read_graphs)
    yield mine / "graphs"


def saved(folder: Path, config: Any = None) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config or families.llama(2)).save_pretrained(folder)
    return folder


def answer(folder: Path, **options: Any) -> list[int]:
    with wrap(folder, "2MiB", prompt=8, new_tokens=6, **options) as lm:
        found: list[int] = lm.generate(IDS, max_new_tokens=6, do_sample=False)[0].tolist()
    return found


def captures_nothing(patch: pytest.MonkeyPatch, module: Any = capturing, name: str = "capture_model") -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("captured again")

    patch.setattr(module, name, refuse)


def test_a_server_starts_from_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = saved(tmp_path / "model"), Options(prompt=8, new_tokens=6, batch_slots=2, machine=Machine.default())
    plans = []
    for again in (False, True):
        if again:
            captures_nothing(monkeypatch)
        with plan_serving(folder, "2MiB", asked).lm as lm:
            plans.append(lm.plan)
            answered = lm.generate(IDS, max_new_tokens=6, do_sample=False)[0].tolist()
    assert plans[0] == plans[1]
    assert answered == AutoModelForCausalLM.from_pretrained(folder).generate(
        IDS, max_new_tokens=6, do_sample=False)[0].tolist()


@pytest.mark.parametrize("options", [{}, {"cache": "kv8"}, {"micro_batches": 2, "batch": 2}, {"batch_slots": 2}])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "w4g16", "experts"])
@pytest.mark.covering(1)
def test_the_second_start_gives_what_the_first_gave(
    tmp_path: Path, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = families.FAMILIES[kind]() if kind in families.FAMILIES else mixture() if kind == "experts" else None
    folder = saved(tmp_path / "model", config)
    if kind == "w4g16":
        quantize_model(folder, tmp_path / "packed", Wish(kind))
        folder = tmp_path / "packed"
    first = opening.open_model(folder, keep=True)
    expected = answer(folder, **options)
    captures_nothing(monkeypatch)
    captured, _, files = opening.open_model(folder, keep=True)
    assert captured.weights == first[0].weights and files == first[2]
    assert answer(folder, **options) == expected


def mixture() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(vocab_size=199, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
                          num_key_value_heads=2, intermediate_size=96, moe_intermediate_size=32, num_experts=4,
                          num_experts_per_tok=2, max_position_embeddings=128)


@pytest.mark.all
def test_the_second_start_imports_little(tmp_path: Path) -> None:
    """No code of models, nor a solver or a compiler of kernels that only some plans need."""
    folder = saved(tmp_path / "model")
    expected = answer(folder)
    code = f"""import sys, torch
from forebay.api import wrap
from forebay.commands.plan_serving import plan_serving
from forebay.runtime.run.run_once import run_once
lm = wrap({str(folder)!r}, "2MiB", prompt=8, new_tokens=6)
_ = lm.session
unwanted = ("transformers", "scipy") if torch.cuda.is_available() else ("transformers", "scipy", "triton")
assert not any(name.startswith(unwanted) for name in sys.modules), sorted(sys.modules)
print(lm.generate(torch.tensor({IDS.tolist()}), max_new_tokens=6, do_sample=False)[0].tolist())"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and json.loads(ran.stdout) == expected, ran.stderr


@pytest.mark.parametrize("change", ["weights", "config", "code", "torch", "request", "passes"])
def test_what_decides_the_graphs_is_in_their_key(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model")
    checkpoint, settings = opening.open_checkpoint(folder), ("last", False, False)
    before = kept_graphs.graphs_key(folder, checkpoint, settings)
    assert before == kept_graphs.graphs_key(folder, opening.open_checkpoint(folder), settings)
    if change == "weights":  # the same header, another head
        at = folder / "model.safetensors"
        at.write_bytes(at.read_bytes()[:-4] + b"\0\0\0\0")
    elif change == "config":
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | {"rms_norm_eps": 1e-3}))
    elif change == "code":
        (tmp_path / "more.py").write_text("")
        found = [*kept_texts._sources(), str(tmp_path / "more.py")]
        monkeypatch.setattr(kept_texts, "_sources", lambda: found)
    elif change == "passes":
        monkeypatch.setattr(pass_list, "PASSES", pass_list.PASSES[1:])
    elif change == "torch":
        monkeypatch.setattr(kept_texts, "version", lambda name: "0.1")
    else:
        settings = ("last", True, False)
    assert kept_graphs.graphs_key(folder, opening.open_checkpoint(folder), settings) != before


def test_code_from_outside_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does tomorrow nobody can tell from a digest of ours."""
    folder = saved(tmp_path / "model")
    checkpoint = opening.open_checkpoint(folder)
    with monkeypatch.context() as patch:
        patch.setattr(pass_list, "PASSES", [*pass_list.PASSES, replace(pass_list.PASSES[0], run=mixture)])
        assert kept_graphs.graphs_key(folder, checkpoint, "") is None
    for family in (Family("Other", prepare=saved), Family("Other", {"Block": ("forward", saved)})):
        with monkeypatch.context() as patch:
            patch.setitem(FAMILIES, "Other", family)
            assert kept_graphs.graphs_key(folder, checkpoint, "") is None
    assert kept_graphs.graphs_key(folder, checkpoint, "") is not None


@pytest.mark.parametrize("damage", [
    "cut", at_length("no constants"), "another's", at_length("not text"), "a digit", at_length("a constant")])
def test_files_that_are_damaged_are_passed_over(tmp_path: Path, damage: str, cache: Path) -> None:
    folder = saved(tmp_path / "model")
    expected = answer(folder)
    described, = cache.glob("*.json")
    constants = described.with_suffix(".safetensors")
    whole = described.read_bytes(), constants.read_bytes()
    if damage == "cut":
        described.write_bytes(whole[0][:1000])
    elif damage == "no constants":
        constants.unlink()
    elif damage == "another's":
        constants.write_bytes((folder / "model.safetensors").read_bytes())
    elif damage == "not text":
        described.write_bytes(b"\xff\xfe")
    elif damage == "a digit":
        described.write_bytes(whole[0].replace(b'"nbytes": 1', b'"nbytes": 2', 1))
    else:
        constants.write_bytes(whole[1][:-1] + bytes([whole[1][-1] ^ 1]))
    assert answer(folder) == expected
    assert (described.read_bytes(), constants.read_bytes()) == whole


def test_warnings_are_said_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.strange": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    for _ in range(2):
        log_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="forebay"):
            opening.open_model(folder, keep=True)
        assert "model.strange not read" in caplog.text


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, cache: Path) -> None:
    folder = saved(tmp_path / "model")
    cache.write_text("a file where the folder would be")
    assert answer(folder) == answer(folder) and cache.is_file()


def test_a_folder_that_others_made_is_read(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    expected = answer(folder)

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(os, "utime", refuse)
    captures_nothing(monkeypatch)
    assert answer(folder) == expected


def test_models_opened_longest_ago_go(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_graphs, "MOST", 2)
    folders = [saved(tmp_path / name) for name in "abc"]
    for folder in (folders[0], folders[1], folders[0], folders[2]):
        opening.open_model(folder, keep=True)
    assert len(list(cache.glob("*.json"))) == len(list(cache.glob("*.safetensors"))) == 2
    captures_nothing(monkeypatch)
    opening.open_model(folders[0], keep=True)
    with pytest.raises(AssertionError, match="captured again"):
        opening.open_model(folders[1], keep=True)


@pytest.mark.parametrize("weights", ["", "w4g32"])
def test_a_second_plan_of_a_config_captures_nothing(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(families.llama(2).to_dict()))
    request = planning.PlanRequest(str(path), "t4", 16, 4, batch=2, weights=weights)
    first = planning.plan_config(request)
    captures_nothing(monkeypatch, planning, "capture_config")
    assert planning.plan_config(request).plan == first.plan
    path.write_text(json.dumps({**families.llama(2).to_dict(), "hidden_size": 128}))
    with pytest.raises(AssertionError, match="captured again"):
        planning.plan_config(request)
    with pytest.raises(AssertionError, match="captured again"):
        planning.plan_config(replace(request, weights="w8g32"))
