"""Scores of pairs of texts within a budget, with the methods of a `CrossEncoder`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.embedding.embedder import BATCH_SIZE, TextModel
from forebay.embedding.judgments import JUDGMENTS, Judgment, judges, judgment_of
from forebay.embedding.sentence_files import SentenceFiles
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.ir.plan import Budget


def is_reranker(folder: Path) -> bool:
    """Return whether a folder holds a model that scores documents: one that classifies sequences, or a causal one that
    its files or its name call a reranker."""
    model_type, classifies = _kind(folder)
    return classifies or (model_type in JUDGMENTS and judges(folder))


def _kind(folder: Path) -> tuple[str, bool]:
    """The model type of a folder, and whether the model classifies sequences."""
    try:
        config = json.loads(read_input(folder / "config.json"))
        names = config["architectures"]
        return str(config.get("model_type")), any(name.endswith("ForSequenceClassification") for name in names)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):  # said by who opens it
        return "", False


class Reranker(TextModel):
    """Scores documents for a query: `Reranker(model, budget=None)`.

    Args:
        model: A folder, or a name on the Hugging Face Hub, of a model that classifies sequences. Qwen3-Reranker,
            bge-reranker-v2-gemma and mxbai-rerank-v2, which are causal models, are asked by the prompts of their cards.
        budget: Bytes for weights and activations, as for `wrap`. None: half of the free memory.

    Raises:
        CheckpointError: for files.
        PlanError: for a budget.
    """

    def __init__(
        self, model: str | os.PathLike[str], budget: Budget | int | str | dict[str, Any] | None = None
    ) -> None:
        folder = resolve_model(model)
        model_type, classifies = _kind(folder)
        self.judgment = None if classifies or not model_type else judgment_of(model_type, folder)
        super().__init__(folder, budget, "AutoModelForCausalLM" if self.judgment else
                         "AutoModelForSequenceClassification")
        config = self.streamed.module.config
        self._labels = 1 if self.judgment else int(config.num_labels)
        own = getattr(config, "sentence_transformers", None) or {}
        named = own.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
        self._sigmoid = config.num_labels == 1 if named is None else str(named).endswith("Sigmoid")

    def _read_settings(self, folder: Path) -> SentenceFiles:
        return SentenceFiles(folder)

    def _pads(self) -> bool:
        """The model finds the end of a text, or positions, by the padding that its config names."""
        named = self.streamed.module.config.pad_token_id
        return self.judgment is not None or (super()._pads() and self.tokenizer.pad_token_id == named)

    def predict(self, sentences: Sequence[Sequence[str]], batch_size: int = BATCH_SIZE) -> np.ndarray:
        """Score pairs of texts.

        Args:
            sentences: The pairs.
            batch_size: Pairs at once at most; fewer where the budget asks for it.

        Returns:
            [N] float32, or [N, labels] of a model with several.

        Raises:
            PlanError: The budget has no room for a pair.
        """
        made = np.zeros((len(sentences), self._labels), np.float32)

        def compute(part: list[int]) -> None:
            pairs = [sentences[i] for i in part]
            made[part] = (self._logits(pairs) if self.judgment is None else self._judged(self.judgment, pairs)).numpy()

        if len(sentences):
            with self._running():
                self._batches([len(a) + len(b) for a, b in sentences], batch_size, compute)
        return made[:, 0] if self._labels == 1 else made

    def _logits(self, pairs: Sequence[Sequence[str]]) -> torch.Tensor:
        """[B, labels] of a model that classifies."""
        first, second = zip(*pairs, strict=True)
        found = self.streamed.module(**self._tokens(first, text_pair=list(second))).logits.float()
        return torch.sigmoid(found) if self._sigmoid else found

    def _judged(self, judgment: Judgment, pairs: Sequence[Sequence[str]]) -> torch.Tensor:
        """[B, 1] of a causal model, whose prompts end at the same place."""
        rows = [judgment.ids(self.tokenizer, a, b, self.max_seq_length) for a, b in pairs]
        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        logits = self.streamed.module(
            input_ids=ids, attention_mask=mask, logits_to_keep=1, use_cache=False).logits[:, -1].float()
        return judgment.scores(logits, self.tokenizer)[:, None]

    def rank(
        self, query: str, documents: Sequence[str], top_k: int | None = None, batch_size: int = BATCH_SIZE
    ) -> list[dict[str, Any]]:
        """Order documents by how well they answer a query; of each its `corpus_id` and its `score`, the best first."""
        scores = self.predict([(query, document) for document in documents], batch_size)
        best = sorted(range(len(documents)), key=lambda i: -float(scores[i]))
        return [{"corpus_id": i, "score": float(scores[i])} for i in best[:top_k]]
