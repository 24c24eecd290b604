"""A model with real weights, exported once in each format: every client gives Forebay's own greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from exported.clients import by_genai, by_onnxruntime, by_torch

import forebay
from forebay.rewriter.checkpoints.config import read_eos

PROMPTS = ("The capital of France is", "Once upon a time, in a village by the sea, there lived", "Water boils at")
NEW = 32


class Demo(NamedTuple):
    folder: Path
    rows: list[torch.Tensor]  # of unequal length
    wanted: torch.Tensor  # [prompts, NEW], Forebay's own


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Demo:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    rows = [torch.tensor(tokenizer(text).input_ids) for text in PROMPTS]
    assert len({len(row) for row in rows}) == len(rows)
    return Demo(demo_folder, rows, tokens(demo_folder, rows))


def tokens(model: Path, rows: list[torch.Tensor]) -> torch.Tensor:
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    with forebay.wrap(model, "1GiB", batch=len(rows), prompt=width, new_tokens=NEW) as lm:
        return lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                           pad_token_id=0)[:, width:]


def test_onnx(demo: Demo, tmp_path: Path) -> None:
    out = forebay.export(demo.folder, tmp_path / "out", "onnx")
    assert by_onnxruntime(out, demo.rows, NEW) == demo.wanted.tolist()
    for row, wanted in zip(demo.rows, demo.wanted.tolist(), strict=True):
        found = by_genai(out, row, NEW)
        assert found == wanted[: len(found)] and (len(found) == NEW or wanted[len(found)] in read_eos(out))


def test_torch_program(demo: Demo, tmp_path: Path) -> None:
    out = forebay.export(demo.folder, tmp_path / "out", "pt2")
    (found,) = by_torch({out: demo.rows}, NEW)
    assert torch.equal(found, demo.wanted)


def test_bundle(demo: Demo, tmp_path: Path) -> None:
    out = forebay.export(demo.folder, tmp_path / "out", budget="300MB")
    assert torch.equal(tokens(out, demo.rows), demo.wanted)
