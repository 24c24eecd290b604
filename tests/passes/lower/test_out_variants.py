"""out_variant finds the operator that writes into given memory; the other helpers read schemas."""

from __future__ import annotations

import pytest
import torch
from tiny import aten, flat_graph

from forebay.kernels import operators
from forebay.passes.lower.out_variants import COPIES, is_view, mutated_arguments, named_arguments, out_variant

FLOATS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("op", "args"), [
    (aten.add.Tensor, (FLOATS, FLOATS)),
    (aten.mul.Scalar, (FLOATS, 3.0)),
    (aten.pow.Tensor_Scalar, (FLOATS.abs(), 2.0)),
    (aten.silu.default, (FLOATS,)),
    (aten.mm.default, (FLOATS, FLOATS.t())),
    (aten.mean.dim, (FLOATS, [-1], True)),
    (aten.rsqrt.default, (FLOATS.abs(),)),
    (aten._softmax.default, (FLOATS, -1, False)),
    (aten.cat.default, ([FLOATS, FLOATS], 1)),
    (aten.embedding.default, (FLOATS, torch.tensor([2, 0]))),
    (aten.topk.default, (FLOATS, 2)),
    (aten.arange.start_step, (1, 5, 1)),
    (aten.full.default, ([2, 2], 3.0)),
])
def test_writes_what_the_operator_returns(op: torch._ops.OpOverload, args: tuple) -> None:
    variant = out_variant(op)
    assert variant is not None, op
    result = op(*args)
    results = result if isinstance(result, tuple) else (result,)
    out = [torch.empty_like(r) for r in results]
    names = [a.name for a in variant._schema.arguments if a.is_out]
    variant(*args, **dict(zip(names, out, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(out, results, strict=True))


@pytest.mark.parametrize("op", [aten.view.default, aten.t.default, aten.copy_.default, aten.dropout.default])
def test_no_variant_is_invented(op: torch._ops.OpOverload) -> None:
    assert out_variant(op) is None


def test_variant_takes_every_argument_that_matters() -> None:
    """An overload that lacks an argument (other than dtype and the like) would compute something else."""
    for op in (aten.add.Tensor, aten.sum.dim_IntList, aten.clamp.default, aten.native_layer_norm.default):
        variant = out_variant(op)
        assert variant is not None
        names = {a.name for a in variant._schema.arguments}
        left = {a.name for a in op._schema.arguments} - names
        assert left <= {"dtype", "layout", "device", "pin_memory", "memory_format"}


def test_views_and_copies_are_told_apart() -> None:
    assert all(is_view(op) for op in (aten.view.default, aten.t.default, aten.slice.Tensor, aten.split.Tensor))
    assert not any(is_view(op) for op in (aten.add.Tensor, aten.clone.default, aten.copy_.default))
    assert not is_view(torch.add)
    assert aten.clone.default in COPIES and aten.add.Tensor not in COPIES


def test_mutated_arguments_by_position() -> None:
    assert mutated_arguments(aten.copy_.default) == (0,)
    assert mutated_arguments(aten.add.Tensor) == ()
    assert mutated_arguments(operators.KV_APPEND.overload) == (0, 1)


def test_arguments_by_the_names_of_the_schema() -> None:
    gm = flat_graph(lambda g, n: g.call_function(aten.mean.dim, (n["x"], [0]), {"keepdim": True}), {"x": FLOATS}, {})
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    found = named_arguments(node, node.target)
    assert set(found) == {"self", "dim", "keepdim"} and found["dim"] == [0] and found["keepdim"] is True
