"""order_products: which products move, and where nothing may."""

from __future__ import annotations

import pytest
import torch
from families import captured
from torch.nn.functional import linear
from traced import traced

from forebay.passes.place.order_products import order_products
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

X, SMALL, WIDE = torch.randn(3, 8), torch.randn(4, 8), torch.randn(64, 8)


def between(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Something follows the first product before the second is made, and a third has another operand."""
    y = linear(x, one).exp()
    z = linear(x, two)
    large = linear(y, wide.narrow(1, 0, 4)).exp()
    return large.sum(1, keepdim=True) + z


def widened(x: torch.Tensor, wide: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """A second wide product would wait for the sum of the first."""
    return linear(x, wide).cumsum(1).sum(1, keepdim=True) + linear(x, wide).sum(1, keepdim=True) + linear(x, one)


def test_products_of_one_operand_stand_together() -> None:
    gm = traced(between, X, SMALL, SMALL.exp(), WIDE)
    expected = gm(X, SMALL, SMALL.exp(), WIDE)
    order_products(gm)
    gm.graph.lint()
    gm.recompile()
    called = [n for n in gm.graph.nodes if n.op == "call_function"]
    products = [i for i, n in enumerate(called) if n.target is torch.ops.aten.linear.default]
    assert products[:2] == [0, 1] and products[2] > 2
    torch.testing.assert_close(gm(X, SMALL, SMALL.exp(), WIDE), expected, rtol=0, atol=0)
    before = str(gm.graph)
    order_products(gm)
    assert str(gm.graph) == before


@pytest.mark.parametrize(("function", "inputs"), (
    (widened, (X, WIDE, SMALL)),
    (lambda x, w: linear(x, w) + linear(x * 2, w), (X, SMALL)),
    (lambda x, w: linear(x, w) + linear(x, w.exp()), (X, SMALL)),  # the second weight is made later
))
def test_an_order_that_cannot_be_better_is_left(function, inputs) -> None:
    gm = traced(function, *inputs)
    before = str(gm.graph)
    order_products(gm)
    assert str(gm.graph) == before


def test_a_graph_that_calls_blocks_is_left_alone() -> None:
    step = rewrite_captured(captured("llama"), Switches()).step
    before = str(step.graph)
    order_products(step)
    assert str(step.graph) == before
