"""GGUF files of mixtures of experts: read packed, the tokens of transformers on what the blocks stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prompted_experts import smallest
from selection import at_length
from tiny_gguf import write_model
from transformers import AutoModelForCausalLM

import forebay
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.resolve import resolve_model

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
# Of several types gates and values differ, and become rows of the widest.
MODELS = [("qwen3moe", "", ("Q4_0", "Q8_0", "Q5_1")), ("llama", "mixtral", ("Q4_1",)),
          at_length("qwen2moe", "", ("Q8_0",)), at_length("qwen3moe", "", ("Q4_0",))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize(("architecture", "model_type", "kinds"), MODELS)
def test_tokens_are_those_of_the_values(tmp_path: Path, architecture: str, model_type: str, kinds: Any) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, architecture, False, kinds=kinds, loadable=True, model_type=model_type)
    model = AutoModelForCausalLM.from_pretrained(convert_gguf(path, tmp_path / "values")).eval()
    folder = resolve_model(path)
    packed = {name: each for name, each in open_checkpoint(folder).tensors.items() if ".experts." in name}
    assert len(packed) == 4 and all(each.packed is not None and len(each.packed.shape) == 3 for each in packed.values())
    for name, record in packed.items():
        values, theirs = read_dequantized(record), model.get_parameter(name)
        assert torch.equal(values, theirs) if len(kinds) == 1 else (values - theirs).norm() < 0.005 * theirs.norm()
        theirs.data = values
    ids = torch.randint(3, 288, (3, 7), generator=torch.Generator().manual_seed(1))
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    for budget in (smallest(folder), 16 << 20):
        lm = forebay.wrap(folder, {"device": budget, "disk": tmp_path}, batch=3, prompt=7, new_tokens=6)
        assert torch.equal(lm.generate(ids, max_new_tokens=6, do_sample=False), want), budget
        lm.close()
