"""`forebay::expanded_attention`: causal attention over rows that all heads share, by keys and values made of them.

A cached row is [latent; rotated] (DeepSeek-V2: arXiv 2405.04434, section 2.1). Head h's key is [W_k latent; rotated]
and its value W_v latent, with W_k the first `plain` rows of `up[h]` and W_v the others. `forebay::attention` over the
rows themselves gives the same with W_k absorbed into queries and W_v into results; it multiplies each query with
2 (rank + rotated) numbers of a row, and this one with plain + rotated + value, after expanding each row once for all
queries of a step. So this one pays where a step has many queries. Some rows are expanded at a time, and the softmax
goes on from one lot to the next, so that memory does not grow with the cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forebay.kernels.attention.costs import caches_once
from forebay.kernels.attention.expanded_attention import cpu, gpu_scratch
from forebay.kernels.attention.expanded_attention.reference import ExpandedSizes, RowCodes, check, reference
from forebay.kernels.attention.operations import attention_flops, expansion_flops
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.define import define_operator
from forebay.kernels.operator import Call, Cost, Use, dtype_of


def _expanded_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float, up: Tensor, plain: int,
    bits: int = 0, group: int = 0,
) -> Tensor:  # fmt: skip
    """q [B, H, S, plain + rotated], rows [B, 1, L, rank + rotated] as k and as v, start int64 [B], up
    [H, plain + value, rank] -> [B, S, H, value]; window and softcap as `forebay::attention` has them. With `bits` rows
    are packed, uint8 [B, 1, L, R], as those of `forebay::attention_q`.

    q and the rows may be strided. ValueError names the argument that is wrong.
    """
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, up.shape[1] - plain)


def _bound(use: Use) -> tuple[Any, ...]:
    """The arguments that launchers of both devices have."""
    up, plain, *codes = use.args[7:]
    return *use.args[:4], Scoring(*use.args[4:7]), up, plain, *use.out, RowCodes(*codes)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.attention.expanded_attention.gpu import bind_expanded_attention as bind

    return bind(*_bound(use))


def _sizes(use: Use) -> ExpandedSizes:
    q, k, up, plain = *use.args[:2], *use.args[7:9]
    batch, heads, queries, dim = q.shape
    return ExpandedSizes(batch, heads, queries, k.shape[2], up.shape[2], dim, plain, up.shape[1] - plain)


def _packed(use: Use) -> bool:
    return len(use.args) > 9 and use.args[9] > 0


def _cost(use: Use) -> Cost:
    """Return the cost as if every sequence were as long as the cache, and saw all of it."""
    sizes = _sizes(use)
    made = int(expansion_flops(sizes.batch, sizes.heads, sizes.length, sizes.rank, sizes.made))
    attended = int(attention_flops(*sizes[:4], (sizes.dim + sizes.value) / 2))
    return caches_once(use)._replace(flops=attended + made, matmul_flops=made)


EXPANDED_ATTENTION = define_operator(
    _expanded_attention,
    check=lambda q, k, v, start, scale, window, softcap, up, plain, *codes: check(
        q, k, v, start, up, plain, RowCodes(*codes)),
    reference=reference,
    cost=_cost,
    bind={"cpu": lambda use: cpu.bind_expanded_attention(*_bound(use)), "cuda": _bind_cuda},
    workspace={
        "cpu": lambda use: cpu.workspace_nbytes(_sizes(use), dtype_of(use.args[0]), _packed(use)),
        "cuda": lambda use: gpu_scratch.workspace_nbytes(_sizes(use), dtype_of(use.args[0]).itemsize, _packed(use)),
    },
    layouts={"start": "dense", "up": "dense"},
    caches=("k", "v"),
    timed_as="attention",
)
