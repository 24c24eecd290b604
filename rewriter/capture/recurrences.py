"""Mixers that keep a recurrent state: what transformers' code calls there, done by our operators.

transformers writes every mixer around a few functions: a short convolution, and a scan of one of three kinds. Ours
replace them, so a mixer is known by the functions that it calls, and no family by its name. Families whose mixers call
none of them are in `recurrent_families.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from forebay.kernels.operator import in_columns
from forebay.kernels.operators import LINEAR_RECURRENCE, SELECTIVE_SCAN, SHORT_CONV
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.family import require_release
from forebay.rewriter.capture.layer_states import counts, layer_state, starts, states_before
from forebay.rewriter.ir.state import ConvolutionState, RecurrentState, ScanState

OLDER = "has_previous_state"  # which mixers of older releases ask of their cache


def adopt_recurrences(model: nn.Module) -> int:
    """Let mixers call our operators; returns how many modules do."""
    found = 0
    for module in model.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType):
            continue
        if OLDER in forward.__code__.co_names:
            require_release("its recurrent layers")
        called = {name: ours for name, ours in FUNCTIONS.items() if name in forward.__code__.co_names}
        if called:
            vars(module)["forward"] = calling(module, forward, called)
            found += 1
    return found


def has_known_mixers(cls: type[nn.Module]) -> bool:
    """Return whether the file of a model's class has mixers that call what ours replace, though its layers may be
    others."""
    for found in vars(sys.modules[cls.__module__]).values():
        if isinstance(found, type) and issubclass(found, nn.Module):
            forward: Any = inspect.unwrap(found.forward)
            if isinstance(forward, FunctionType) and FUNCTIONS.keys() & set(forward.__code__.co_names):
                return True
    return False


def calling(module: nn.Module, forward: FunctionType, ours: Mapping[str, Any]) -> MethodType:
    """A module's forward, for which some names stand for something of ours."""
    own = FunctionType(forward.__code__, {**forward.__globals__, **ours}, forward.__name__, forward.__defaults__,
                       forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(own, module)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
                 **others: Any) -> Tensor:  # fmt: skip
    """x [B, C, S], weight [C, K]."""
    if activation not in (None, "silu", "swish"):
        raise CaptureError(f"its short convolution ends in {activation}, where silu is all that is implemented")
    channels, taps = weight.shape
    (state,) = layer_state(ConvolutionState(channels, taps - 1, x.dtype, states_before(ConvolutionState.kind)))
    bias = None if bias is None else bias.to(x.dtype)
    found: Tensor = SHORT_CONV.overload(in_columns(x.transpose(1, 2)), weight.to(x.dtype), bias, state, starts(),
                                        counts(), "silu" if activation else "")
    return found.transpose(1, 2)


def recur(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result and the state."""
    q, k, v, log_decay = (in_columns(each.float()) for each in (q, k, v, log_decay))
    beta = None if beta is None else in_columns(beta.float())
    (state,) = layer_state(RecurrentState((v.shape[2], k.shape[3], v.shape[3])))
    found: Tensor = LINEAR_RECURRENCE.overload(q, k, v, log_decay, beta, state, starts(), counts())
    return found, state


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
                use_qk_l2norm_in_kernel: bool = False, **others: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Any of [B, S, H, D], g [B, S, H], or [B, S, H, D] of Kimi's."""
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    found, state = recur(q * q.shape[-1] ** -0.5, k, value, g, beta)
    return found.to(query.dtype), state


def _state_space(
    hidden: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int = 0, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """Mamba-2: hidden [B, S, H, P], dt [B, S, H], a [H], b and c [B, S, G, N]."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = nn.functional.softplus(dt) if dt_softplus else dt
    if tuple(dt_limit) != (0.0, float("inf")):
        dt = dt.clamp(*dt_limit)
    hidden, dt = hidden.float(), dt.float()
    found, state = recur(c, b, hidden * dt[..., None], a.float() * dt, None)
    found = found if D is None else found + D[..., None] * hidden
    return (found, state) if return_final_states else found


def _scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """Mamba: x and dt [B, C, S], a [C, N], b and c [B, N, S]."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = nn.functional.softplus(dt) if delta_softplus else dt
    (state,) = layer_state(ScanState(tuple(a.shape), states_before(ScanState.kind)))
    by_token = [each.transpose(1, 2).float() for each in (x, dt, b, c)]
    found = SELECTIVE_SCAN.overload(*by_token[:2], a.float(), *map(in_columns, by_token[2:]), state, starts(),
                                    counts()).transpose(1, 2).to(x.dtype)
    found = found if D is None else found + x * D[None, :, None]
    found = found if z is None else found * nn.functional.silu(z)
    return (found, state) if return_last_state else found


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve, "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule, "mamba2_chunk_scan": _state_space, "mamba_selective_scan": _scan,
}
