"""Speculative steps: decode steps that check drafted tokens."""

from __future__ import annotations

from dataclasses import dataclass

REPLAY = 2  # tokens of the smallest step that computes accepted tokens again, for which there is room at any place


@dataclass(frozen=True)
class Speculation:
    """`steps` are the tokens per sequence of every step that checks drafted tokens, with logits at each, the largest
    first. Like decode steps they compute all sequences; no chunk of a prompt has one of these sizes, and their memory
    is that of decoding, after the growth of the cache. Of models whose states cannot take a token back one is over
    `REPLAY` tokens."""

    steps: tuple[int, ...] = ()
