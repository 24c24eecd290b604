"""Sparse attention: decode steps that read the values of some tokens alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sparsity:
    """Decode steps read the `values` of such a share of a sequence's tokens, those with the largest weights (FlexGen,
    section 5); 1 reads all."""

    values: float = 1.0
