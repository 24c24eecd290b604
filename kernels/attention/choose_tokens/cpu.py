"""`forebay::choose_tokens` on the CPU, by torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SCORES = 1 << 21  # at a time, of all heads together, where more than one query is computed at once


def _queries_at_once(queries: int, heads: int, length: int) -> int:
    return max(1, min(queries, SCORES // max(1, heads * length)))


def workspace_nbytes(q: Any, keys: Any) -> int:
    """Upper bound of a call's workspace in bytes: keys of a sequence in fp32, scores of some queries by head and summed
    up, and what choosing among these takes."""
    _, queries, heads, dim = q.shape
    length = keys.shape[2]
    some = _queries_at_once(queries, heads, length)
    return 4 * length * dim + some * length * (8 * heads + 40) + 4 * some * heads * (dim + 1) + 24 * length + (1 << 14)


def bind_choose_tokens(
    q: Tensor, weights: Tensor, k: Tensor, keys: Tensor, start: Tensor, count: int, out: Tensor
) -> Callable[[], None]:
    """A closure that writes k to `keys` and fills out from the tensors' present contents."""
    (batch, queries, heads, dim), length = q.shape, keys.shape[2]
    if weights.shape != (batch, queries, heads) or k.shape != (batch, queries, dim) or (
            keys.shape != (batch, 1, length, dim)) or k.dtype != keys.dtype:
        raise ValueError(f"choose_tokens: queries {tuple(q.shape)}, weights {tuple(weights.shape)}, new keys "
                         f"{tuple(k.shape)} and keys {tuple(keys.shape)} do not go together")
    at_once = _queries_at_once(queries, heads, length)

    def run() -> None:
        begins = start.tolist()
        if any(begin < 0 or begin + queries > length for begin in begins):
            raise ValueError(f"choose_tokens: positions from {begins} are not all within a state of {length}")
        for b, begin in enumerate(begins):
            keys[b, 0, begin : begin + queries].copy_(k[b])
            own = torch.arange(begin, begin + queries)[:, None]
            every = min(max(0, count - begin), queries)  # queries that see no more than are chosen
            positions = torch.arange(count).expand(every, count)
            out[b, :every].copy_(positions.masked_fill(positions > own[:every], -1))
            seen = keys[b, 0, : begin + queries].float() if every < queries else None
            for first in range(every, queries, at_once):
                assert seen is not None
                last = min(queries, first + at_once)
                each = torch.matmul(q[b, first:last].reshape(-1, dim), seen.mT).relu_()
                scores = torch.bmm(weights[b, first:last, None].float(), each.view(last - first, heads, -1))[:, 0]
                scores.masked_fill_(torch.arange(begin + queries) > own[first:last], -math.inf)
                out[b, first:last].copy_(scores.topk(count, sorted=False).indices.sort().values)

    return run
