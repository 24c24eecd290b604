"""Values of symbolic sizes: what was asked before is given again, and nothing else is."""

from __future__ import annotations

import gc
import weakref

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from forebay.rewriter.ir.symbolic_values import symbolic_value

aten = torch.ops.aten


def mode_and_symbols() -> tuple[FakeTensorMode, list[torch.SymInt]]:
    env = ShapeEnv()
    found = []
    for name, hint in (("B", 3), ("S", 7)):
        source = ConstantSource(name)
        found.append(env.create_symintnode(env.create_symbol(hint, source, DimDynamic.DYNAMIC), hint=hint,
                                           source=source))
    return FakeTensorMode(shape_env=env), found  # type: ignore[return-value]


def test_what_was_asked_of_the_same_sizes_is_given_again() -> None:
    mode, (b, s) = mode_and_symbols()
    with mode:
        one, like, turned = torch.empty(b, s, 8), torch.empty(b, s, 8), torch.empty(s, b, 8)
        half, strided = torch.empty(b, s, 8, dtype=torch.bfloat16), torch.empty(b, 8, s).transpose(1, 2)
    first = symbolic_value(aten.slice.Tensor, (one, 2, 0, 4), {})
    assert symbolic_value(aten.slice.Tensor, (like, 2, 0, 4), {}) is first and first.shape == (b, s, 4)
    for args in ((one, 2, 0, 5), (one, 2, 1, 4), (turned, 2, 0, 4), (half, 2, 0, 4), (strided, 2, 0, 4)):
        other = symbolic_value(aten.slice.Tensor, args, {})
        plain = aten.slice.Tensor(*args)
        assert other is not first
        assert (other.shape, other.stride(), other.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert symbolic_value(aten.slice.Tensor, (first, 2, 0, 4), {}).storage_offset() == 0
    behind = symbolic_value(aten.slice.Tensor, (one, 2, 4, 8), {})
    assert (behind.shape, behind.stride()) == (first.shape, first.stride()) and behind.storage_offset() == 4


def test_numbers_of_other_types_and_named_arguments_are_told_apart() -> None:
    mode, (b, _) = mode_and_symbols()
    with mode:
        counts = torch.empty(b, dtype=torch.int64)
    whole, real = (symbolic_value(aten.mul.Tensor, (counts, by), {}) for by in (1, 1.0))
    assert (whole.dtype, real.dtype) == (torch.int64, torch.float32)
    kept, summed = (symbolic_value(aten.sum.dim_IntList, (counts, [0]), {"keepdim": keep}) for keep in (True, False))
    assert (kept.dim(), summed.dim()) == (1, 0)


def test_what_writes_to_its_operands_is_made_each_time_and_all_goes_with_the_mode() -> None:
    mode, (b, _) = mode_and_symbols()
    with mode:
        one, other = torch.empty(b), torch.empty(b)
    assert symbolic_value(aten.add_.Tensor, (one, 1), {}) is one
    assert symbolic_value(aten.add_.Tensor, (other, 1), {}) is other
    gone = weakref.ref(symbolic_value(aten.neg.default, (one,), {}))
    assert gone() is not None
    del mode, one, other, b, _
    gc.collect()
    assert gone() is None
