"""Shapes of products, as the plan's table names them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from forebay.rewriter.ir.graph import META, WeightInput
from forebay.rewriter.ir.products import product_shape
from forebay.rewriter.planning.product_shapes import product_uses


def _linear(x: torch.Tensor, n: int) -> fx.GraphModule:
    """x [..., K] times a weight [n, K], as a flat graph."""
    graph = fx.Graph()
    rows, weight = graph.placeholder("x"), graph.placeholder("weight")
    rows.meta["val"], weight.meta["val"] = x, x.new_empty(n, x.shape[-1])
    weight.meta[META] = WeightInput("w")
    node = graph.call_function(torch.ops.aten.linear.default, (rows, weight))
    node.meta["val"] = x @ weight.meta["val"].t()
    graph.output(node)
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("shape, stride", [((2, 1, 1, 64), (64, 1, 1, 1)), ((1, 3, 1, 64), (5, 64, 7, 1)),
                                           ((2, 1, 3, 64), (192, 9, 64, 1)), ((1, 1, 64), (3, 2, 1))])
def test_strides_of_dimensions_of_one_do_not_count(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    gm = _linear(torch.empty(400).as_strided(shape, stride), 16)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert product_shape(node) == ("float32", torch.Size(shape[:-1]).numel(), 16, 64)


@pytest.mark.parametrize("shape, stride", [((2, 3, 64), (64, 128, 1)), ((2, 1, 3, 64), (64, 1, 128, 1)),
                                           ((2, 64), (1, 2))])
def test_rows_in_another_order_are_not_ours(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    gm = _linear(torch.empty(400).as_strided(shape, stride), 16)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert product_shape(node) is None


def test_tiles_of_a_product_that_is_torchs_when_whole_have_its_sides() -> None:
    (use,) = product_uses(_linear(torch.empty(0, 64), 16))
    assert use.shape is None and use.cut == "n"
    assert use.tiled == ("float32", 0, 16, 64)
