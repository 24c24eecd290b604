"""The definition of `forebay::linear_recurrence`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.recurrences.steps import begun, check, failing, put_real, real

fail = failing("linear_recurrence")


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, start: Tensor,
    count: Tensor,
) -> tuple[Tensor, Tensor]:
    """The result [B, S, H, Dv] and the new state, in float64, token by token, on any device."""
    group = v.shape[2] // max(1, k.shape[2])
    q, k = (each.double().repeat_interleave(group, 2) for each in (q, k))
    decay = log_decay.double().exp()
    decay = decay if decay.dim() == 4 else decay[..., None]
    held, out = begun(state, start), torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for t in range(v.shape[1]):
        new = held * decay[:, t, ..., None]
        value = v[:, t].double()
        if beta is not None:
            value = beta[:, t, :, None].double() * (value - torch.einsum("bhkv,bhk->bhv", new, k[:, t]))
        new = new + k[:, t, ..., None] * value[:, :, None]
        held = torch.where(real(count, t, 4), new, held)
        put_real(out, t, count, torch.einsum("bhkv,bhk->bhv", new, q[:, t]))
    return out, held


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, start: Tensor,
    count: Tensor,
) -> None:
    """ValueError names the argument that is wrong."""
    for name, given in (("k", k), ("v", v)):
        if given.dim() != 4:
            fail(name, f"must be [B, S, H, D], got {tuple(given.shape)}")
    (batch, tokens, few, width), (heads, columns) = k.shape, v.shape[2:]
    if few < 1 or heads % few:
        fail("k", f"must have a number of heads that divides that of v, {heads}, got {few}")
    each = (batch, tokens, heads)
    f32, i64 = torch.float32, torch.int64
    check(fail, {"q": (q, (batch, tokens, few, width), f32), "k": (k, tuple(k.shape), f32),
                 "v": (v, (*each, columns), f32), "beta": (beta, each, f32),
                 "log_decay": (log_decay, (*each, width) if log_decay.dim() == 4 else each, f32),
                 "state": (state, (batch, heads, width, columns), f32),
                 "start": (start, (batch,), i64), "count": (count, (batch,), i64)},
          ("state", "start", "count"), ("q", "k", "v", "log_decay", "beta"))
