"""A tensor of a model that is to be quantized, wherever its numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

ReadRows = Callable[[int, int], torch.Tensor]  # rows [lower, upper)


class SourceTensor(Protocol):
    """One tensor of the model to be quantized, with `shape` and `dtype` as the model has it."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def format(self) -> str:
        """The weight format that holds its values exactly as they lie in the source, or ""."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales and lows in `repacked` rows."""

    def nearest(self) -> str:
        """The weight format to round it to where it is quantized in a way that none holds exactly, or ""."""

    def contents(self) -> Iterator[torch.Tensor]:
        """All of it, in pieces, in the model's own order."""

    def rows(self, transposed: bool) -> ReadRows:
        """Its rows in float32, those of one expert's matrix after the other; with `transposed`, its columns."""

    def repacked(self, scale_dtype: torch.dtype | None = None) -> ReadRows:
        """Its rows (of outputs) in the layout of `packing`, bit for bit, in the format that `format` names; scales are
        of another dtype than `scale_dtype` says where that is asked for."""
