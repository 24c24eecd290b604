"""fuse_layer_norm: structure, numerics, where it must not fire (whole models: tests/e2e/test_families.py)."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_near
from torch.nn.functional import layer_norm
from traced import count, traced

from forebay.kernels import operators
from forebay.kernels.operator import Tensors
from forebay.passes.fuse.fuse_layer_norm import fuse_layer_norm

aten = torch.ops.aten
FUSED = operators.LAYER_NORM.overload


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["weight bias", "weight", ""])
def test_it_becomes_one_operator_of_equal_result(dtype: torch.dtype, given: str) -> None:
    x, *parts = (t.to(dtype) for t in (torch.randn(2, 5, 24) + 3, torch.randn(24), torch.randn(24)))
    parts = parts[: len(given.split())]
    gm = traced(lambda x, *parts: layer_norm(x, (24,), *parts, eps=1e-3), x, *parts)
    expected = gm(x, *parts)
    fuse_layer_norm(gm)
    gm.recompile()
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [FUSED]
    assert_near(gm(x, *parts), expected.double())
    (node,) = (n for n in gm.graph.nodes if n.target is FUSED)
    assert node.meta["made_by"] == "fuse_layer_norm" and node.meta["val"].shape == expected.shape


@pytest.mark.parametrize("function", [
    lambda x, w: layer_norm(x, x.shape[-2:]),  # over two dimensions
    lambda x, w: layer_norm(x.double(), (24,), w.double()),  # of a dtype that no kernel has
    lambda x, w: layer_norm(torch.cat([x] * 1000, -1), (24000,)),  # longer than a GPU's kernel holds
])  # fmt: skip
def test_others_are_left_alone(function) -> None:
    gm = traced(function, torch.randn(5, 24), torch.randn(24))
    before = str(gm.graph)
    fuse_layer_norm(gm)
    assert count(gm, FUSED) == 0 and str(gm.graph) == before


@pytest.mark.parametrize("strided", [False, True])
def test_what_it_makes_is_bound_and_counts_its_workspace(strided: bool) -> None:
    x, weight = torch.randn(6, 48)[::2, ::2] if strided else torch.randn(3, 24), torch.randn(24)
    out = torch.full((3, 24), torch.nan)
    use = Tensors((x, weight, None, 1e-5), {}, (out,))
    operators.LAYER_NORM.bind["cpu"](use)()
    assert_near(out, layer_norm(x, (24,), weight).double())
    assert operators.LAYER_NORM.workspace_nbytes(use, "cpu") == 4 * 3 * 24 + 2 * 4 * 3
    with pytest.raises(ValueError, match="layer_norm: weight must have shape"):
        operators.LAYER_NORM.bind["cpu"](use._replace(args=(x, weight[1:], None, 1e-5)))
