"""The inputs of one step of a model, as a record."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# What is known of a prompt's tokens in addition to ids, by the names of `StepInputs`: a tensor [P, ...] for each row.
Features = Mapping[str, Sequence[torch.Tensor]]


def counted_positions(start: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return positions [B, tokens, 3] that count tokens from `start` [B], as text has them."""
    return (start[:, None, None] + torch.arange(tokens)[:, None]).expand(-1, -1, 3)


@dataclass(frozen=True)
class PromptFeatures:
    """Embeddings in place of some tokens of a prompt, such as image tokens.

    Attributes:
        placed: [P] bool, which tokens these are.
        values: [P, ...] of all tokens, by the names of `StepInputs`.
    """

    placed: torch.Tensor
    values: Mapping[str, torch.Tensor]

    def keyed(self, ids: torch.Tensor) -> torch.Tensor:
        """Prompt [P] int64 with numbers below 0 in place of these tokens, because tokens of images have one id whatever
        they show. Equal runs of embeddings have equal numbers, others do not."""
        found, at = ids.clone(), self.placed.nonzero().flatten()
        for run in at.tensor_split((at.diff() > 1).nonzero().flatten() + 1):
            shown = hashlib.sha256()
            for name, rows in sorted(self.values.items()):
                if len(rows):
                    shown.update(name.encode() + rows[run].contiguous().view(torch.uint8).numpy().tobytes())
            found[run] = -1 - (int.from_bytes(shown.digest()[:7], "little") + torch.arange(len(run)))
        return found

    @property
    def position_shift(self) -> int:
        """How far rotary positions after the prompt are beyond the count of its tokens."""
        rows = self.values.get("positions")
        return 0 if rows is None else shift_after(rows)


def shift_after(positions: torch.Tensor) -> int:
    """Return how far the position after a prompt's [P, 3] is beyond P. It follows the last token: times within a video
    may be later than the text behind it."""
    return int(positions[-1].max()) + 1 - len(positions)


def joined_features(lengths: Sequence[int], given: Sequence[PromptFeatures | None]) -> Features | None:
    """Return the features of prompts of these lengths, of which some are text alone; None where all are."""
    first = next((each for each in given if each is not None), None)
    if first is None:
        return None

    def of_text(name: str, like: torch.Tensor, length: int) -> torch.Tensor:
        return counted_positions(torch.zeros(1, dtype=torch.int64), length)[0] if name == "positions" else like[:0]

    return {name: [of_text(name, like, length) if each is None else each.values[name]
                   for length, each in zip(lengths, given, strict=True)] for name, like in first.values.items()}


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step over S tokens in each of B rows; a Program reads those that it has, by these names.

    Attributes:
        input_ids: [B, S] int64; -1 where `inputs_embeds` stand for ids.
        start: [B] int64, tokens that each row's sequence has in the cache before the step.
        last: [B] int64, the token of the step whose logits are wanted; of steps that give scores the token after it.
        length: [B] int64, tokens of the call that each row belongs to, for rotary frequencies that follow them.
        batch_slots: [B] int64, the batch slots of the rows, where a prefill step computes some slots alone.
        inputs_embeds: [B, S, H].
        positions: [B, S, 3] int64, rotary positions of models whose images have them in three dimensions.
        deepstack: [B, S, N H], features that are added to hidden states after N first layers, where ids are -1.
        until: [B, S] int64, where the positions end that each token sees, of models whose images see themselves.
        count: [B] int64, tokens of the step that are real, for states that are not rewindable; all, if not given.
        refused: [B] int64, whether tokens of the last step were refused, so that such states go back; no, if not given.
        adapters: [B, width], 1 in the columns of each row's adapter; the base alone, if not given.
    """

    input_ids: torch.Tensor
    start: torch.Tensor
    last: torch.Tensor
    length: torch.Tensor | None = None
    batch_slots: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    deepstack: torch.Tensor | None = None
    until: torch.Tensor | None = None
    count: torch.Tensor | None = None
    refused: torch.Tensor | None = None
    adapters: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens per row."""
        return self.input_ids.shape[1]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return the inputs that are given."""
        usual = {"count": torch.full_like(self.start, self.tokens), "refused": torch.zeros_like(self.start)}
        return usual | {name: value for name, value in vars(self).items() if value is not None}

    def counted(self) -> dict[str, torch.Tensor]:
        """Return the kinds of tokens where no others are given: text."""
        positions = counted_positions(self.start, self.tokens)
        return {name: value for name, value in (("positions", positions), ("until", positions[:, :, 0] + 1))
                if getattr(self, name) is None}
