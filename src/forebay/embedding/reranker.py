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
from forebay.embedding.sentence_files import SentenceFiles
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.ir.plan import Budget


def is_reranker(folder: Path) -> bool:
    """Return whether a folder holds a model that scores texts."""
    try:
        names = json.loads(read_input(folder / "config.json"))["architectures"]
        return any(name.endswith("ForSequenceClassification") for name in names)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):  # said by who opens it
        return False


class Reranker(TextModel):
    """Scores documents for a query: `Reranker(model, budget=None)`.

    Args:
        model: A folder, or a name on the Hugging Face Hub, of a model for the classification of sequences.
        budget: Bytes for weights and activations, as for `wrap`. None: half of the free memory.

    Raises:
        CheckpointError: for files.
        PlanError: for a budget.
    """

    def __init__(
        self, model: str | os.PathLike[str], budget: Budget | int | str | dict[str, Any] | None = None
    ) -> None:
        super().__init__(model, budget, "AutoModelForSequenceClassification")
        config = self.streamed.module.config
        own = getattr(config, "sentence_transformers", None) or {}
        named = own.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
        self._sigmoid = config.num_labels == 1 if named is None else str(named).endswith("Sigmoid")

    def _read_settings(self, folder: Path) -> SentenceFiles:
        return SentenceFiles(folder)

    def _pads(self) -> bool:
        """The model finds the end of a text, or positions, by the padding that its config names."""
        return super()._pads() and self.tokenizer.pad_token_id == self.streamed.module.config.pad_token_id

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
        labels = int(self.streamed.module.config.num_labels)
        made = np.zeros((len(sentences), labels), np.float32)

        def compute(part: list[int]) -> None:
            first, second = zip(*(sentences[i] for i in part), strict=True)
            logits = self.streamed.module(**self._tokens(first, text_pair=list(second))).logits.float()
            made[part] = (torch.sigmoid(logits) if self._sigmoid else logits).numpy()

        if len(sentences):
            with self._running():
                self._batches([len(a) + len(b) for a, b in sentences], batch_size, compute)
        return made[:, 0] if labels == 1 else made

    def rank(
        self, query: str, documents: Sequence[str], top_k: int | None = None, batch_size: int = BATCH_SIZE
    ) -> list[dict[str, Any]]:
        """Order documents by how well they answer a query; of each its `corpus_id` and its `score`, the best first."""
        scores = self.predict([(query, document) for document in documents], batch_size)
        best = sorted(range(len(documents)), key=lambda i: -float(scores[i]))
        return [{"corpus_id": i, "score": float(scores[i])} for i in best[:top_k]]
