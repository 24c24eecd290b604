"""fuse_rms_norm: structure, numerics, where it must not fire (whole models: tests/e2e/test_families.py)."""

from __future__ import annotations

import pytest
import torch
from traced import count, traced

from forebay.kernels import operators
from forebay.kernels.norms.rms_norm import operator as rms_norm  # registers the operator
from forebay.passes.fuse.fuse_rms_norm import fuse_rms_norm

aten = torch.ops.aten
FUSED = operators.RMS_NORM.overload
assert rms_norm is not None


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pattern_becomes_one_operator_of_equal_result(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 5, 24).to(dtype), torch.randn(24).to(dtype)
    gm = traced(norm, x, weight)
    expected = gm(x, weight)
    fuse_rms_norm(gm)
    gm.recompile()
    assert count(gm, FUSED) == 1
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [FUSED]
    torch.testing.assert_close(gm(x, weight), expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_two_norms_in_a_row() -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)
    gm = traced(lambda x, w: norm(norm(x, w), w), x, weight)
    fuse_rms_norm(gm)
    gm.recompile()
    assert count(gm, FUSED) == 2 and count(gm, aten.rsqrt.default) == 0
    torch.testing.assert_close(gm(x, weight), norm(norm(x, weight), weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [
    lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x.shape[0] * x.sum())),  # eps is no constant
    lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5)),  # another dimension
    lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-5)),  # another power
    lambda x, w: (1 + w) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),  # Gemma's weight is an expression
    lambda x, w: w * (2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),  # scales something else
])
def test_other_expressions_are_left_alone(function) -> None:
    x, weight = torch.rand(16, 16), torch.rand(16)
    gm = traced(function, x, weight)
    before = str(gm.graph)
    fuse_rms_norm(gm)
    assert str(gm.graph) == before


def test_parts_that_others_read_stay() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return w * (x * scale), scale

    gm = traced(function, torch.rand(4, 16), torch.rand(16))
    fuse_rms_norm(gm)
    assert count(gm, FUSED) == 0
