"""The rows of a session's KV cache as transformers' generation handles a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Cache

from forebay.huggingface.inputs import Prompts
from forebay.runtime.run.rows import SequenceRows

if TYPE_CHECKING:
    from forebay.api import LanguageModel


class RowCache(Cache):
    """The cache of one call: `seen` columns of tokens, padding included, of which each row holds its own tokens.

    It lasts until the model is used for something else. Beams reorder its rows, assisted decoding crops them.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(layers=[])
        self.model = model
        self.rows: SequenceRows | None = None
        self.seen = 0
        self.new_tokens = 1  # room to plan for behind the prompts
        self.nameless = False  # of some tokens nothing but embeddings was given

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

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
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        self._held().crop(removed)
        self.seen -= removed

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        with self.model.resuming(self._held()):
            self._held().reorder(beam_idx)

    def empty(self, model: LanguageModel, new_tokens: int) -> None:
        """Hold nothing, and expect prompts of `model` with room for `new_tokens` behind them."""
        self.model, self.rows, self.seen, self.new_tokens = model, None, 0, new_tokens

    def serves(self, prompts: Prompts, new_tokens: int) -> bool:
        """Whether it still holds its rows, and so many tokens fit behind `prompts`; or nothing can be begun anew: these
        are not all there is."""
        columns, known = prompts.ids.shape[1], prompts.embeds is not None or not self.nameless
        if self.rows is None or columns <= self.seen or prompts.mask.shape[1] > columns or not known:
            return True
        if prompts.embeds is not None and not self.model.captured.embeds:
            return False
        return self.model.holds(self.rows) and columns - self.seen + new_tokens - 1 <= self.rows.room

    def begin(self, rows: SequenceRows, prompts: Prompts, new_tokens: int) -> torch.Tensor:
        """Logits of `SequenceRows.begin`."""
        self.rows, self.seen, self.nameless = rows, prompts.ids.shape[1], prompts.embeds is not None
        return rows.begin(prompts.rows(), new_tokens, prompts.embed_rows())

    def extend(
        self, ids: torch.Tensor, attention_mask: torch.Tensor | None, keep: int, embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, keep, V] of the last `keep` of ids [B, S], or of `embeds` [B, S, H]; the mask, if given, covers
        what was seen and these."""
        if embeds is not None and not self.model.captured.embeds:
            raise ValueError("inputs_embeds: this cache was begun with ids, whose steps take no embeddings; begin "
                             "again with the embeddings of all tokens")
        rows = self._held()
        if ids.shape[0] != rows.lengths.numel():
            raise ValueError(f"the cache holds {rows.lengths.numel()} sequences, input_ids {ids.shape[0]}")
        if attention_mask is not None and not torch.equal(attention_mask.cpu().bool().sum(1),
                                                          rows.lengths + ids.shape[1]):
            raise ValueError("attention_mask must keep every token behind the prompt, and the prompt's own padding")
        with self.model.resuming(rows):
            logits = rows.extend(ids, keep, None if embeds is None else list(embeds))
        self.nameless = self.nameless or embeds is not None
        self.seen += ids.shape[1]
        return logits

    def _held(self) -> SequenceRows:
        if self.rows is None:
            raise ValueError("the cache is empty; give the model a prompt first")
        return self.rows


def require_own(cache: object) -> None:
    """ValueError for a cache of transformers' own, which no step reads."""
    if cache is not None and not isinstance(cache, RowCache):
        raise ValueError(f"past_key_values must be what this model returned, not a {type(cache).__name__}: leave it "
                         "out")
