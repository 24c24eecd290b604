"""`forebay::sparse_values`: attention's sum over the value rows of the `keep` largest weights of each query.

FlexGen section 5: the other rows are dropped, which saves loading them; the weights that stay are not scaled up. Among
equal weights at the border torch.topk chooses.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.attention.sparse_values.reference import check, reference
from forebay.kernels.operator import Cost, Operator, Use, dtype_of, nbytes_of


@torch.library.custom_op("forebay::sparse_values", mutates_args=(), device_types="cpu")
def sparse_values(weights: Tensor, v: Tensor, keep: int) -> Tensor:
    """weights [B, H, S, T] after softmax, value cache v [B, Hkv, L, D], L >= T -> [B, S, H, D] of v's dtype.

    Sums are taken in fp32. ValueError names the argument that is wrong.
    """
    check(weights, v, keep)
    batch, heads, queries, _ = weights.shape
    kept, index = torch.topk(weights, keep, dim=-1, sorted=False)
    groups = heads // v.shape[1]
    sequence = torch.arange(batch)[:, None, None, None]
    head = (torch.arange(heads) // groups)[:, None, None]
    out = v.new_empty(batch, queries, heads, v.shape[3])
    for s in range(queries):  # one query's rows at a time bounds the scratch to keep rows per head
        rows = v[sequence, head, index[:, :, s : s + 1]].float()  # [B, H, 1, keep, D]
        out[:, s] = (kept[:, :, s : s + 1, None].float() @ rows)[:, :, 0, 0]
    return out


@sparse_values.register_kernel("cuda")
def _(weights: Tensor, v: Tensor, keep: int) -> Tensor:
    from forebay.kernels.attention.sparse_values.gpu import sparse_values as launch

    check(weights, v, keep)
    out = v.new_empty(weights.shape[0], weights.shape[2], weights.shape[1], v.shape[3])
    launch(weights, v, keep, out)
    return out


@sparse_values.register_fake
def _(weights: Tensor, v: Tensor, keep: int) -> Tensor:
    return v.new_empty(weights.shape[0], weights.shape[2], weights.shape[1], v.shape[3])


def _cost(use: Use) -> Cost:
    """Each query reads the values that it keeps."""
    weights, v, keep = use.args
    kept = math.prod(weights.shape[:3]) * min(keep, weights.shape[3]) * v.shape[3]
    return Cost(2 * kept, nbytes_of(weights) + kept * dtype_of(v).itemsize, nbytes_of(*use.out))


SPARSE_VALUES = Operator(torch.ops.forebay.sparse_values.default, reference, _cost)
