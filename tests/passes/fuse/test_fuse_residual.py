"""fuse_residual: structure, numerics, where it must not fire. Lowered and streamed: test_fuse_swiglu.py."""

from __future__ import annotations

import pytest
import torch
from tiny import aten
from torch.nn import functional
from traced import count, traced

from forebay.kernels import operators
from forebay.kernels.products.linear import operator as linear  # registers the operator
from forebay.passes.fuse.fuse_residual import fuse_residual
from forebay.passes.fuse.fuse_swiglu import fuse_swiglu

FUSED = operators.LINEAR.overload
assert linear is not None


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape).to(dtype) for shape in ((2, 5, 16), (16, 16), (16,), (2, 5, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_the_sum_becomes_part_of_the_product(dtype: torch.dtype, first: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, w, b)
        return y + r if first else r + y

    gm = traced(function, *inputs(dtype))
    expected = gm(*inputs(dtype))
    fuse_residual(gm)
    gm.recompile()
    (node,) = (n for n in gm.graph.nodes if n.op == "call_function")
    x, w, b, r = gm.graph.find_nodes(op="placeholder")
    assert node.target is FUSED and node.args == (x, w, b, None, r, "")
    assert node.meta["made_by"] == "fuse_residual" and node.meta["val"].dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 2.0**-7
    assert torch.allclose(gm(*inputs(dtype)), expected, rtol=limit, atol=limit)


def test_of_two_products_the_later_takes_the_sum() -> None:
    gm = traced(lambda x, w, b, r: functional.linear(x, w) + functional.linear(r, w, b) + x, *inputs())
    expected = gm(*inputs())
    fuse_residual(gm)
    gm.recompile()
    (fused,) = gm.graph.find_nodes(op="call_function", target=FUSED)
    assert fused.args[4].target is aten.linear.default and count(gm, aten.add.Tensor) == 1, "one residual each"
    assert torch.allclose(gm(*inputs()), expected, atol=1e-5)


def test_it_adds_to_what_fuse_swiglu_made() -> None:
    gm = traced(lambda x, w, b, r: functional.gelu(functional.linear(x, w, b)) + r, *inputs())
    expected = gm(*inputs())
    fuse_swiglu(gm)
    fuse_residual(gm)
    gm.recompile()
    (node,) = (n for n in gm.graph.nodes if n.op == "call_function")
    assert node.args[5] == "gelu" and node.args[4] is not None
    assert torch.allclose(gm(*inputs()), expected, atol=1e-5)


@pytest.mark.parametrize("function", [
    lambda x, w, b, r: functional.linear(x, w) + b,  # a broadcast
    lambda x, w, b, r: functional.linear(x, w) + 1,
    lambda x, w, b, r: functional.linear(x, w) - r,
    lambda x, w, b, r: torch.add(functional.linear(x, w), r, alpha=2),
    lambda x, w, b, r: functional.linear(x, w) + r.double(),  # the sum has another dtype
    lambda x, w, b, r: functional.linear(x[:1], w) + r,  # the product is the smaller one
    lambda x, w, b, r: (lambda y: y + y)(functional.linear(x, w)),  # no residual but itself
])
def test_other_sums_are_left_alone(function) -> None:
    gm = traced(function, *inputs())
    before = str(gm.graph)
    fuse_residual(gm)
    assert str(gm.graph) == before


def test_products_that_others_read_stay() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = functional.linear(x, w, b)
        return y + r, y

    gm = traced(function, *inputs())
    fuse_residual(gm)
    assert count(gm, FUSED) == 0
