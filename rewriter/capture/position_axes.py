"""Rotary tables of positions on three axes (time, height, width) with interleaved sections (Qwen3-VL, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from forebay.kernels.operator import HOST_MEMORY


def choose_axes(model: nn.Module) -> None:
    """Replace writes into rotary tables by choices between their axes: a graph with writes cannot be saved. Modules are
    known by their results for one table, so that any class and release is served."""
    for module in model.modules():
        sections, frequencies = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        recompose = getattr(module, "recomposition_frequencies", None)
        if recompose is None or not isinstance(frequencies, torch.Tensor) or not sections or len(sections) != 3:
            continue
        table = torch.arange(3.0 * len(frequencies), device=HOST_MEMORY).view(3, 1, 1, -1)
        chosen = _chosen(table, sections)
        if torch.equal(recompose(table), chosen):
            vars(module)["recomposition_frequencies"] = partial(_chosen, sections=sections)


def _chosen(table: torch.Tensor, sections: Sequence[int]) -> torch.Tensor:
    """Numbers [B, S, 2D] of the axes' table [3, B, S, D]: every third of height, and of width, as far as the axis has
    any; the others are of time."""
    places = range(table.shape[-1])
    height, width = (torch.tensor([place % 3 == axis and place < 3 * sections[axis] for place in places],
                                  device=table.device) for axis in (1, 2))
    half = torch.where(height, table[1], torch.where(width, table[2], table[0]))
    return torch.cat((half, half), dim=-1)
