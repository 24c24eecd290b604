"""Tensors in another float dtype than the model's: copies in the cache, made once, and the results of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_experts import random_model, small_config
from transformers import AutoModelForCausalLM

import forebay
from forebay.open_model import open_model
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.records import CheckpointError

IDS = torch.tensor([[5, 9, 2, 77, 31], [8, 8, 64, 3, 1]])


def stored(folder: Path, others: dict[str, torch.dtype]) -> Path:
    """A small mixture of experts in float32, but for tensors whose names contain one of `others`."""
    random_model(small_config("qwen3_moe", num_hidden_layers=1)).save_pretrained(folder)
    tensors = {name: value.to(next((dtype for part, dtype in others.items() if part in name), value.dtype))
               for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_tensors_are_cast_once_as_transformers_casts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")
    folder = stored(tmp_path / "model", {"mlp.gate.": torch.bfloat16, "q_norm": torch.float16, "embed": torch.float64})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    with forebay.wrap(folder, {"device": "2MiB"}, batch=2, prompt=5, new_tokens=4) as lm:
        assert torch.equal(lm.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None), want)
    copies = tmp_path / "cache" / "models"
    for again in (False, True):
        made = [path for path in copies.iterdir() if path.is_dir()]
        assert [len(load_file(path / "model.safetensors")) for path in made] == [3]
        if again:
            shutil.rmtree(made[0])
        _, checkpoint, files = open_model(folder, keep=True)
        assert checkpoint.states == open_checkpoint(folder).states, "jobs go on at any later start"
        assert {each.path for each in files.values()} == {str(folder / "model.safetensors"),
                                                          str(made[0] / "model.safetensors")}


def test_experts_in_another_dtype_are_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path, {"experts.3.up_proj": torch.bfloat16})
    with pytest.raises(CheckpointError, match="save the checkpoint in that dtype"):
        open_model(folder)
