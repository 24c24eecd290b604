"""Layouts of the commonest operators' results, without asking torch.

On meta tensors torch computes these in Python, at up to 2 ms a call, and the first call loads symbolic shapes, sympy
and Dynamo, which is a fifth of the time that a process takes from its start to a first token. What is not plain enough
for a rule is torch's to answer, once for the same operands.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from forebay.rewriter.ir.program import row_major_strides

aten = torch.ops.aten

_BINARY = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar}
_COMPARE = {aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
            aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar}
_WITH_NUMBERS = {aten.pow.Tensor_Scalar, *(target for target in _COMPARE if target._overloadname == "Scalar")}
_UNARY = {aten.neg.default, aten.cos.default, aten.sin.default, aten.tanh.default, aten.exp.default,
          aten.rsqrt.default, aten.sigmoid.default, aten.silu.default, aten.relu.default, aten.gelu.default,
          aten.softplus.default, aten.sqrt.default, aten.reciprocal.default, aten.log.default, aten.erf.default}
_SETTINGS = {aten.gelu.default: 0, aten.softplus.default: 2}  # numbers that may follow the operand
_OF_ANY_NUMBERS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, *_COMPARE}  # others give floats


_MOST_ANSWERS = 20_000
_answers: OrderedDict[tuple[object, ...], tuple[Any, ...]] = OrderedDict()  # operator and operands -> result's layout


def run_on_meta(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `target` for these operands, tensors among them on the meta device: by a rule, by what torch answered for
    operands of the same layouts, or by asking it."""
    known = layout_of(target, args, kwargs)
    if known is not None:
        return known
    if not _depends_on_layouts_alone(target):
        return target(*args, **kwargs)
    key = (target, torch.get_default_dtype(), _described(args), _described(kwargs))
    answer = _answers.get(key)
    if answer is not None:
        _answers.move_to_end(key)
        shape, strides, dtype = answer
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    result = target(*args, **kwargs)
    if _stands_alone(result) and storage_key(result) not in {
            storage_key(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}:
        _answers[key] = (result.shape, result.stride(), result.dtype)
        if len(_answers) > _MOST_ANSWERS:
            _answers.popitem(last=False)
    return result


@functools.cache
def _depends_on_layouts_alone(target: object) -> bool:
    """Return whether it is an operator whose schema has one new tensor for a result, and writes to none."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    return (not schema.is_mutable and len(schema.returns) == 1 and schema.returns[0].alias_info is None
            and isinstance(schema.returns[0].type, torch.TensorType))


def _described(value: Any) -> Any:
    """Return a key that distinguishes operands: layouts of tensors, and numbers with their type, for 1, 1.0 and True
    are equal."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.storage_offset(), value.device, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_described, value))
    if isinstance(value, dict):
        return tuple([(name, _described(each)) for name, each in value.items()])
    return type(value), value


def _stands_alone(value: object) -> bool:
    return (type(value) is torch.Tensor and value.is_meta and value.layout is torch.strided
            and value.storage_offset() == 0 and not has_gaps(value))


def has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether its storage has other bytes than its elements; what works on a copy of a slice may return one."""
    return bool(tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size())


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors that show one storage."""
    return tensor.untyped_storage()._cdata


def layout_of(target: object, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Fresh meta tensors laid out as what `target` gives for these operands; None where torch is to be asked, for
    operands that it refuses among others."""
    if target in _BINARY or target in _COMPARE:
        second = (int, float) if target in _WITH_NUMBERS else torch.Tensor if target in _COMPARE else object
        fits = not kwargs and len(args) == 2 and isinstance(args[0], torch.Tensor) and isinstance(args[1], second)
        found = _pointwise(args, target not in _OF_ANY_NUMBERS) if fits else None
        return found if found is None or target in _BINARY else _as_it_lies(found, torch.bool)
    if target in _UNARY:
        numbers, named = args[1:], kwargs.keys() - ({"approximate"} if target is aten.gelu.default else set())
        fits = not named and len(numbers) <= _SETTINGS.get(target, 0) and all(type(n) in (int, float) for n in numbers)
        return _pointwise(args[:1], target not in _OF_ANY_NUMBERS) if fits else None
    rule = _RULES.get(target)
    return rule(*args, **kwargs) if rule is not None else None


def _pointwise(operands: Sequence[Any], floating: bool) -> torch.Tensor | None:
    """Return the layout of a pointwise result. Tensors have one dtype and are contiguous or lie alike, or they are
    contiguous and of several dtypes of floats. Numbers must not change the dtype."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    alike = bool(tensors) and _permuted(tensors)
    floats = all(t.dtype.is_floating_point and t.ndim for t in tensors)
    if not tensors or not (alike or _plain(tensors) or (floats and all(_plain([t]) for t in tensors))):
        return None
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors])
    fits = (int, float) if dtype.is_floating_point else int
    if dtype is torch.bool or dtype.is_complex or (floating and not dtype.is_floating_point) or not all(
            isinstance(x, torch.Tensor) or (isinstance(x, fits) and not isinstance(x, bool)) for x in operands):
        return None
    if alike:
        return _as_it_lies(tensors[0], dtype)
    try:
        shape = np.broadcast_shapes(*[tuple(t.shape) for t in tensors])
    except ValueError:
        return None
    return _empty(shape, dtype)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    if not tensors or not _plain(tensors) or not tensors[0].ndim:
        return None
    shape = list(tensors[0].shape)
    if not -len(shape) <= dim < len(shape):
        return None
    dim %= len(shape)
    rest = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    if len(rest) > 1 or any(t.ndim != len(shape) for t in tensors):
        return None
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _empty(shape, tensors[0].dtype)


def _gather(tensor: torch.Tensor, dim: int, index: torch.Tensor, **others: Any) -> torch.Tensor | None:
    if others or index.dtype is not torch.int64 or not (index.numel() and tensor.numel()):
        return None
    if tensor.ndim != index.ndim or not -tensor.ndim <= dim < tensor.ndim:
        return None
    within = [n <= m for i, (n, m) in enumerate(zip(index.shape, tensor.shape, strict=True)) if i != dim % tensor.ndim]
    return _empty(index.shape, tensor.dtype) if all(within) else None


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor | None:
    if not all(isinstance(x, int) for x in (*others, *named.values())):
        return None
    if weight.ndim != 2 or not weight.numel() or indices.dtype not in (torch.int32, torch.int64):
        return None
    return _empty((*indices.shape, weight.shape[1]), weight.dtype)


def _arange(*bounds: Any, dtype: torch.dtype | None = None, **others: Any) -> torch.Tensor | None:
    """Return the layout of a range of whole numbers: end, or start and end, or start, end and step."""
    if not all(type(n) is int for n in bounds) or others.get("layout") not in (None, torch.strided):
        return None
    if len(bounds) == 3 and bounds[2] == 0:
        return None
    count = len(range(*bounds))
    return _empty((count,), dtype or torch.int64) if count else None


def _where(condition: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    if condition.dtype is not torch.bool or not (_plain([condition]) and _plain([one, other])):
        return None
    return _pointwise((_as_it_lies(condition, one.dtype), one, other), False)


def _reduce(
    tensor: torch.Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """Return the layout of a sum or mean over some dimensions of a contiguous tensor of floats."""
    if not dims or not all(type(d) is int and -tensor.ndim <= d < tensor.ndim for d in dims) or not (
            _plain([tensor]) and tensor.dtype.is_floating_point):
        return None
    over = {d % tensor.ndim for d in dims}
    shape = [1 if i in over else n for i, n in enumerate(tensor.shape) if keepdim or i not in over]
    return _empty(shape, dtype or tensor.dtype) if len(over) == len(dims) else None


def _softmax(tensor: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor | None:
    """Return the layout of a softmax; the last argument is a dtype, or False in the form that has none."""
    if not -tensor.ndim <= dim < tensor.ndim or not _plain([tensor]) or not tensor.dtype.is_floating_point:
        return None
    return _empty(tensor.shape, tensor.dtype) if dtype in (None, False, tensor.dtype) else (
        _empty(tensor.shape, dtype) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None)


def _topk(
    tensor: torch.Tensor, k: int, dim: int = -1, largest: bool = True, order: bool = True
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not tensor.ndim or dim not in (-1, tensor.ndim - 1) or not _plain([tensor]) or not 0 < k <= tensor.shape[-1] or (
            tensor.dtype.is_complex or tensor.dtype is torch.bool):
        return None
    shape = (*tensor.shape[:-1], k)
    return _empty(shape, tensor.dtype), _empty(shape, torch.int64)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if not x.ndim or x.shape[-1] != weight.shape[-1] or not _plain([x]) or (
            bias is not None and (bias.dtype is not x.dtype or bias.shape != weight.shape[:1])):
        return None
    return _matmul(x, weight.mT) if weight.ndim == 2 else None


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    if weight.ndim != 2 or bias.dtype is not x.dtype or bias.shape != weight.shape[1:]:
        return None
    return _matmul(x, weight) if x.ndim == 2 else None


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Return the layout of a product of a contiguous tensor and a matrix, or of two batches of one size."""
    if not left.ndim or right.ndim < 2 or left.shape[-1] != right.shape[-2] or left.dtype is not right.dtype or not (
            _plain([left]) and left.dtype.is_floating_point and right.numel()):
        return None
    if right.ndim > 2 and (left.ndim != right.ndim or left.shape[:-2] != right.shape[:-2]):
        return None
    return _empty((*left.shape[:-1], right.shape[-1]), left.dtype)


_RULES: dict[object, Callable[..., Any]] = {
    aten.cat.default: _cat, aten.gather.default: _gather, aten.embedding.default: _embedding,
    aten.arange.default: _arange, aten.arange.start: _arange, aten.arange.start_step: _arange,
    aten.where.self: _where, aten.mean.dim: _reduce, aten.sum.dim_IntList: _reduce,
    aten.softmax.int: _softmax, aten._softmax.default: _softmax, aten.topk.default: _topk,
    aten.linear.default: _linear, aten.addmm.default: _addmm, aten.matmul.default: _matmul,
    aten.mm.default: lambda left, right: _matmul(left, right) if left.ndim == right.ndim == 2 else None,
    aten.bmm.default: lambda left, right: _matmul(left, right) if left.ndim == right.ndim == 3 else None}


def _permuted(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all have one dtype and shape without dimensions of one element, and one order of dimensions in
    memory without gaps."""
    first = tensors[0]
    ordered = sorted(zip(first.stride(), first.shape, strict=True), reverse=True)
    dense = all(n > 1 for n in first.shape) and [s for s, _ in ordered] == [*row_major_strides([n for _, n in ordered])]
    return dense and all(t.dtype is first.dtype and t.layout is torch.strided and t.shape == first.shape
                         and t.stride() == first.stride() for t in tensors)


def _plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all have one dtype and the strides of a new tensor, those of a single element's dimension too."""
    return all(t.dtype is tensors[0].dtype and t.layout is torch.strided and t.numel()
               and t.stride() == row_major_strides(t.shape) for t in tensors)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _as_it_lies(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
