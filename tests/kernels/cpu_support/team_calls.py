"""Loops that a team of threads shares, for tests and for the processes that they start (which find no fixtures)."""

from __future__ import annotations

import torch

from forebay.kernels.cpu_support import native
from forebay.kernels.cpu_support.native import NativeCall
from forebay.kernels.formats.packing import Packing
from forebay.kernels.products.linear.cpu import bind_linear
from forebay.kernels.products.linear_q.cpu import bind_linear_q
from forebay.kernels.quantization.quantize.cpu import quantize_rows


def calls(seed: int) -> tuple[list[NativeCall], list[torch.Tensor]]:
    """Loops of some 10 to 500 µs, long enough to be shared, and their results."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 512, generator=generator)
    weight = torch.randn(1500, 512, generator=generator)
    rows, made = quantize_rows(weight, 4, 32), [torch.empty(3, 1500), torch.empty(1, 1500), torch.empty(3, 1500)]
    return [bind_linear_q("flat", x, rows, None, made[0], Packing(4, 512, 32)),
            bind_linear_q("flat", x[:1], rows, None, made[1], Packing(4, 512, 32)),
            bind_linear("flat", x, weight, None, made[2])], made  # type: ignore[list-item]


def run(steps: list[NativeCall], made: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in made:
        tensor.fill_(torch.nan)
    for step in native.chained(steps):
        step()
    return [tensor.clone() for tensor in made]
