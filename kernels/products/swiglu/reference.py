"""The definition of `forebay::swiglu`, and the checks of its arguments."""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.products.linear import reference as linear_reference


def reference(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """The definition in float64, on any device: x [..., K], gate and up [N, K] -> [..., N]."""
    gated = linear_reference.reference(x, gate, None, linear_reference.After(activation))
    return linear_reference.reference(x, up, None, linear_reference.After(multiplier=gated))


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"swiglu: {argument} {problem}")


def check(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    """ValueError names the argument whose shape, dtype or name is wrong."""
    if x.dim() == 0:
        _fail("x", "must have at least one dimension")
    if gate.dim() != 2 or gate.shape[1] != x.shape[-1]:
        _fail("gate", f"must be [N, {x.shape[-1]}] as x asks, got shape {tuple(gate.shape)}")
    if up.shape != gate.shape:
        _fail("up", f"must have gate's shape {tuple(gate.shape)}, got {tuple(up.shape)}")
    for weight, name in ((gate, "gate"), (up, "up")):
        if weight.dtype != x.dtype:
            _fail(name, f"must have x's dtype {x.dtype}, got {weight.dtype}")
    if activation not in linear_reference.ACTIVATIONS[1:]:
        _fail("activation", f"must be one of {linear_reference.ACTIVATIONS[1:]}, got {activation!r}")
