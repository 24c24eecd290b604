"""Prompts as callers give them: tensors, lists or a tokenizer's whole output, padded on either side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from forebay.runtime.run.step_inputs import Features


@dataclass(frozen=True)
class Prompts:
    """Token ids [B, T] int64 as they were given, and which of them count; the rest is padding. Where `placed` [B, T] is
    true, `features` are what is computed, by the names of a step's inputs [B, T, ...], and ids, or -1 where there are
    none, the kinds of the tokens."""

    ids: torch.Tensor
    mask: torch.Tensor  # [B, T] bool; before T stand tokens that a cache holds, if any
    features: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: torch.Tensor | None = None
    masked: bool = True  # by the caller

    @property
    def embeds(self) -> torch.Tensor | None:
        """Embeddings [B, T, H] of the tokens that are `placed`."""
        return self.features.get("inputs_embeds")

    def rows(self) -> list[torch.Tensor]:
        """The tokens of each row, -1 where their features stand for them."""
        ids = self.ids if self.placed is None else self.ids.masked_fill(self.placed, -1)
        return [row[keep] for row, keep in zip(ids, self.mask, strict=True)]

    def feature_rows(self) -> Features | None:
        """The features [P, ...] of each row."""
        return {name: [row[keep] for row, keep in zip(value, self.mask, strict=True)]
                for name, value in self.features.items()} or None

    def repeated(self, count: int) -> Prompts:
        """The same with each row `count` times, one after the other."""
        def each(value: torch.Tensor) -> torch.Tensor:
            return value.repeat_interleave(count, 0)

        return replace(self, ids=each(self.ids), mask=each(self.mask),
                       features={name: each(value) for name, value in self.features.items()},
                       placed=None if self.placed is None else each(self.placed))

    def without(self, pad: int) -> Prompts:
        """The same where the token `pad` does not count. ValueError for a row of nothing else."""
        mask = self.ids != pad
        _require_tokens(mask)
        return replace(self, mask=mask)

    @property
    def with_images(self) -> bool:
        """Whether features stand for some tokens alone."""
        return self.placed is not None and not bool(self.placed.all())

    @property
    def nameless(self) -> bool:
        """Whether nothing but embeddings is known of the tokens."""
        return self.embeds is not None and int(self.ids[0, 0]) < 0

    @property
    def longest(self) -> int:
        return int(self.mask.sum(1).max())

    def at_the_right(self) -> Prompts:
        """The same with every row's padding on its left."""
        after = self.mask.flip(1).int().argmax(1)  # [B] padding behind the tokens
        if not bool(after.any()) or self.mask.shape != self.ids.shape:
            return self

        def moved(given: torch.Tensor) -> torch.Tensor:
            return torch.stack([row.roll(int(n), 0) for row, n in zip(given, after, strict=True)])

        return replace(self, ids=moved(self.ids), mask=moved(self.mask),
                       features={name: moved(value) for name, value in self.features.items()},
                       placed=None if self.placed is None else moved(self.placed))


def _require_tokens(mask: torch.Tensor) -> None:
    for row in (~mask.any(1)).nonzero()[:1, 0].tolist():
        raise ValueError(f"row {row} has no token that counts; attention_mask is all 0, or all are padding")


def read_prompts(ids: Any, attention_mask: Any, vocab_size: int, seen: int = 0, holes: bool = False) -> Prompts:
    """Prompts from ids [B, T] or [T], as a tensor, an array or lists; lists of unequal length are padded on the left.

    `attention_mask` [B, T] is 0 on padding, at either end of a row, or with `holes` anywhere; it may be [B, seen + T]
    behind a cache that has seen so many columns. ValueError for anything else, naming the row.
    """
    if isinstance(ids, list | tuple) and ids and isinstance(ids[0], list | tuple):
        if attention_mask is None and len({len(row) for row in ids}) > 1:
            longest = max(map(len, ids))
            attention_mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
            ids = [[0] * (longest - len(row)) + list(row) for row in ids]
        elif len({len(row) for row in ids}) > 1:
            raise ValueError("input_ids has rows of unequal length; pad them as attention_mask is padded, or leave the "
                             "mask out")
    if isinstance(ids, str) or (isinstance(ids, list | tuple) and any(isinstance(part, str) for part in ids)):
        raise ValueError("input_ids is text; give what the tokenizer makes of it: tokenizer(text, return_tensors='pt')")
    found = None if ids is None else torch.as_tensor(ids)
    if found is not None and found.dim() == 1 and not isinstance(ids, torch.Tensor):
        found = found[None]
    if found is None or found.dim() != 2 or found.numel() == 0:
        raise ValueError("input_ids must be a tensor [B, T] with at least one token")
    if found.is_floating_point():
        raise ValueError(f"input_ids must be whole numbers, found {found.dtype}")
    if found.min() < 0 or found.max() >= vocab_size:
        raise ValueError(f"input_ids must lie in [0, {vocab_size})")
    found = found.cpu().to(torch.int64)
    if attention_mask is None:
        return Prompts(found, torch.ones_like(found, dtype=torch.bool), masked=False)
    mask = torch.as_tensor(attention_mask).cpu().bool()
    if mask.dim() == 1 and not isinstance(attention_mask, torch.Tensor):
        mask = mask[None]
    if mask.shape != found.shape and (not seen or mask.shape != (len(found), seen + found.shape[1])):
        raise ValueError(f"attention_mask has shape {list(mask.shape)}, input_ids {list(found.shape)}: a step "
                         "reads masks [B, T], 1 where a token counts")
    edges = mask.int().diff(dim=1, prepend=torch.zeros_like(mask[:, :1]).int()) == 1  # where runs of ones begin
    _require_tokens(mask)
    for row in (edges.sum(1) > 1).nonzero()[:1, 0].tolist() if not holes else ():
        raise ValueError(f"row {row} has a hole: attention_mask may be 0 at the left and right end only, but for "
                         "position_ids that count the rest")
    return Prompts(found, mask)


def read_embeds(embeds: Any, ids: Any, attention_mask: Any, vocab_size: int, holes: bool = False) -> Prompts:
    """Prompts from embeddings [B, T, H], with what `read_prompts` takes beside. ValueError where they do not fit."""
    found = torch.as_tensor(embeds)
    if found.dim() != 3 or not found.is_floating_point() or found.numel() == 0:
        raise ValueError("inputs_embeds must be floats [B, T, H] with at least one token, as "
                         "get_input_embeddings()(ids) gives them")
    blank = torch.zeros(found.shape[:2], dtype=torch.int64)
    known = read_prompts(blank if ids is None else ids, attention_mask, vocab_size, 0, holes)
    if known.ids.shape != found.shape[:2]:
        raise ValueError(f"inputs_embeds has shape {list(found.shape)}, input_ids {list(known.ids.shape)}")
    return replace(known, ids=blank - 1 if ids is None else known.ids, masked=known.masked or ids is None,
                   features={"inputs_embeds": found.detach().cpu()}, placed=torch.ones_like(blank, dtype=torch.bool))


def merge_mapping(inputs: Any, options: dict[str, Any]) -> Any:
    """Move the entries of `inputs`, where it is a mapping such as a BatchEncoding, to `options`; the rest of it."""
    if not isinstance(inputs, Mapping):
        return inputs
    twice = sorted(inputs.keys() & options.keys())
    if twice:
        raise ValueError(f"{twice[0]} is given twice, in the first argument and by name")
    options.update(inputs)
    return None


def take_prompts(
    inputs: Any, options: dict[str, Any], vocab_size: int, token_types: bool, bos: int | None = None, seen: int = 0
) -> Prompts:
    """The prompts of a call, taken out of `inputs` and `options`; where there are none, one that is the token `bos`.
    `seen` as for `read_prompts`; `inputs_embeds` as for `read_embeds`.

    `token_type_ids` are dropped unless the model gives them a meaning (`token_types`), which is refused: a step reads
    input_ids alone.
    """
    names = {"input_ids": options.pop("input_ids", None), "inputs": options.pop("inputs", None)}
    given = [ids for ids in (inputs, *names.values()) if ids is not None]
    if len(given) > 1:
        raise ValueError("prompts are given twice; name input_ids once")
    if options.pop("token_type_ids", None) is not None and token_types:
        raise ValueError("this model adds token_type_ids to its embeddings, which a captured step does not; leave them "
                         "out (tokenizer(…, return_token_type_ids=False))")
    embeds = options.pop("inputs_embeds", None)
    if embeds is not None:
        return read_embeds(embeds, given[0] if given else None, options.pop("attention_mask", None), vocab_size,
                           True)
    if not given and bos is not None:
        given = [[[bos]]]
    return read_prompts(given[0] if given else None, options.pop("attention_mask", None), vocab_size, seen,
                        True)


def check_positions(
    positions: torch.Tensor | None, mask: torch.Tensor | None, held: torch.Tensor | None, width: int
) -> None:
    """ValueError unless `positions` [B, width] count the tokens that `mask` keeps, behind the `held` [B] of a cache."""
    if positions is None:
        return
    if mask is not None:
        kept = mask.cpu().bool()
        counted, kept = (kept.cumsum(1) - 1)[:, -width:], kept[:, -width:]
    else:
        counted = torch.arange(width) + (0 if held is None else held[:, None])
        kept = torch.ones_like(counted, dtype=torch.bool)
    found = torch.as_tensor(positions).cpu()
    if found.dim() != 2 or found.shape[1] != width or len(found) not in (1, len(counted)) or bool(
            ((found != counted) & kept).any()):
        raise ValueError("position_ids: a step counts the tokens that attention_mask keeps, from 0; leave them out")
