"""Embeddings and scores within a budget, against transformers' modules in memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from embedding.folders import CONFIGS, save, save_modules
from selection import ALL

from forebay.embedding.embedder import Embedder
from forebay.embedding.reranker import Reranker, is_reranker
from forebay.embedding.sentence_files import is_embedder
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import PlanError

TEXTS = ["w1 w2 w3", "w4", " ".join(f"w{i}" for i in range(5, 40)), "w7 w7 w8 w9 w10 w11", "", "w50 w51"]
MEAN: dict[str, Any] = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def expected(model: Any, tokens: Any, texts: list[str], most: int, how: str) -> torch.Tensor:
    """A vector of each text by itself, so that nothing is padded."""
    rows = []
    for text in texts:
        given = tokens(text.strip(), truncation=True, max_length=most, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**given).last_hidden_state[0]
        rows.append({"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1], "max": hidden.amax(0)}[how])
    return torch.stack(rows)


@pytest.mark.parametrize("kind", tuple(CONFIGS) if ALL else ("bert", "modernbert", "qwen3"))
def test_embeddings(kind: str, tmp_path: Path) -> None:
    """Texts of other lengths, in batches, with little memory and with enough for all layers."""
    model, how = save(kind, tmp_path), "lasttoken" if kind == "qwen3" else "mean"
    save_modules(tmp_path, {"pooling_mode_lasttoken": True} if kind == "qwen3" else MEAN, prompts={
        "query": "w90 w91 "}, similarity_fn_name="dot")
    tokens = T.AutoTokenizer.from_pretrained(tmp_path)
    wanted = torch.nn.functional.normalize(expected(model, tokens, TEXTS, 16, how), dim=1)
    prompted = [f"w90 w91 {text}" for text in TEXTS]
    asked = torch.nn.functional.normalize(expected(model, tokens, prompted, 16, how), dim=1)
    assert is_embedder(tmp_path)
    small = Embedder(tmp_path, 1 << 30).streamed.sizes.weight_nbytes + 60_000
    for budget in (small, 4_000_000):
        lm = Embedder(tmp_path, budget)
        found = lm.encode(TEXTS, batch_size=4)
        assert found.dtype == np.float32 and np.abs(found - wanted.numpy()).max() < 1e-5
        assert lm.streamed.peak_nbytes <= budget
        assert all(p.is_meta for p in lm.streamed.module.parameters())
        assert np.abs(lm.encode_query(TEXTS) - asked.numpy()).max() < 1e-5
    assert np.array_equal(lm.encode_document(TEXTS[0]), lm.encode(TEXTS[0])) and lm.encode([]).shape == (0, 32)
    assert lm.encode(TEXTS, truncate_dim=5, convert_to_tensor=True).shape == (6, 5)
    assert torch.allclose(lm.similarity(found, found[:2]), wanted @ wanted[:2].T, atol=1e-5)
    with pytest.raises(ValueError, match="sentences must be text"):
        lm.encode([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="there is no prompt 'a'; the model has 'query'"):
        lm.encode("w1", prompt_name="a")
    with pytest.raises(PlanError, match="these inputs need more than"):
        Embedder(tmp_path, small - 60_000 + 5000).encode(TEXTS)
    with pytest.raises(PlanError, match=r"needs .* for weights at a time"):
        Embedder(tmp_path, 1000).encode(TEXTS)


def _noted(reads: list[object], read: Any, keys: Any) -> Any:
    reads.append(keys)
    return read(keys)


@pytest.mark.parametrize("how", ["cls", "max"])
def test_other_poolings_and_older_files(how: str, tmp_path: Path) -> None:
    model = save("bert", tmp_path)
    model.pooler = None
    model.save_pretrained(tmp_path)
    save_modules(tmp_path, {"pooling_mode": how}, normalize=False)
    lm = Embedder(tmp_path, "1MB")
    wanted = expected(model, T.AutoTokenizer.from_pretrained(tmp_path), TEXTS, 16, how)
    assert np.abs(lm.encode(TEXTS) - wanted.numpy()).max() < 1e-5


def test_layers_stay_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for all layers each is read once for all batches; with less, some are read again."""
    save("bert", tmp_path)
    least = Embedder(tmp_path, "1MB").streamed.sizes.weight_nbytes
    counts = []
    for budget in (4_000_000, least + 60_000):
        reads: list[object] = []
        lm = Embedder(tmp_path, budget)
        monkeypatch.setattr(lm.streamed, "_read", partial(_noted, reads, lm.streamed._read))
        lm.encode(TEXTS * 2, batch_size=3)
        counts.append(len(reads))
    assert counts[0] == 1 + 4 and counts[1] > 1 + 2 * 4


def test_scores_of_pairs(tmp_path: Path) -> None:
    model = save("bert", tmp_path, T.AutoModelForSequenceClassification, num_labels=1)
    tokens = T.AutoTokenizer.from_pretrained(tmp_path)
    pairs = [("w1 w2", text) for text in TEXTS]
    with torch.no_grad():
        wanted = torch.cat([torch.sigmoid(model(**tokens([a], [b], return_tensors="pt")).logits[0]) for a, b in pairs])
    assert is_reranker(tmp_path)
    lm = Reranker(tmp_path, "300kB")
    assert np.abs(lm.predict(pairs) - wanted.numpy()).max() < 1e-5
    best = lm.rank("w1 w2", TEXTS, top_k=2)
    assert [each["corpus_id"] for each in best] == wanted.argsort(descending=True)[:2].tolist()


@pytest.mark.parametrize("named", [None, 1])
def test_texts_without_padding_are_computed_one_by_one(tmp_path: Path, named: int | None) -> None:
    """The config names no token of padding, or another one than the tokenizer; then the tokenizer has none."""
    model = save("qwen3", tmp_path, T.AutoModelForSequenceClassification, num_labels=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": named}))
    tokens = T.AutoTokenizer.from_pretrained(tmp_path)
    pairs = [("w1 w2", text) for text in TEXTS if text]
    with torch.no_grad():
        wanted = [model(**tokens(*pair, truncation=True, max_length=60, return_tensors="pt")).logits.sigmoid().item()
                  for pair in pairs]
    assert np.abs(Reranker(tmp_path, "300kB").predict(pairs) - wanted).max() < 1e-5
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({name: v for name, v in json.loads(path.read_text()).items() if name != "pad_token"}))
    assert np.abs(Reranker(tmp_path, "300kB").predict(pairs) - wanted).max() < 1e-5
    lm = Embedder(tmp_path, "300kB")
    assert np.abs(lm.encode(TEXTS[:3]) - np.stack([lm.encode(text) for text in TEXTS[:3]])).max() < 1e-5


def test_texts_end_where_positions_do(tmp_path: Path) -> None:
    """Positions of XLM-RoBERTa begin after the one of padding."""
    save("xlm-roberta", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": int(1e30)}))
    lm = Embedder(tmp_path, "1MB")
    assert lm.max_seq_length == 64 and np.isfinite(lm.encode(" ".join(["w5"] * 90))).all()


def test_files_that_say_too_little_are_refused(tmp_path: Path) -> None:
    save("bert", tmp_path)
    save_modules(tmp_path, {"pooling_mode_mean_tokens": False})
    with pytest.raises(CheckpointError, match="names no pooling that is known"):
        Embedder(tmp_path, "1MB")
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.CNN", "path": ""}]')
    with pytest.raises(CheckpointError, match="a module of type 'CNN'"):
        Embedder(tmp_path, "1MB")
