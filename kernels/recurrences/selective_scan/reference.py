"""The definition of `forebay::selective_scan`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.recurrences.steps import begun, check, failing, put_real, real

fail = failing("selective_scan")


def reference(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """The result [B, S, C] and the new state, in float64, token by token, on any device."""
    held, out = begun(state, start), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    x, dt, a, b, c = (each.double() for each in (x, dt, a, b, c))
    for t in range(x.shape[1]):
        new = torch.exp(dt[:, t, :, None] * a) * held + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        held = torch.where(real(count, t, 3), new, held)
        put_real(out, t, count, (new * c[:, t, None]).sum(-1))
    return out, held


def check_arguments(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> None:
    """ValueError names the argument that is wrong."""
    if x.dim() != 3 or a.dim() != 2:
        fail("x", f"must be [B, S, C] and a [C, N], got {tuple(x.shape)} and {tuple(a.shape)}")
    (batch, tokens, channels), width = x.shape, a.shape[1]
    f32, i64 = torch.float32, torch.int64
    check(fail, {"x": (x, tuple(x.shape), f32), "dt": (dt, tuple(x.shape), f32), "a": (a, (channels, width), f32),
                 "b": (b, (batch, tokens, width), f32), "c": (c, (batch, tokens, width), f32),
                 "state": (state, (batch, channels, width), f32), "start": (start, (batch,), i64),
                 "count": (count, (batch,), i64)}, ("a", "state", "start", "count"), ("b", "c"))
