"""Embeddings of texts within a budget, with the methods of a `SentenceTransformer`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.commands.prompts import load_tokenizer
from forebay.default_budget import budget_or_default
from forebay.embedding.pooling import pool
from forebay.embedding.sentence_files import SentenceFiles, read_sentence_files, read_settings
from forebay.modules.open_folder import open_streamed
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.plan import Budget, PlanError

BATCH_SIZE = 32
Dense = tuple[torch.Tensor, torch.Tensor | None, torch.nn.Module]  # weight, bias, activation


class TextModel:
    """A model that reads batches of texts, whose layers are streamed.

    Args:
        model: A folder, or a name on the Hugging Face Hub.
        budget: Bytes for weights and activations, as for `wrap`.
        auto: transformers' class of its kind.
    """

    def __init__(self, model: str | os.PathLike[str], budget: Budget | int | str | dict[str, Any] | None,
                 auto: str) -> None:
        self.folder = resolve_model(model)
        self.settings = self._read_settings(self.folder)
        self.budget_nbytes = budget_or_default(budget).device
        self.streamed = open_streamed(self.settings.transformer, auto)
        self.tokenizer = load_tokenizer(self.settings.transformer)
        self.max_seq_length = self._most_tokens()
        self._turn, self._held = threading.RLock(), False

    @property
    def fingerprint(self) -> str:
        """Digest of this model's files."""
        return open_checkpoint(self.settings.transformer).fingerprint

    def _read_settings(self, folder: Path) -> SentenceFiles:
        return read_sentence_files(folder)

    def _most_tokens(self) -> int | None:
        config = self.streamed.module.config
        named = self.settings.most_tokens or self.tokenizer.model_max_length
        limit = _positions(self.streamed.module) or getattr(config, "max_position_embeddings", None)
        found = min(named, limit) if limit and limit > 0 else named
        return found if found < 1 << 30 else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep weights in memory from one call of this thread to the next; calls of others wait."""
        with self._turn, self.streamed.running(self.budget_nbytes, stay=True):
            self._held = True
            try:
                yield
            finally:
                self._held = False

    @contextmanager
    def _running(self) -> Iterator[None]:
        """One thread at a time computes, as its memory is the budget."""
        with self._turn:
            if self._held:
                yield
                return
            with self.streamed.running(self.budget_nbytes, stay=True):
                yield

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Tokens of texts, as far as they are read."""
        return sum(map(len, self.tokenizer(list(texts), truncation=True, max_length=self.max_seq_length)["input_ids"]))

    def _pads(self) -> bool:
        """Return whether texts of other lengths can be computed together."""
        return self.tokenizer.pad_token_id is not None

    def _tokens(self, texts: Sequence[Any], **more: Any) -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(list(texts), padding=self._pads(), truncation=True, max_length=self.max_seq_length,
                                   return_tensors="pt", **more))

    def _batches(self, lengths: Sequence[int], size: int, compute: Any) -> None:
        """Call `compute` with the numbers of texts of each batch, the longest first; with smaller batches where memory
        asks for it. PlanError where one text alone has no room."""
        left, size = sorted(range(len(lengths)), key=lambda i: -lengths[i]), max(1, size) if self._pads() else 1
        while left:
            part = left[:size]
            try:
                compute(part)
            except PlanError:
                if len(part) == 1:
                    raise
                size = max(1, len(part) // 2)
                continue
            left = left[len(part):]


class Embedder(TextModel):
    """Makes embeddings of texts: `Embedder(model, budget=None)`.

    Args:
        model: A folder, or a name on the Hugging Face Hub. Its files of sentence-transformers say how vectors are made.
        budget: Bytes for weights and activations, as for `wrap`. None: half of the free memory.

    Raises:
        CheckpointError: for files.
        PlanError: for a budget.
    """

    def __init__(
        self, model: str | os.PathLike[str], budget: Budget | int | str | dict[str, Any] | None = None
    ) -> None:
        super().__init__(model, budget, "AutoModel")
        self.prompts, self.default_prompt_name = self.settings.prompts, self.settings.default_prompt
        self._dense = [_dense(path) for path in self.settings.dense]

    def get_sentence_embedding_dimension(self) -> int:
        """Width of an embedding."""
        width = int(self.streamed.module.config.hidden_size) * len(self.settings.poolings)
        return len(self._dense[-1][0]) if self._dense else width

    def encode(
        self, sentences: str | Sequence[str], prompt_name: str | None = None, prompt: str | None = None,
        batch_size: int = BATCH_SIZE, show_progress_bar: bool | None = None, *, convert_to_numpy: bool = True,
        convert_to_tensor: bool = False, normalize_embeddings: bool = False, truncate_dim: int | None = None,
    ) -> Any:
        """Make embeddings, as `SentenceTransformer.encode` does.

        Args:
            sentences: One text, or several.
            prompt_name: Name of one of `prompts`, which goes in front of each text.
            prompt: The text itself that goes in front.
            batch_size: Texts at once at most; fewer where the budget asks for it.
            show_progress_bar: Shows none.
            convert_to_numpy: Whether an array is returned, else a list of tensors.
            convert_to_tensor: Whether one tensor is returned.
            normalize_embeddings: Whether vectors have length 1.
            truncate_dim: How many first numbers of a vector are kept.

        Returns:
            [N, D] float32, or [D] of one text.

        Raises:
            ValueError: There is no such prompt, or a sentence is no text.
            PlanError: The budget has no room for a text.
        """
        del show_progress_bar
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("sentences must be text, or a list of texts")
        before = self._prompt(prompt_name, prompt)
        made = np.zeros((len(texts), min(self.get_sentence_embedding_dimension(), truncate_dim or 1 << 30)), np.float32)
        skipped = 0 if self.settings.include_prompt or not before else self._prompt_tokens(before)

        def compute(part: list[int]) -> None:
            made[part] = self._vectors([before + texts[i] for i in part], skipped, truncate_dim,
                                       normalize=normalize_embeddings).numpy()

        if texts:
            with self._running():
                self._batches([len(text) for text in texts], batch_size, compute)
        found = made[0] if isinstance(sentences, str) else made
        if convert_to_numpy and not convert_to_tensor:
            return found
        tensor = torch.from_numpy(found)
        return tensor if convert_to_tensor or isinstance(sentences, str) else [*tensor]

    def encode_query(self, sentences: str | Sequence[str], **given: Any) -> Any:
        """`encode` with the prompt for queries, where there is one."""
        return self.encode(sentences, **{"prompt_name": self._role("query"), **given})

    def encode_document(self, sentences: str | Sequence[str], **given: Any) -> Any:
        """`encode` with the prompt for documents, where there is one."""
        return self.encode(sentences, **{"prompt_name": self._role("document", "passage", "corpus"), **given})

    def similarity(self, first: Any, second: Any) -> torch.Tensor:
        """Compare embeddings [N, D] and [M, D], as the model's settings say; [N, M]."""
        a, b = (torch.atleast_2d(torch.as_tensor(each)) for each in (first, second))
        how = self.settings.similarity
        if how == "cosine":
            return torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T
        if how == "dot":
            return a @ b.T
        return -torch.cdist(a, b, p=1.0 if how == "manhattan" else 2.0)

    def _vectors(self, texts: list[str], skipped: int, width: int | None, *, normalize: bool) -> torch.Tensor:
        given = self._tokens([text.strip().lower() if self.settings.lower else text.strip() for text in texts])
        hidden = self.streamed.module(**given).last_hidden_state.float()
        mask = given["attention_mask"].clone()
        if skipped:
            mask[mask.cumsum(1) <= skipped] = 0
        found = pool(hidden, mask, self.settings.poolings)
        for weight, bias, activation in self._dense:
            found = activation(torch.nn.functional.linear(found, weight, bias))
        found = found[:, :width]
        return torch.nn.functional.normalize(found, dim=1) if normalize or self.settings.normalize else found

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        if prompt is not None:
            return prompt
        name = name if name is not None else self.default_prompt_name
        if name is not None and name not in self.prompts:
            raise ValueError(f"prompt_name: there is no prompt {name!r}; the model has "
                             f"{', '.join(map(repr, self.prompts)) or 'none'}")
        return "" if name is None else self.prompts[name]

    def _prompt_tokens(self, prompt: str) -> int:
        """Tokens of a prompt in front of a text, which does not end at it."""
        ids = self.tokenizer(prompt)["input_ids"]
        return len(ids) - (len(ids) > 1 and ids[-1] in (self.tokenizer.sep_token_id, self.tokenizer.eos_token_id))

    def _role(self, *names: str) -> Any:
        return next((name for name in names if name in self.prompts), None)


def _positions(module: torch.nn.Module) -> int | None:
    """Tokens that a table has positions for, which count from after the one of padding (RoBERTa); None without one."""
    return next((each.num_embeddings - each.padding_idx - 1 for name, each in module.named_modules()
                 if isinstance(each, torch.nn.Embedding) and name.endswith("position_embeddings")
                 and each.padding_idx is not None), None)


def _dense(folder: Path) -> Dense:
    """A matrix of sentence-transformers, in float32."""
    checkpoint = open_checkpoint(folder)
    records = {name: record for name, record in checkpoint.tensors.items() if record.packed is None}
    if "linear.weight" not in records:
        raise CheckpointError(f"{folder} has no linear.weight")
    settings = read_settings(folder / "config.json", {})
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid"):
        raise CheckpointError(f"{folder / 'config.json'}: activation {activation!r} is not known")
    bias = read_tensor(records["linear.bias"]).float() if "linear.bias" in records else None
    return read_tensor(records["linear.weight"]).float(), bias, getattr(torch.nn, activation)()
