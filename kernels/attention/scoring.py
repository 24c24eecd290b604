"""How attention makes scores, and their known bounds: the values that go together from operators to launches."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scoring(NamedTuple):
    """Products of q and k times `scale`; `window` w > 0: the last w positions, w < 0: those of the query's chunk of -w;
    `softcap` c > 0: a score x becomes c tanh(x / c). 0: neither."""

    scale: float
    window: int = 0
    softcap: float = 0.0


class SoftmaxRange(NamedTuple):
    """Rows whose largest score lies in phi + low < x < phi + high share the maximum phi (FlashDecoding++Next, section
    III); high <= low: none does, and every row takes the synchronised softmax."""

    phi: float = 0.0
    low: float = 0.0
    high: float = 0.0


class AttentionExtras(NamedTuple):
    """Optional arguments of attention besides q and caches: `sinks` [H], one score more for each query of a head, with
    which no value goes; `until` [B, S], where the positions end that each query sees; `chosen` [B, S, n], the positions
    that each query sees, as `forebay::choose_tokens` gives them."""

    sinks: torch.Tensor | None = None
    until: torch.Tensor | None = None
    chosen: torch.Tensor | None = None


# (low, high) at most. exp(x - phi) is multiplied with V in V's dtype: fp16 holds exp(-9) to exp(11) to within 2^-11,
# bf16 has fp32's range, of which sums over long sequences leave exp(-60) to exp(60).
HELD: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (-9.0, 11.0), torch.bfloat16: (-60.0, 60.0), torch.float32: (-60.0, 60.0)}
SYNCHRONISED = SoftmaxRange()
NOTHING = AttentionExtras()
