"""The ranges of a layer's attention scores, so that partial softmaxes can share a maximum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreRange:
    """Decode attention of `layer`, on a GPU, takes the maximum phi for every share of a row whose largest score x has
    phi + low < x < phi + high, and computes the others again (FlashDecoding++Next, section III)."""

    layer: int
    phi: float
    low: float
    high: float


def check_ranges(ranges: Sequence[ScoreRange]) -> None:
    """ValueError, which begins with the number and the field, where a range is none, or its layer has another."""
    known: set[int] = set()
    for i, r in enumerate(ranges):
        if r.layer in known:
            raise ValueError(f"[{i}].layer: layer {r.layer} has a range already")
        known.add(r.layer)
        for name in ("phi", "low", "high"):
            if not math.isfinite(getattr(r, name)):
                raise ValueError(f"[{i}].{name}: {getattr(r, name)} is not finite")
        if r.low >= r.high:
            raise ValueError(f"[{i}].high: {r.high} is not above the low of {r.low}")
