"""fuse_swiglu: structure, numerics, streaming in tiles, where it must not fire (whole models: test_families.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tiny import Tiny, aten, planned, run_program, tiny
from torch import fx
from torch.nn import functional
from traced import count, traced

from forebay.kernels import operators
from forebay.kernels.products.linear import operator as linear  # registers the operator
from forebay.passes.fuse.fuse_residual import fuse_residual
from forebay.passes.fuse.fuse_swiglu import fuse_swiglu
from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.ir.program import Copy, Launch

FUSED = operators.LINEAR.overload
assert linear is not None


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape).to(dtype) for shape in ((2, 5, 16), (24, 16), (24, 16), (24,)))


ACTIVATIONS = {
    "silu": functional.silu, "relu": functional.relu, "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_pair_becomes_two_products(name: str, dtype: torch.dtype) -> None:
    act = ACTIVATIONS[name]
    gm = traced(lambda x, g, u, b: act(functional.linear(x, g, b)) * functional.linear(x, u), *inputs(dtype))
    expected = gm(*inputs(dtype))
    fuse_swiglu(gm)
    gm.recompile()
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [FUSED, FUSED]
    gate, up = gm.graph.find_nodes(op="call_function", target=FUSED)
    assert gate.args[3:] == (None, None, name) and up.args[3:] == (gate, None, "")
    assert gate.meta["made_by"] == "fuse_swiglu" and gate.meta["val"].shape == (2, 5, 24)
    limit = 1e-5 if dtype == torch.float32 else 2.0**-7
    assert torch.allclose(gm(*inputs(dtype)), expected, rtol=limit, atol=limit)


def test_an_activation_alone_is_folded_and_either_side_may_be_the_gate() -> None:
    gm = traced(lambda x, g, u, b: functional.relu(functional.linear(x, g, b)), *inputs())
    fuse_swiglu(gm)
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [FUSED]
    gm = traced(lambda x, g, u, b: functional.linear(x, u) * functional.silu(functional.linear(x, g)), *inputs())
    expected = gm(*inputs())
    fuse_swiglu(gm)
    gm.recompile()
    assert count(gm, FUSED) == 2 and count(gm, aten.mul.Tensor) == 0
    assert torch.allclose(gm(*inputs()), expected, atol=1e-5)


@pytest.mark.parametrize("function", [
    lambda x, g, u, b: functional.leaky_relu(functional.linear(x, g)),  # no activation of ours
    lambda x, g, u, b: functional.linear(x, g) * b,  # a broadcast
    lambda x, g, u, b: functional.linear(x, g) * 2,
    lambda x, g, u, b: functional.silu(x @ g.T),  # not written as a product with a weight
    lambda x, g, u, b: functional.silu(functional.linear(x.double(), g.double())),  # a dtype our products do not take
])
def test_other_expressions_are_left_alone(function) -> None:
    gm = traced(function, *inputs())
    before = str(gm.graph)
    fuse_swiglu(gm)
    assert str(gm.graph) == before


def test_products_that_others_read_stay() -> None:
    def function(x: torch.Tensor, g: torch.Tensor, u: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = functional.linear(x, g)
        return functional.silu(y), y, y * y

    gm = traced(function, *inputs())
    fuse_swiglu(gm)
    assert count(gm, FUSED) == 0 and count(gm, aten.linear.default) == 1


def feed_forward(folder: Path) -> Tiny:
    """x + down(silu(gate(x)) * up(x)), folded by both passes."""
    torch.manual_seed(1)
    weights = {"gate": torch.randn(300, 32) / 6, "up": torch.randn(300, 32) / 6, "down": torch.randn(32, 300) / 17}
    x = {"x": torch.randn(3, 4, 32)}
    names = ("x", *weights)

    def function(x: torch.Tensor, g: torch.Tensor, u: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return x + functional.linear(functional.silu(functional.linear(x, g)) * functional.linear(x, u), d)

    gm = traced(function, x["x"], *weights.values())
    fuse_swiglu(gm)
    fuse_residual(gm)
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [FUSED] * 3

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        env = dict(zip(gm.graph.find_nodes(op="placeholder"), (nodes[n] for n in names), strict=True))
        for node in gm.graph.nodes:
            if node.op == "call_function":
                env[node] = graph.node_copy(node, env.__getitem__)
        return tuple(env[n] for n in gm.graph.output_node().args[0])

    return tiny(folder, build, x, weights)


@pytest.mark.parametrize("budget", [45_000, 60_000, 400_000])
def test_lowered_in_tiles_whole_and_resident_it_computes_the_same(tmp_path: Path, budget: int) -> None:
    model = feed_forward(tmp_path)
    x, w = model.inputs["x"], model.weights
    inner = functional.silu(functional.linear(x, w["gate"])) * functional.linear(x, w["up"])
    expected = x + functional.linear(inner, w["down"])
    plan, program = planned(model, Budget(budget))
    products = [i for i in program.step if isinstance(i, Launch)]
    assert {i.op for i in products} == {"forebay.linear"}
    streamed = any(isinstance(i, Copy) for i in program.step)
    assert streamed == (budget < 400_000) and (len(products) > 3) == streamed
    for item in products:  # whatever follows is read, and only the columns of the tile
        for name in ("multiplier", "residual"):
            if name in item.kwargs:
                assert item.kwargs[name].shape == item.out[0].shape
    assert sum("activation" in i.kwargs for i in products) >= 1
    got = run_program(program, plan, model, steps=3, poison=True)[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
