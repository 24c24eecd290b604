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

_BINARY = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
_UNARY = {aten.neg.default, aten.cos.default, aten.sin.default, aten.tanh.default, aten.exp.default,
          aten.rsqrt.default, aten.sigmoid.default, aten.silu.default}
_OF_ANY_NUMBERS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default}  # the others give floats


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


def layout_of(target: object, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A fresh meta tensor laid out as what `target` gives for these operands; None where torch is to be asked, for
    operands that it refuses among others."""
    if target in _BINARY or target in _UNARY:
        fits = not kwargs and len(args) == (2 if target in _BINARY else 1)
        return _pointwise(args, target not in _OF_ANY_NUMBERS) if fits else None
    rule = _RULES.get(target)
    return rule(*args, **kwargs) if rule is not None else None


def _pointwise(operands: Sequence[Any], floating: bool) -> torch.Tensor | None:
    """Return the layout of a pointwise result, for contiguous tensors of one dtype, and numbers that do not change
    it."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    if not tensors or not _plain(tensors):
        return None
    dtype = tensors[0].dtype
    fits = (int, float) if dtype.is_floating_point else int
    if dtype is torch.bool or dtype.is_complex or (floating and not dtype.is_floating_point) or not all(
            isinstance(x, torch.Tensor) or (isinstance(x, fits) and not isinstance(x, bool)) for x in operands):
        return None
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


_RULES: dict[object, Callable[..., torch.Tensor | None]] = {
    aten.cat.default: _cat, aten.gather.default: _gather, aten.embedding.default: _embedding,
    aten.arange.default: _arange, aten.arange.start: _arange, aten.arange.start_step: _arange}


def _plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all have one dtype and the strides of a new tensor, those of a single element's dimension too."""
    return all(t.dtype is tensors[0].dtype and t.layout is torch.strided and t.numel()
               and t.stride() == row_major_strides(t.shape) for t in tensors)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
