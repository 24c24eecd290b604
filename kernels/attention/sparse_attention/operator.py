"""`forebay::sparse_attention`: attention of one query a sequence that multiplies a share of the values (FlexGen,
section 5: "Sparse attention").

All keys make scores, and scores weights, as in `forebay::attention`. Of n positions that a query sees, the newest and
the `kept` (n - 1), rounded up, of the others with the largest weights are chosen, of equal ones the first; the values
of the rest are not read, and what they would have added is left out: weights are not made larger instead. Each query
head chooses for itself. The cache has plain rows, or with `bits` packed ones as of `forebay::attention_q`. For the CPU,
which reads the cache where it lies: there it takes as much less time as there are fewer bytes.
"""

from __future__ import annotations

import math

from torch import Tensor

from forebay.kernels.attention.operations import attention_flops
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.attention.sparse_attention.cpu import bind_sparse_attention, workspace_nbytes
from forebay.kernels.attention.sparse_attention.reference import check, reference
from forebay.kernels.define import define_operator
from forebay.kernels.operator import Call, Cost, Use, dtype_of, each_once, nbytes_of


def _sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float, kept: float,
    bits: int = 0, group: int = 0,
) -> Tensor:  # fmt: skip
    """q [B, H, 1, D], caches k and v [B, Hkv, L, D] or packed uint8 [B, Hkv, L, R], start int64 [B] -> [B, 1, H, D].

    q and caches may be strided. ValueError names the argument that is wrong.
    """
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim)


def _packing(use: Use) -> tuple[int, int]:
    """Bits and group size of a use."""
    bits, group = (*use.args[8:], 0, 0)[:2]
    return bits, group


def _bind(use: Use) -> Call:
    (q, k, v, start), (out,), (bits, group) = use.args[:4], use.out, _packing(use)
    return bind_sparse_attention(q, k, v, start, Scoring(*use.args[4:7]), use.args[7], bits, group, out)


def _cost(use: Use) -> Cost:
    """Return the cost as if every sequence were as long as the cache, and saw all of it: its keys, and a share of its
    values."""
    q, k, v = use.args[:3]
    batch, heads, _, width = q.shape
    share = math.ceil(use.args[7] * (k.shape[2] - 1)) + 1
    dropped = nbytes_of(v) * (k.shape[2] - share) // max(1, k.shape[2])
    each = each_once(use)
    flops = (attention_flops(batch, heads, 1, k.shape[2], width) + attention_flops(batch, heads, 1, share, width)) / 2
    return Cost(int(flops), each.read_nbytes - dropped, each.written_nbytes)


def _workspace(use: Use) -> int:
    q, k = use.args[:2]
    batch, heads, _, width = q.shape
    return workspace_nbytes(batch, heads, k.shape[1], k.shape[2], width, dtype_of(q), _packing(use)[0])


SPARSE_ATTENTION = define_operator(
    _sparse_attention,
    check=lambda q, k, v, start, scale, window, softcap, *how: check(q, k, v, start, *how),
    reference=reference,
    cost=_cost,
    bind={"cpu": _bind},
    workspace={"cpu": _workspace},
    layouts={"start": "dense"},
    caches=("k", "v"),
    timed_as="attention",
)
