"""keeps_memory tells the out overloads that write where they are told from those that put other memory in its place."""

from __future__ import annotations

import pytest
import torch
from tiny import aten, flat_graph

from forebay.passes.lower.out_variants import named_arguments, out_variant
from forebay.passes.lower.probe_out_variants import keeps_memory

ROW = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
SQUARE = torch.rand(48, 48, generator=torch.Generator().manual_seed(0))
WIDE = torch.empty(4096, 513, device="meta")
TABLE, IDS = torch.empty(50257, 96, device="meta"), torch.empty(4, 1024, dtype=torch.int64, device="meta")


def kept(op: torch._ops.OpOverload, *args: object) -> bool:
    """keeps_memory for one call of `op`, its tensors being inputs of a graph."""
    tensors = {f"x{i}": a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    gm = flat_graph(lambda g, n: g.call_function(op, tuple(n.get(f"x{i}", a) for i, a in enumerate(args))), tensors, {})
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    variant = out_variant(op)
    assert variant is not None
    return keeps_memory(variant, op, node, named_arguments(node, op))


@pytest.mark.parametrize(("op", "args"), [
    (aten.binary_cross_entropy.default, (ROW, ROW, None, 1)),
    (aten.binary_cross_entropy.default, (ROW, ROW, None, 2)),
    (aten.linalg_qr.default, (SQUARE,)),
])
def test_overloads_that_leave_their_memory_are_found(op: torch._ops.OpOverload, args: tuple) -> None:
    assert not kept(op, *args)


@pytest.mark.parametrize(("op", "args"), [
    (aten.binary_cross_entropy.default, (ROW, ROW, None, 0)),
    (aten.add.Tensor, (ROW, ROW)),
    (aten.mul.Tensor, (WIDE, WIDE)),
    (aten.mm.default, (WIDE, WIDE.t())),
    (aten.mean.dim, (WIDE, [-1], True)),
    (aten.rsqrt.default, (WIDE,)),
    (aten._softmax.default, (WIDE, -1, False)),
    (aten.embedding.default, (TABLE, IDS)),
    (aten.gather.default, (WIDE, 1, IDS)),
    (aten.topk.default, (WIDE, 50)),
    (aten.sort.default, (WIDE,)),
    (aten.cumsum.default, (WIDE, 1)),
    (aten.native_layer_norm.default, (WIDE, [513], None, None, 1e-5)),
    (aten.upsample_nearest2d.default, (torch.empty(1, 3, 300, 200, device="meta"), [600, 400])),
    (aten.full.default, ([4096, 4096], 3.0)),
])
def test_usual_operators_write_where_they_are_told(op: torch._ops.OpOverload, args: tuple) -> None:
    """Of long tensors too, which are tried shorter."""
    assert kept(op, *args)


def test_lists_of_tensors_are_tried() -> None:
    gm = flat_graph(lambda g, n: g.call_function(aten.cat.default, ([n["a"], n["b"]], 1)), {"a": WIDE, "b": WIDE}, {})
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    variant = out_variant(aten.cat.default)
    assert variant is not None
    assert keeps_memory(variant, aten.cat.default, node, named_arguments(node, aten.cat.default))


def test_an_operator_that_refuses_the_trial_is_not_trusted() -> None:
    """No random matrix has a Cholesky factor; the call's own may."""
    assert not kept(aten.linalg_cholesky.default, SQUARE)


def test_a_trial_leaves_the_generator_alone() -> None:
    x = torch.rand(3, 7)
    before = torch.get_rng_state()
    kept(aten.bernoulli.default, x)
    assert torch.equal(torch.get_rng_state(), before)
