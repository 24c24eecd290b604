"""The rules of layouts say what torch says, or nothing."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples
from torch.utils._pytree import tree_map_only

from forebay.rewriter.capture import layouts
from forebay.rewriter.capture.layouts import layout_of, run_on_meta

aten = torch.ops.aten
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool])
SIZES = st.integers(0, 3)


@st.composite
def tensors(draw: st.DrawFn, rank: int = 4) -> torch.Tensor:
    """On the CPU: contiguous, transposed, expanded or a slice of a larger one."""
    found = torch.ones(draw(st.lists(SIZES, max_size=rank)), dtype=draw(DTYPES))
    kind = draw(st.sampled_from(["as it is", "as it is", "as it is", "transposed", "expanded", "sliced"]))
    if kind == "transposed" and found.ndim > 1:
        return found.transpose(0, -1)
    if kind == "expanded":
        return found[None].expand(2, *found.shape)
    if kind == "sliced" and found.ndim:
        return torch.ones((*found.shape[:-1], found.shape[-1] + 2), dtype=found.dtype)[..., 1 : 1 + found.shape[-1]]
    return found


numbers = st.one_of(st.integers(-2, 3), st.floats(0.5, 2), st.booleans())
PAIRS = sorted(layouts._BINARY | layouts._COMPARE, key=str)
ALONE = sorted(layouts._UNARY, key=str)


def agrees(target: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether there is a rule for these operands; if so it says what torch gives for them on the CPU."""
    onto = tree_map_only(torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
                         (args, kwargs))
    found = layout_of(target, *onto)
    if found is None:
        return False
    wanted = target(*args, **kwargs)
    for one, right in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (right.shape, right.stride(), right.dtype)
        assert one.is_meta and one.storage_offset() == 0
    return True


@settings(deadline=None, max_examples=examples(300))
@given(st.sampled_from(PAIRS), tensors(), st.one_of(tensors(), numbers))
def test_pairs(target: Any, left: torch.Tensor, right: Any) -> None:
    agrees(target, (left, right), {})


@settings(deadline=None, max_examples=examples(150))
@given(st.sampled_from(ALONE), tensors())
def test_single_operands(target: Any, operand: torch.Tensor) -> None:
    agrees(target, (operand,), {})


@settings(deadline=None, max_examples=examples(200))
@given(st.sampled_from([aten.gelu.default, aten.softplus.default, aten.relu.default]), tensors(),
       st.lists(numbers, max_size=3), st.sampled_from([{}, {"approximate": "tanh"}]))
def test_single_operands_with_settings(
    target: Any, operand: torch.Tensor, more: list[Any], options: dict[str, Any]
) -> None:
    agrees(target, (operand, *more), options)


@settings(deadline=None, max_examples=examples(200))
@given(st.sampled_from([aten.mean.dim, aten.sum.dim_IntList]), tensors(), st.lists(st.integers(-4, 3), max_size=2),
       st.booleans(), st.sampled_from([{}, {"dtype": torch.float64}]))
def test_reductions(target: Any, operand: torch.Tensor, dims: list[int], keep: bool, options: dict[str, Any]) -> None:
    agrees(target, (operand, dims, keep), options)


@settings(deadline=None, max_examples=examples(200))
@given(tensors(), st.integers(-4, 3), st.integers(0, 3), st.sampled_from([None, torch.float64, torch.int64]))
def test_softmax_and_the_largest(operand: torch.Tensor, dim: int, count: int, dtype: torch.dtype | None) -> None:
    agrees(aten.softmax.int, (operand, dim, dtype), {})
    agrees(aten._softmax.default, (operand, dim, False), {})
    agrees(aten.topk.default, (operand, count, dim), {})


@settings(deadline=None, max_examples=examples(200))
@given(tensors(2), tensors(3), tensors(3))
def test_choices(condition: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    agrees(aten.where.self, (condition, one, other), {})
    agrees(aten.where.self, (condition, one, torch.zeros_like(one)), {})


@settings(deadline=None, max_examples=examples(300))
@given(st.sampled_from([aten.matmul.default, aten.mm.default, aten.bmm.default]), tensors(), tensors(), st.booleans())
def test_matrices(target: Any, left: torch.Tensor, right: torch.Tensor, fits: bool) -> None:
    if fits and left.ndim and right.ndim > 1:
        right = torch.ones((*left.shape[:-2], left.shape[-1], 3)[-max(2, left.ndim):], dtype=left.dtype)
    agrees(target, (left, right), {})


@settings(deadline=None, max_examples=examples(200))
@given(tensors(), st.integers(0, 3), st.sampled_from([None, (), (1,), (0,)]), st.booleans())
def test_matrices_and_biases(x: torch.Tensor, rows: int, more: tuple[int, ...] | None, transposed: bool) -> None:
    weight = torch.ones((rows, x.shape[-1]) if x.ndim else (rows, 2), dtype=x.dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    bias = None if more is None else torch.ones((*more, rows), dtype=x.dtype)
    agrees(aten.linear.default, (x, weight, bias), {})
    if bias is not None:
        agrees(aten.addmm.default, (bias, x, weight.t()), {})


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(tensors(3), max_size=3), st.integers(-4, 3))
def test_concatenation(parts: list[torch.Tensor], dim: int) -> None:
    agrees(aten.cat.default, (parts, dim), {})


@settings(deadline=None, max_examples=examples(200))
@given(tensors(3), st.integers(-4, 3), st.lists(SIZES, max_size=3), st.sampled_from([torch.int64, torch.int32]))
def test_gather(source: torch.Tensor, dim: int, shape: list[int], dtype: torch.dtype) -> None:
    agrees(aten.gather.default, (source, dim, torch.zeros(shape, dtype=dtype)), {})


@settings(deadline=None, max_examples=examples(100))
@given(tensors(2), tensors(3))
def test_embedding(weight: torch.Tensor, ids: torch.Tensor) -> None:
    agrees(aten.embedding.default, (weight, torch.zeros_like(ids)), {})


@settings(deadline=None, max_examples=examples(200))
@given(st.sampled_from([aten.arange.default, aten.arange.start, aten.arange.start_step]), numbers, numbers, numbers,
       st.sampled_from([{}, {"dtype": torch.float32}, {"dtype": torch.int32}]))
def test_counting(target: Any, start: Any, end: Any, step: Any, options: dict[str, Any]) -> None:
    bounds = {aten.arange.default: (end,), aten.arange.start: (start, end), aten.arange.start_step: (start, end, step)}
    agrees(target, bounds[target], options)


@pytest.mark.parametrize(("target", "args"), [
    (aten.add.Tensor, (torch.ones(2, 3), torch.ones(3))), (aten.mul.Tensor, (torch.ones(4), 0.5)),
    (aten.cos.default, (torch.ones(2),)), (aten.cat.default, ([torch.ones(2, 1), torch.ones(2, 2)], -1)),
    (aten.gather.default, (torch.ones(2, 3), 1, torch.zeros(2, 1, dtype=torch.int64))),
    (aten.embedding.default, (torch.ones(5, 2), torch.zeros(1, 3, dtype=torch.int64))), (aten.arange.default, (4,)),
    (aten.arange.start_step, (5, 1, -2)), (aten.gelu.default, (torch.ones(2),)), (aten.relu.default, (torch.ones(2),)),
    (aten.mul.Tensor, (torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 3))),
    (aten.mul.Tensor, (torch.ones(2, 3).t(), torch.ones(2, 3).t())), (aten.pow.Tensor_Scalar, (torch.ones(2), 2)),
    (aten.mean.dim, (torch.ones(2, 3), [-1], True)), (aten.softmax.int, (torch.ones(2, 3), -1)),
    (aten.topk.default, (torch.ones(2, 3), 2)), (aten.softplus.default, (torch.ones(2, 3), 1.0, 20.0)),
    (aten.where.self, (torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 3), torch.ones(3))),
    (aten.linear.default, (torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(5))), (aten.gt.Scalar, (torch.ones(2), 0)),
    (aten.addmm.default, (torch.ones(5), torch.ones(2, 4), torch.ones(5, 4).t())),
    (aten.matmul.default, (torch.ones(2, 3, 4), torch.ones(2, 4, 5)))])
def test_plain_operands_have_a_rule(target: Any, args: tuple) -> None:
    assert agrees(target, args, {})
    assert layout_of(aten.add.Tensor, (torch.ones(2, device="meta"), 1), {"alpha": 2}) is None


@pytest.mark.parametrize(("target", "count"), [(aten.mul.Tensor, 1), (aten.add.Tensor, 3), (aten.tanh.default, 2)])
def test_operands_that_an_operation_has_not_or_lacks_have_no_rule(target: Any, count: int) -> None:
    assert layout_of(target, [torch.empty(2, 3, device="meta")] * count, {}) is None


def test_no_rule_loads_what_is_slow_to_load() -> None:
    script = ("import sys, torch; from forebay.rewriter.capture.layouts import layout_of; a = torch.ops.aten\n"
              "m = torch.ones(2, 3, device='meta')\n"
              "for t, x in ((a.add.Tensor, (m, m)), (a.sin.default, (m,)), (a.cat.default, ([m, m],)),\n"
              "             (a.arange.default, (3,)), (a.gelu.default, (m,)), (a.mean.dim, (m, [1])),\n"
              "             (a.softmax.int, (m, 1)), (a.topk.default, (m, 2)), (a.linear.default, (m, m, m[:, 0])),\n"
              "             (a.mul.Tensor, (m.t(), m.t())), (a.gt.Scalar, (m, 0))):\n"
              "    assert layout_of(t, x, {}) is not None\n"
              "print([n for n in ('sympy', 'torch._dynamo') if n in sys.modules])")
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def remembered(target: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch gives for meta operands, and what is given the second time they are asked for."""
    run_on_meta(target, args, kwargs or {})
    return target(*args, **(kwargs or {})), run_on_meta(target, args, kwargs or {})


M = torch.empty(2, 3, 4, device="meta")


@pytest.mark.parametrize(("target", "args", "kwargs"), [
    (aten.mm.default, (M[0].t(), M[1]), {}), (aten.cumsum.default, (M, 1), {}), (aten.clone.default, (M,), {}),
    (aten.clone.default, (M.permute(2, 0, 1),), {}), (aten.add.Tensor, (M[:, 1:], 1.5), {"alpha": 2}),
    (aten._to_copy.default, (M.to(torch.bfloat16),), {"dtype": torch.float64}), (aten.new_zeros.default, (M, [5]), {}),
    (aten.mul.Tensor, (M.transpose(0, 2), M.transpose(0, 2)[:1]), {}), (aten.convolution.default,
     (M, torch.empty(5, 3, 2, device="meta"), None, [1], [0], [1], False, [0], 1), {})])
def test_what_torch_answered_once_it_would_answer_again(target: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    with mock.patch.object(layouts, "_answers", OrderedDict()):
        wanted, found = remembered(target, args, kwargs)
        assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert layouts._answers and found.is_meta
        assert found.untyped_storage()._cdata not in {t.untyped_storage()._cdata for t in args if torch.is_tensor(t)}


def test_numbers_that_are_equal_and_not_the_same_are_told_apart() -> None:
    whole = torch.empty(3, dtype=torch.int64, device="meta")
    found = [run_on_meta(aten.add.Tensor, (whole[::2], n), {}).dtype for n in (1, 1.0, True)]
    assert found == [torch.int64, torch.float32, torch.int64]
    torch.set_default_dtype(torch.float64)
    try:
        assert run_on_meta(aten.add.Tensor, (whole[::2], 1.0), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("target", "args"), [
    (aten.view.default, (M, [6, 4])), (aten.select.int, (M, 0, 1)), (aten.reshape.default, (M, [24])),
    (aten.add_.Tensor, (M, 1)), (aten.to.dtype, (M, torch.float32)), (aten.split.Tensor, (M, 1))])
def test_what_shows_or_writes_its_operands_is_asked_each_time(target: Any, args: tuple) -> None:
    with mock.patch.object(layouts, "_answers", OrderedDict()):
        found = run_on_meta(target, args, {})
        first = found[0] if isinstance(found, (list, tuple)) else found
        assert first.untyped_storage()._cdata == M.untyped_storage()._cdata
        assert not layouts._answers


def test_the_oldest_answers_go() -> None:
    with mock.patch.object(layouts, "_answers", OrderedDict()), mock.patch.object(layouts, "_MOST_ANSWERS", 2):
        for n in (1, 2, 3, 2, 4):
            run_on_meta(aten.new_zeros.default, (M, [n]), {})
        assert [shape[0] for shape, *_ in layouts._answers.values()] == [2, 4]
