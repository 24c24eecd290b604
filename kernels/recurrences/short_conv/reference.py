"""The definition of `forebay::short_conv`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.recurrences.steps import begun, check, failing

fail = failing("short_conv")
ACTIVATIONS = ("", "silu")


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, start: Tensor, count: Tensor, activation: str = ""
) -> tuple[Tensor, Tensor]:
    """The result [B, S, C] and the new state, in float64, on any device."""
    tokens, rows = x.shape[1], state.shape[1]
    full = torch.cat((begun(state, start), x.double()), 1)  # [B, K - 1 + S, C]
    out = sum((full[:, j : j + tokens] * weight[:, j].double() for j in range(rows + 1)),
              torch.zeros(()) if bias is None else bias.double())
    kept = count.clamp(0, tokens)[:, None] + torch.arange(rows, device=x.device)
    new = full.gather(1, kept[..., None].expand(-1, -1, x.shape[2]))
    out = torch.nn.functional.silu(out) if activation else out
    padded = torch.arange(tokens, device=x.device) >= count[:, None]
    return out.masked_fill(padded[..., None], 0), new


def check_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, start: Tensor, count: Tensor, activation: str
) -> None:
    """ValueError names the argument that is wrong."""
    if x.dim() != 3 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        fail("x", f"must be fp32, bf16 or fp16 of [B, S, C], got {x.dtype} {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] < 1:
        fail("weight", f"must be [C, K], got {tuple(weight.shape)}")
    if activation not in ACTIVATIONS:
        fail("activation", f"must be one of {ACTIVATIONS}, got {activation!r}")
    (batch, _, channels), taps = x.shape, weight.shape[1]
    check(fail, {"x": (x, tuple(x.shape), x.dtype), "weight": (weight, (channels, taps), x.dtype),
                 "bias": (bias, (channels,), x.dtype), "state": (state, (batch, taps - 1, channels), x.dtype),
                 "start": (start, (batch,), torch.int64), "count": (count, (batch,), torch.int64)},
          ("weight", "bias", "state", "start", "count"), ("x",))
