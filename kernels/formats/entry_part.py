"""Parts of an entry in a table of experts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """A matrix or a bias of an entry: which (`up`, `up_bias`, `down`, `down_bias`), where it begins, in bytes, and its
    shape and dtype."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
