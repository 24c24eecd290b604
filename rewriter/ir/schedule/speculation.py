"""Speculative steps: decode steps that check drafted tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """`steps` are the tokens per sequence of every step that checks drafted tokens, with logits at each, the largest
    first. Like decode steps they compute all sequences; no chunk of a prompt has one of these sizes, and their memory
    is that of decoding, after the growth of the cache."""

    steps: tuple[int, ...] = ()
