"""The rows of a session's KV cache as transformers' generation handles a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache

from forebay.call_turns import ModelCall
from forebay.huggingface.inputs import Prompts
from forebay.rewriter.capture.cache_name import CACHE_NAMES
from forebay.runtime.run.rows import SequenceRows
from forebay.step_model import StepModel


class RowCache(Cache):
    """The cache of one call: `seen` columns of tokens, padding included, of which each row holds its own tokens.

    It lasts until the model is used for something else. Beams reorder its rows, assisted decoding crops them.
    """

    def __init__(self, model: StepModel, call: ModelCall) -> None:
        super().__init__(layers=[])
        self.model = model
        self.call = call  # that uses it, or used it last
        self.rows: SequenceRows | None = None
        self.seen = 0
        self.tokens = 0  # of a row, prompt and answer, to plan for
        self.limit = 0  # columns, behind which there are only drafts of tokens that nobody wants; 0: none known
        self.skipped = 0  # such columns, which count as seen
        self.nameless = False  # of some tokens nothing but embeddings was given

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    @property
    def is_croppable(self) -> bool:
        return self.model.captured.rewindable

    @property
    def is_linear(self) -> list[bool]:
        """Tell transformers that the cache's content counts as tokens: to transformers a cache of no layers has none
        that hold any."""
        return [False]

    @property
    def lengths(self) -> torch.Tensor:
        """[B] tokens of each row, without padding."""
        return self._held().lengths

    def activate_past_recording(self) -> None:
        """Nothing to do: tokens that are taken back are overwritten by those that follow."""

    def __deepcopy__(self, memo: object) -> RowCache:
        raise ValueError("a cache lies in the plan's memory, which has room for one: it cannot be copied; go on from "
                         "it, or give the whole prompt again")

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -`tokens_to_remove` tokens of every row; positive numbers are lengths to keep."""
        tokens_to_remove = int(tokens_to_remove)  # a tensor of transformers 5.17's
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        skipped = min(removed, self.skipped)
        self._held().crop(removed - skipped)
        self.seen, self.skipped = self.seen - removed, self.skipped - skipped

    @contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        """Let steps skip what stands behind `limit` columns, as long as a call drafts; 0: compute all."""
        self.limit = limit
        try:
            yield
        finally:
            self.limit = 0

    def beyond(self, ids: torch.Tensor | None) -> int:
        """Return how many of the columns of `ids` [B, S], which come next, stand behind the limit."""
        return max(0, self.seen + ids.shape[1] - self.limit) if self.limit and ids is not None else 0

    def skip(self, columns: int) -> None:
        """Count `columns` as seen that were not computed; they are to be taken back before any others come."""
        self.seen, self.skipped = self.seen + columns, self.skipped + columns

    def expected(self, prompt: int) -> int:
        """Return how many tokens are to be planned for behind prompts of so many."""
        return max(1, self.tokens - prompt)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        with self.model.resuming(self._held(), self.call):
            self._held().reorder(beam_idx)

    def empty(self, model: StepModel, tokens: int, call: ModelCall) -> None:
        """Hold nothing, and expect prompts of `model` in `call`, which with their answers have `tokens` at most."""
        self.model, self.call, self.tokens = model, call, tokens
        self.rows, self.seen, self.skipped = None, 0, 0

    def serves(self, prompts: Prompts, new_tokens: int) -> bool:
        """Return whether it still holds its rows, and so many tokens fit behind `prompts`; or nothing can be begun
        anew: these are not all there is."""
        columns, known = prompts.ids.shape[1], prompts.embeds is not None or not self.nameless
        if self.rows is None or columns <= self.seen or prompts.mask.shape[1] > columns or not known:
            return True
        if prompts.embeds is not None and not self.model.captured.embeds:
            return False
        return self.model.holds(self.rows) and columns - self.seen + new_tokens - 1 <= self.rows.room

    def begin(self, call: ModelCall, rows: SequenceRows, prompts: Prompts, new_tokens: int) -> torch.Tensor:
        """Logits of `SequenceRows.begin`, for `call`."""
        self.call = call
        self.rows, self.seen, self.nameless = rows, prompts.ids.shape[1], prompts.embeds is not None
        return rows.begin(prompts.rows(), new_tokens, prompts.feature_rows())

    def extend(
        self, call: ModelCall, ids: torch.Tensor, attention_mask: torch.Tensor | None, keep: int,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [B, keep, V] of the last `keep` of ids [B, S], or of `embeds` [B, S, H], for `call`; the mask, if
        given, covers what was seen and these."""
        if embeds is not None and not self.model.captured.embeds:
            raise ValueError("inputs_embeds: this cache was begun with ids, whose steps take no embeddings; begin "
                             "again with the embeddings of all tokens")
        rows = self._held()
        if self.skipped:
            raise ValueError("the cache counts drafts that it does not hold; crop them first")
        if ids.shape[0] != rows.lengths.numel():
            raise ValueError(f"the cache holds {rows.lengths.numel()} sequences, input_ids {ids.shape[0]}")
        if attention_mask is not None and not torch.equal(attention_mask.cpu().bool().sum(1),
                                                          rows.lengths + ids.shape[1]):
            raise ValueError("attention_mask must keep every token after the prompt, and the prompt's own padding")
        with self.model.resuming(rows, call):
            self.call = call
            logits = rows.extend(ids, keep, None if embeds is None else {"inputs_embeds": list(embeds)})
        self.nameless = self.nameless or embeds is not None
        self.seen += ids.shape[1]
        return logits

    def _held(self) -> SequenceRows:
        if self.rows is None:
            raise ValueError("the cache is empty; give the model a prompt first")
        return self.rows


def take_cache(arguments: dict[str, Any]) -> RowCache | None:
    """Take the cache out of `arguments`, by whatever name it was given; None if there is none.

    Raises:
        ValueError: It is a cache of transformers' own, which no step reads, or there are two.
    """
    names = [name for name, value in arguments.items() if name in CACHE_NAMES or isinstance(value, Cache)]
    given = {name: cache for name in sorted(names) if (cache := arguments.pop(name)) is not None}
    for name, cache in given.items():
        if not isinstance(cache, RowCache):
            raise ValueError(f"{name} must be what this model returned, not a {type(cache).__name__}: leave it out")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: the cache is given twice; give it once")
    return next(iter(given.values()), None)
