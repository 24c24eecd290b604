"""A model with real weights, exported once in each format: every client gives Forebay's own greedy tokens.

With FOREBAY_TEST_ALL=1 (`make test-all`) as a bundle and as programs of torch too, which smaller models stand for
otherwise (`test_bundle.py`, `test_pt2.py`), all prompts in onnxruntime-genai, and packed weights: onnxruntime's logits
are Forebay's.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from exported.clients import EXAMPLES, by_genai, by_onnxruntime, by_torch
from selection import ALL

import forebay
from forebay.kernels.build.compile import compiler
from forebay.rewriter.checkpoints.config import read_eos
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

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


@pytest.mark.all
def test_onnx(demo: Demo, tmp_path: Path) -> None:
    out = forebay.export(demo.folder, tmp_path / "out", "onnx")
    assert by_onnxruntime(out, demo.rows, NEW) == demo.wanted.tolist()
    for row, wanted in zip(demo.rows[: None if ALL else 1], demo.wanted.tolist(), strict=False):
        found = by_genai(out, row, NEW)
        assert found == wanted[: len(found)] and (len(found) == NEW or wanted[len(found)] in read_eos(out))


@pytest.mark.all
@pytest.mark.parametrize("kind", ["pt2", pytest.param("aoti", marks=pytest.mark.skipif(
    compiler() is None, reason="no C++ compiler"))])
def test_torch_program(demo: Demo, kind: Literal["pt2", "aoti"], tmp_path: Path) -> None:
    out = forebay.export(demo.folder, tmp_path / "out", kind)
    (found,) = by_torch({out: demo.rows}, NEW)
    assert torch.equal(found, demo.wanted)


@pytest.mark.all
def test_bundle(demo: Demo, tmp_path: Path) -> None:
    out = forebay.export(demo.folder, tmp_path / "out", budget="300MB")
    assert torch.equal(tokens(out, demo.rows), demo.wanted)


@pytest.mark.all
@pytest.mark.parametrize("weights", ["w4g32", "w8"])
def test_logits_over_packed_weights(demo: Demo, weights: str, tmp_path: Path) -> None:
    """Activations are float32 on both sides; lows of groups are no multiples of their scales."""
    quantize_model(demo.folder, tmp_path / "q", Wish(weights, head=True, embeddings=True))
    out = forebay.export(tmp_path / "q", tmp_path / "out", "onnx")
    ids = demo.rows[1][None]
    with forebay.wrap(tmp_path / "q", "1GiB", batch=1, prompt=ids.shape[1]) as lm:
        wanted = lm(ids).logits.double()
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), None, ["CPUExecutionProvider"])
    fed = {"input_ids": ids.numpy(), "attention_mask": np.ones(ids.shape, np.int64),
           "position_ids": np.arange(ids.shape[1])[None]}
    for given in session.get_inputs()[3:]:
        fed[given.name] = np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32)
    found = torch.from_numpy(session.run(["logits"], fed)[0])
    assert found.shape == wanted.shape and float((found - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize(("name", "prompts"), [
    ("run_onnx", [[5], []]), ("run_onnx", []), ("run_pt2", [[5], []]), ("run_pt2", []), ("run_genai", [])])
def test_examples_refuse_prompts_without_a_token(name: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(ValueError, match="no token"):
        importlib.import_module(name).generate("no-such-folder", prompts, 1)
