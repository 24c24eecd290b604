"""`forebay::mean_keys`: keep the mean of each `KEYS_OF_MEAN` keys of the cache blocks that a step fills.

By these `forebay::choose_blocks` tells which blocks a later step reads. For the CPU, by torch.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.cache.mean_keys.cpu import bind_mean_keys, workspace_nbytes
from forebay.kernels.cache.mean_keys.reference import reference
from forebay.kernels.define import define_operator, filling
from forebay.kernels.operator import Cost, Use, dtype_of


def _mean_keys(
    k_cache: Tensor, means: Tensor, place: Tensor, start: Tensor, tokens: int, block_tokens: int
) -> None:
    """k_cache [B, Hkv, L, D] with `tokens` new keys from `place` [B] on, whose positions in the text are from `start`
    [B] on; means [B, Hkv, L', D / 8], written for the blocks that are full then."""
    return None


def _cost(use: Use) -> Cost:
    """The new keys alone, and their means."""
    k, _, _, _, tokens, _ = use.args
    nbytes = k.shape[0] * k.shape[1] * tokens * k.shape[3] * dtype_of(k).itemsize
    return Cost(0, nbytes, nbytes // 8)


MEAN_KEYS = define_operator(
    _mean_keys,
    writes=("means",),
    reference=reference,
    cost=_cost,
    bind={"cpu": filling(bind_mean_keys)},
    workspace={"cpu": lambda use: workspace_nbytes(use.args[0], use.args[5])},
    layouts={"means": "dense", "place": "dense", "start": "dense"},
)
