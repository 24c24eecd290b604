"""The data-movement operations that passes put into graphs, as plain functions that also run eagerly.

Run as Python, a rewritten graph computes what the original computes: `fetch` is a copy of rows, `release` does nothing.
Lowered, they become Copy, Wait and Release items.
"""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.formats.packing import Packing


def fetch(weight: torch.Tensor, lower: int, upper: int) -> torch.Tensor:
    """Rows [lower, upper) of a streamed weight, in a staging slot."""
    return weight[lower:upper].clone()


def release(tile: torch.Tensor) -> None:
    """The slot that holds `tile` may be used again."""


def gather_rows(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a weight that stays on a slower tier: index [...] int64 -> [..., K]. Only the named rows move."""
    return torch.nn.functional.embedding(index, weight)


def new_output(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Uninitialised output [..., columns] for a matrix product of x [..., K] that is computed tile by tile."""
    return x.new_empty((*x.shape[:-1], columns))


def linear_tile(
    out: torch.Tensor, x: torch.Tensor, tile: torch.Tensor, bias: torch.Tensor | None, lower: int,
    multiplier: torch.Tensor | None = None, residual: torch.Tensor | None = None, activation: str = "",
    packing: Packing | None = None,
) -> None:
    """Columns [lower, lower + R) of out [..., N]: x [..., K] times tile [R, K] transposed, plus bias [N] there; then,
    where they are given, the activation, times multiplier [..., N] and plus residual [..., N] there. With packing
    the tile is packed rows."""
    columns = slice(lower, lower + tile.shape[0])
    part = None if bias is None else bias[columns]
    if packing is not None:
        after = (None if t is None else t[..., columns] for t in (multiplier, residual))
        out[..., columns] = torch.ops.forebay.linear_q(x, tile, part, *after, activation, *packing)
    elif multiplier is None and residual is None and not activation:
        out[..., columns] = torch.nn.functional.linear(x, tile, part)
    else:
        after = (None if t is None else t[..., columns] for t in (multiplier, residual))
        out[..., columns] = torch.ops.forebay.linear(x, tile, part, *after, activation)


def matmul_tile(
    out: torch.Tensor, x: torch.Tensor, tile: torch.Tensor, bias: torch.Tensor | None, lower: int
) -> None:
    """Add x[..., lower : lower + R] times tile [R, N] to out [..., N]; the tile at 0 starts it from bias [N] or 0."""
    product = x[..., lower : lower + tile.shape[0]] @ tile
    if lower == 0:
        out.copy_(product if bias is None else product + bias)
    else:
        out.add_(product)


def experts_tile(
    out: torch.Tensor, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, tile: torch.Tensor, lower: int,
    count: int, *form: Any,
) -> None:
    """Add to out [..., H] what the experts [lower, lower + R) of `count`, whose entries `tile` has, give of x [..., H];
    those at 0 start it. `form` as the arguments of `forebay::experts` behind its table."""
    inside = (index >= lower) & (index < lower + tile.shape[0])
    found = torch.ops.forebay.experts(x, torch.where(inside, index - lower, -1), weights, tile, *form)
    out.copy_(found if lower == 0 else out + found)


def experts_from_pool(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, slots: int,
    hit_rate: float, ahead: int, hop: bool, *form: Any,
) -> torch.Tensor:
    """Apply the experts of `table` to x [..., H]. Only experts that `index` names move, into a pool of `slots` that
    keeps them, and where a share `hit_rate` of them is expected to lie, and so many that are read `ahead`; with `hop`
    by way of host memory. `form` as of `experts_tile`."""
    return torch.ops.forebay.experts(x, index, weights, table, *form)  # type: ignore[no-any-return]


TILES = (linear_tile, matmul_tile, experts_tile)  # write part of what new_output makes
