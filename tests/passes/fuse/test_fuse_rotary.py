"""fuse_rotary: structure, numerics, where it must not fire. Whole models are compared in tests/e2e/test_families.py."""

from __future__ import annotations

import pytest
import torch
from traced import count, traced

from forebay.kernels import operators
from forebay.kernels.positions.rotary import operator as rotary  # registers the operator
from forebay.passes.fuse.fuse_rotary import fuse_rotary

aten = torch.ops.aten
FUSED = operators.ROTARY.overload
assert rotary is not None


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def embed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(t.to(dtype) for t in (torch.randn(2, 3, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pattern_becomes_one_operator_of_the_same_bits(dtype: torch.dtype) -> None:
    x, cos, sin = inputs(dtype)
    gm = traced(embed, x, cos, sin)
    expected = gm(x, cos, sin)
    fuse_rotary(gm)
    gm.recompile()
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [FUSED]
    assert torch.equal(gm(x, cos, sin), expected)


def test_queries_and_keys_share_their_tables() -> None:
    x, cos, sin = inputs()
    gm = traced(lambda q, k, c, s: (embed(q, c, s), embed(k, c, s)), x, x[:, :1] + 1, cos, sin)
    fuse_rotary(gm)
    assert count(gm, FUSED) == 2 and count(gm, aten.unsqueeze.default) == 0


@pytest.mark.parametrize("function", [
    lambda x, c, s: x * c.unsqueeze(1) - rotate_half(x) * s.unsqueeze(1),  # a difference
    lambda x, c, s: x * c.unsqueeze(1) + x * s.unsqueeze(1),  # nothing is rotated
    lambda x, c, s: x * c.unsqueeze(1) + rotate_half(x + 1) * s.unsqueeze(1),  # something else is
    lambda x, c, s: x * c.unsqueeze(1) + torch.cat((-x[..., 2:], x[..., :2]), -1) * s.unsqueeze(1),  # unequal halves
    lambda x, c, s: x * c.unsqueeze(1) + torch.cat((x[..., 4:], -x[..., :4]), -1) * s.unsqueeze(1),  # the other way
])
def test_other_expressions_are_left_alone(function) -> None:
    gm = traced(function, *inputs())
    before = str(gm.graph)
    fuse_rotary(gm)
    assert str(gm.graph) == before


def test_parts_that_others_read_stay() -> None:
    def function(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = rotate_half(x)
        return x * c.unsqueeze(1) + turned * s.unsqueeze(1), turned

    gm = traced(function, *inputs())
    fuse_rotary(gm)
    assert count(gm, FUSED) == 0
