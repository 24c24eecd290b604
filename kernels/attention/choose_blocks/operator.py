"""`forebay::choose_blocks`: the blocks of a KV cache to which a step's queries give the most weight, by means of keys.

A block's weight is the sum over heads of its share of the softmax over all full blocks, as if each of `KEYS_OF_MEAN`
keys were their mean. (Quest, arXiv 2406.10774, takes the largest possible score instead, which loses single facts:
`docs/lab/2026-11.md`.) The first and the newest full block are always chosen. For the CPU alone.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.attention.choose_blocks.cpu import bind_choose_blocks, workspace_nbytes
from forebay.kernels.attention.choose_blocks.reference import reference
from forebay.kernels.define import define_operator, filling
from forebay.kernels.operator import Cost, Use, nbytes_of


def _choose_blocks(
    q: Tensor, means: Tensor, start: Tensor, begun: Tensor, scale: float, share: float, block_tokens: int
) -> Tensor:
    """q [B, H, 1, D], means [B, Hkv, L, D / 8], start and begun int64 [B] -> int64 [B + B blocks].

    The first B numbers are the positions of the new tokens among the chosen blocks. Then come, for each sequence, the
    rows of the blocks in a table [B blocks], in order; `begun`, the row of the block that is not full (-1: none is to
    come); and -1 for what is left out.
    """
    return start.new_empty(q.shape[0] * (2 + means.shape[2] // block_tokens))


def _cost(use: Use) -> Cost:
    q, means = use.args[:2]
    return Cost(2 * nbytes_of(means) * q.shape[1] // means.shape[1], nbytes_of(q, means), nbytes_of(*use.out))


CHOOSE_BLOCKS = define_operator(
    _choose_blocks,
    reference=reference,
    cost=_cost,
    bind={"cpu": filling(bind_choose_blocks)},
    workspace={"cpu": lambda use: workspace_nbytes(*use.args[:2])},
    layouts={"means": "dense", "start": "dense", "begun": "dense"},
)
