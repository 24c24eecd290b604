"""The definition of `forebay::wkv`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.recurrences.steps import check, failing, put_real, real

fail = failing("wkv")
EMPTY = -1e38  # the exponent of a sequence that begins: whatever is scaled by it is nothing


def reference(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """The result [B, S, C] and the new state, in float64, token by token, on any device."""
    k, v, log_decay, bonus = (each.double() for each in (k, v, log_decay, bonus))
    empty = torch.tensor([0.0, 0.0, EMPTY], dtype=torch.float64, device=k.device)[:, None]
    held = torch.where((start == 0)[:, None, None], empty, state.double())
    out = torch.zeros(v.shape, dtype=torch.float64, device=k.device)
    for t in range(k.shape[1]):
        above, below, exponent = held.unbind(1)
        most = torch.maximum(exponent, k[:, t] + bonus)
        old, new = (exponent - most).exp(), (k[:, t] + bonus - most).exp()
        put_real(out, t, count, (old * above + new * v[:, t]) / (old * below + new))
        most = torch.maximum(exponent + log_decay, k[:, t])
        old, new = (exponent + log_decay - most).exp(), (k[:, t] - most).exp()
        after = torch.stack((old * above + new * v[:, t], old * below + new, most), 1)
        held = torch.where(real(count, t, 3), after, held)
    return out, held


def check_arguments(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> None:
    """ValueError names the argument that is wrong."""
    if k.dim() != 3:
        fail("k", f"must be [B, S, C], got {tuple(k.shape)}")
    batch, _, channels = k.shape
    f32, i64 = torch.float32, torch.int64
    check(fail, {"k": (k, tuple(k.shape), f32), "v": (v, tuple(k.shape), f32),
                 "log_decay": (log_decay, (channels,), f32), "bonus": (bonus, (channels,), f32),
                 "state": (state, (batch, 3, channels), f32), "start": (start, (batch,), i64),
                 "count": (count, (batch,), i64)},
          ("log_decay", "bonus", "state", "start", "count"), ("k", "v"))
