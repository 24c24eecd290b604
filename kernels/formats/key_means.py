"""Means of keys, by which a decode step chooses blocks of the KV cache: their layout, and how many blocks it reads."""

from __future__ import annotations

import math

from torch import Tensor

KEYS_OF_MEAN = 8  # that one mean stands for


def chosen_count(share: float, full: int) -> int:
    """Blocks that are chosen of `full` ones: a share, but at least the first and the newest."""
    return min(full, max(2, math.ceil(share * full)))


def means_of(means: Tensor, dim: int) -> Tensor:
    """The means [B, Hkv, L / 8, D] in a state [B, Hkv, L, D / 8], which has an eighth of a mean for each token."""
    return means.flatten(2)[:, :, : means.shape[2] // KEYS_OF_MEAN * dim].unflatten(2, (-1, dim))
