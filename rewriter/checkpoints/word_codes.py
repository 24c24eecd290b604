"""Codes and zero points of a quantized matrix out of the 32-bit words in which AWQ, GPTQ and compressed-tensors pack
them; the layouts are in `grouped`."""

from __future__ import annotations

from typing import NamedTuple

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class GroupLayout(NamedTuple):
    """Settings that matrices of a checkpoint share.

    Attributes:
        bits: Bits of a code.
        group: Values that share a scale; 0: all of a row.
        symmetric: Whether every zero point is the middle code; None: not said.
    """

    bits: int
    group: int
    symmetric: bool | None = None


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes uint8 of int32 words, first in the lowest bits, along `dim` of two."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(-1, *[1] * (2 - dim - 1))
    codes = (words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def awq_columns(words: torch.Tensor) -> torch.Tensor:
    """AWQ's columns [R, 8 C] of words [R, C]."""
    stored = unpack(words, 4, 1).unflatten(1, (-1, 8))
    out = torch.empty_like(stored)
    out[..., list(AWQ_ORDER)] = stored
    return out.flatten(1)


def gptq_zeros(words: torch.Tensor, n: int, layout: GroupLayout, offset: int) -> torch.Tensor | None:
    """The zero points of a GPTQ matrix.

    Files disagree on whether 1 was subtracted, and some say the contrary of what they store. Symmetric ones are the
    middle code, which decides; of others the format tells.

    Args:
        words: The stored zero points, int32 [g, W].
        n: Outputs of the matrix; further codes of the words mean nothing.
        layout: The layout of the matrix.
        offset: 1 where the format has 1 subtracted from each zero point, else 0.

    Returns:
        uint8 [g, N]; None where the layout is symmetric and the stored zero points are not.
    """
    middle = 1 << (layout.bits - 1)
    ones = sum(1 << at for at in range(0, 32, layout.bits))
    # The whole word at once, modulo 2^32: a zero point of 0 less 1 has borrowed from the codes above it.
    stored, restored = (unpack(each, layout.bits, 1)[:, :n] for each in (words, words + ones))
    if layout.symmetric is not False:
        for zeros in (stored, restored):
            if bool((zeros == middle).all()):
                return zeros
    if layout.symmetric:
        return None
    return restored if offset else stored
