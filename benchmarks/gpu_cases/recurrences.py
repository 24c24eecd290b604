"""A decode step of recurrent layers: short_conv, linear_recurrence, selective_scan, wkv, keep_state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases.case import LIMITS, Aim, Case, Place, Work, checked, normal, relative_error
from forebay.kernels.recurrences.keep_state import reference as keep
from forebay.kernels.recurrences.linear_recurrence import reference as linear
from forebay.kernels.recurrences.selective_scan import reference as scan
from forebay.kernels.recurrences.short_conv import reference as conv
from forebay.kernels.recurrences.wkv import reference as averages

F32 = torch.float32
AIM = (Aim("bandwidth", 0.75),)
Reference = Callable[..., tuple[Tensor, Tensor]]


def work(
    place: Place, shape: str, bind: Callable[..., Callable[[], None]], reference: Reference, sizes: tuple[int, ...],
    given: tuple[Tensor | None, ...], out: Tensor,
) -> Work:
    """A step on states of these sizes: each call moves its state on, and the check begins with the same."""
    start, count = (torch.full((sizes[0],), n, device=place.device) for n in (7, 1))
    first = normal(place, *sizes, dtype=out.dtype)
    nbytes = 2 * first.nbytes + sum(each.nbytes for each in (*given, out) if each is not None)
    states = [first.clone() for _ in range(place.copies(nbytes))]
    outs = [torch.empty_like(out) for _ in states]
    ours = [bind(*given, state, start, count, each) for state, each in zip(states, outs, strict=True)]
    verify = checked(ours[0], outs[0], lambda: reference(*given, first, start, count)[0])
    return Work(shape, ours, verify, LIMITS[out.dtype], nbytes, aims=AIM)


def conv_work(place: Place) -> Work:
    from forebay.kernels.recurrences.short_conv.gpu import bind_short_conv

    batch, channels = place.size(64, 2), place.size(8192, 33)
    x, weight = normal(place, batch, 1, channels), normal(place, channels, 4)

    def bind(*given: Any) -> Callable[[], None]:
        return bind_short_conv(*given[:-1], "", given[-1])

    return work(place, f"{batch}x{channels}", bind, conv.reference, (batch, 3, channels), (x, weight, None),
                torch.empty_like(x))


def linear_work(place: Place) -> Work:
    from forebay.kernels.recurrences.linear_recurrence.gpu import bind_linear_recurrence

    batch, heads, width = place.size(32, 2), place.size(32, 2), place.size(128, 16)
    q, k, v = (normal(place, batch, 1, heads, width, dtype=F32, scale=width**-0.5) for _ in range(3))
    decay, beta = -normal(place, batch, 1, heads, dtype=F32).abs(), normal(place, batch, 1, heads, dtype=F32).sigmoid()
    return work(place, f"{batch}x{heads}x{width}x{width}", bind_linear_recurrence, linear.reference,
                (batch, heads, width, width), (q, k, v, decay, beta), torch.empty_like(v))


def scan_work(place: Place) -> Work:
    from forebay.kernels.recurrences.selective_scan.gpu import bind_selective_scan

    batch, channels, width = place.size(64, 2), place.size(8192, 33), 16
    x, dt = (normal(place, batch, 1, channels, dtype=F32) for _ in range(2))
    a = -normal(place, channels, width, dtype=F32).abs()
    b, c = (normal(place, batch, 1, width, dtype=F32) for _ in range(2))
    return work(place, f"{batch}x{channels}x{width}", bind_selective_scan, scan.reference, (batch, channels, width),
                (x, dt.abs(), a, b, c), torch.empty_like(x))


def wkv_work(place: Place) -> Work:
    from forebay.kernels.recurrences.wkv.gpu import bind_wkv

    batch, channels = place.size(256, 2), place.size(5120, 33)
    k, v = (normal(place, batch, 1, channels, dtype=F32) for _ in range(2))
    decay, bonus = -normal(place, channels, dtype=F32).abs(), normal(place, channels, dtype=F32)

    def bind(*given: Any) -> Callable[[], None]:
        given[4][:, 1].abs_()  # sums of exponentials
        return bind_wkv(*given)

    def reference(*given: Any) -> tuple[Tensor, Tensor]:
        state = given[4].clone()
        state[:, 1].abs_()
        return averages.reference(*given[:4], state, *given[5:])

    return work(place, f"{batch}x{channels}", bind, reference, (batch, 3, channels), (k, v, decay, bonus),
                torch.empty_like(k))


def keep_work(place: Place) -> Work:
    """A layer's states of Mamba-2 2.7B; every second one goes back."""
    from forebay.kernels.recurrences.keep_state.gpu import bind_keep_state

    batch, numbers = place.size(16, 2), place.size(80 * 64 * 128, 33)
    first = normal(place, batch, numbers, dtype=F32)
    refused = torch.arange(batch, device=place.device) % 2
    pairs = [(first.clone(), -first) for _ in range(place.copies(2 * first.nbytes))]
    want = keep.reference(first, -first, refused)
    calls = [bind_keep_state(*pair, refused) for pair in pairs]

    def verify() -> float:
        calls[0]()
        return max(relative_error(each, want) for each in pairs[0])

    return Work(f"{batch}x{numbers}", calls, verify, 0.0, 2 * first.nbytes, aims=AIM)


def cases(tiny: bool) -> list[Case]:
    """Steps of Qwen3-Next (linear_recurrence), Mamba-2.8B (selective_scan), RWKV-4 14B (wkv) and Mamba-2 2.7B
    (keep_state)."""
    return [Case("short_conv", conv_work), Case("linear_recurrence", linear_work), Case("selective_scan", scan_work),
            Case("wkv", wkv_work), Case("keep_state", keep_work)]
