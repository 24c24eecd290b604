"""Attention of each query among rows of a cache that were chosen for it, on the CPU.

Each query has a choice of its own, for all heads (DeepSeek-V3.2: arXiv 2512.02556, section 2.1). Its rows are gathered,
and attention runs over these. The first queries of a sequence see all positions, and attend to the cache together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Callable[[], object]]  # q, k, v, start, out


def check_chosen(op: str, q: Any, chosen: Any) -> None:
    """ValueError where a choice [B, S, n] is not one for q [B, H, S, D]."""
    if chosen.dtype != torch.int64 or chosen.dim() != 3 or tuple(chosen.shape[:2]) != (q.shape[0], q.shape[2]):
        raise ValueError(f"{op}: chosen must be int64 [{q.shape[0]}, {q.shape[2]}, n], got {chosen.dtype} "
                         f"{tuple(chosen.shape)}")


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, chosen: Tensor, out: Tensor, attend: Attend
) -> Callable[[], None]:
    """A closure that fills out [B, S, H, D] from the tensors' present contents; `attend` binds attention over rows."""
    count, queries = chosen.shape[2], q.shape[2]
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()  # latents, which are keys and values

    def run() -> None:
        begins = start.tolist()
        if any(begin < 0 or begin + queries > k.shape[2] for begin in begins):
            raise ValueError(f"attention: positions from {begins} are not all within a cache of {k.shape[2]}")
        for b, begin in enumerate(begins):
            of = slice(b, b + 1)
            every = min(max(0, count - begin), queries)
            if every:
                attend(q[of, :, :every], k[of], v[of], start[of], out[of, :every])()
            last = torch.full((1,), count - 1)
            for s in range(every, queries):
                keys = k[of].index_select(2, chosen[b, s])
                values = keys if same else v[of].index_select(2, chosen[b, s])
                attend(q[of, :, s : s + 1], keys, values, last, out[of, s : s + 1])()

    return run
