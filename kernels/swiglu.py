"""`forebay::swiglu`: act(x G^T) * (x U^T), the gated half of a feed-forward network (Shazeer 2020).

Both products, the activation and the result round to x's dtype, as the operators apart would. On the CPU two calls of
`forebay::linear` do it: the second multiplies by the first's result where it lies, so nothing is gained by more. The
rewriter writes those two (`passes/fuse/fuse_swiglu.py`), whose weights may stream one after the other; the operator is
for devices where x is worth reading once for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels import linear


def reference(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """The definition in float64, on any device: x [..., K], gate and up [N, K] -> [..., N]."""
    gated = linear.reference(x, gate, None, linear.After(activation))
    return linear.reference(x, up, None, linear.After(multiplier=gated))


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
    if activation not in linear.ACTIVATIONS[1:]:
        _fail("activation", f"must be one of {linear.ACTIVATIONS[1:]}, got {activation!r}")


@torch.library.custom_op("forebay::swiglu", mutates_args=(), device_types="cpu")
def swiglu(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """x [..., K], gate and up [N, K], all of one dtype -> contiguous [..., N]; ValueError names what is wrong."""
    check(x, gate, up, activation)
    out = torch.ops.forebay.linear(x, gate, None, None, None, activation)
    flat, matrix = x.contiguous(), up.contiguous()
    impl = linear.default_choice(up.dtype, x.numel() // max(1, x.shape[-1]), *up.shape)
    linear.run(impl, flat, matrix, None, out, after=linear.After(multiplier=out))
    return out


@swiglu.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    return x.new_empty(*x.shape[:-1], gate.shape[0])


@swiglu.register_kernel("cuda")
def _(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    from forebay.kernels.gpu.swiglu import swiglu as launch  # Triton is needed only here

    check(x, gate, up, activation)
    out = x.new_empty(*x.shape[:-1], gate.shape[0])
    launch(x, gate, up, activation, out)
    return out
