"""torch's own operators in ONNX, each a function of its arguments as the meanings of our operators are."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from forebay.exported import onnx_networks
from forebay.exported.onnx_graph import Graph
from forebay.exported.onnx_views import shape_of
from forebay.kernels.norms.onnx import layer_norm
from forebay.kernels.onnx_meaning import TO_THE_END, OnnxValue
from forebay.kernels.products.linear.onnx import activated, linear

aten = torch.ops.aten


def meaning_of(target: object) -> Callable[..., Any] | None:
    """Return the ONNX form of a function of torch or Python; None for one that is not known."""
    return MEANINGS.get(target) or onnx_networks.MEANINGS.get(target)


def _number(g: Graph, value: Any, dtype: torch.dtype) -> str:
    """An operand as a value of `dtype`."""
    if isinstance(value, OnnxValue):
        return value if value.dtype == dtype else g.cast(value, dtype)
    return g.constant(value, dtype)


def _binary(kind: str) -> Callable[..., str]:
    def meaning(g: Graph, a: Any, b: Any, *, alpha: Any = 1) -> str:
        known = [t.dtype for t in (a, b) if isinstance(t, OnnxValue)]
        dtype = known[0]
        for other in (*known[1:], *(torch.float32 for t in (a, b) if isinstance(t, float))):
            dtype = torch.promote_types(dtype, other) if not (dtype.is_floating_point and other == torch.float32 and (
                len(known) == 1)) else dtype
        if kind == "Div" and not dtype.is_floating_point:
            dtype = torch.float32
        right = _number(g, b, dtype)
        if alpha != 1:
            right = g.op("Mul", right, g.constant(alpha, dtype))
        return g.op(kind, _number(g, a, dtype), right)
    return meaning


def _unary(kind: str, **attributes: Any) -> Callable[..., str]:
    return lambda g, x: g.op(kind, x, **attributes)


def _comparison(kind: str, negated: bool = False) -> Callable[..., str]:
    def meaning(g: Graph, a: OnnxValue, b: Any) -> str:
        found = g.op(kind, a, _number(g, b, a.dtype))
        return g.op("Not", found) if negated else found
    return meaning


def _same(g: Graph, x: OnnxValue, *args: Any, **kwargs: Any) -> str:
    return g.op("Identity", x)


def _arange(g: Graph, *bounds: Any, dtype: torch.dtype | None = None, **_: Any) -> str:
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    found = g.op("Range", *(_number(g, n, torch.int64) for n in (start, end, step)))
    return found if dtype in (None, torch.int64) else g.cast(found, dtype or torch.int64)


def _filled(g: Graph, sizes: list[Any], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> str:
    kind = dtype or (torch.int64 if type(value) is int else torch.bool if type(value) is bool else torch.float32)
    return g.op("Expand", g.constant(value, kind), g.sizes(sizes))


def _of_booleans(kind: str) -> Callable[..., str]:
    def meaning(g: Graph, a: OnnxValue, b: OnnxValue) -> str:
        if (a.dtype, b.dtype) != (torch.bool, torch.bool):
            raise NotImplementedError("of numbers")
        return g.op(kind, a, b)
    return meaning


def _index(g: Graph, x: OnnxValue, indices: list[OnnxValue | None]) -> str:
    """x[a, b, …] of its first dimensions."""
    known = [i for i in indices if i is not None]
    if len(known) < len(indices) or any(i.dtype != torch.int64 for i in known):
        raise NotImplementedError("by a mask, or with dimensions left out")
    zero, last = g.constant(0), g.constant([-1])
    alike = functools.reduce(lambda a, b: g.op("Add", a, b), (g.op("Mul", i, zero) for i in known))
    rows = [g.op("Unsqueeze", g.op("Add", i, alike), last) for i in known]
    return g.op("GatherND", x, g.op("Concat", *rows, axis=-1))


def _embedding(g: Graph, weight: OnnxValue, index: OnnxValue, *_: Any) -> str:
    if weight.parts is None:
        return g.op("Gather", weight, index, axis=0)
    parts = [part if part is None else OnnxValue(
        g.op("Gather", part, index, axis=0), part.dtype, (*index.shape, *part.shape[1:])) for part in weight.parts]
    return OnnxValue(parts[0], torch.uint8, (*index.shape, weight.shape[1]), tuple(parts))  # type: ignore[arg-type]


def _slice(g: Graph, x: OnnxValue, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> str:
    ends = [g.sizes([0 if start is None else start]), g.sizes([TO_THE_END if end is None else end])]
    return g.op("Slice", x, *ends, g.constant([dim]), g.constant([step]))


def _cat(g: Graph, parts: list[OnnxValue], dim: int = 0) -> str:
    full = [part for part in parts if part.shape[dim] != 0]
    return full[0] if len(full) == 1 else g.op("Concat", *full, axis=dim)


def _expand(g: Graph, x: OnnxValue, sizes: list[Any], **_: Any) -> str:
    """ONNX's sizes of 1 keep what is there, as torch's of -1 do."""
    return g.op("Expand", x, g.sizes([1 if isinstance(n, int) and n == -1 else n for n in sizes]))


def _transpose(g: Graph, x: OnnxValue, a: int, b: int) -> str:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return g.op("Transpose", x, perm=order)


def _permute(g: Graph, x: OnnxValue, dims: list[int]) -> str:
    return g.op("Transpose", x, perm=[d % len(x.shape) for d in dims])


def _reshape(g: Graph, x: OnnxValue, sizes: list[Any]) -> str:
    numbers = shape_of(x, sizes)
    return g.op("Reshape", x, g.sizes(sizes) if numbers is None else g.constant(numbers))


def _split(g: Graph, x: OnnxValue, size: Any, dim: int = 0) -> tuple[str, ...]:
    whole = x.shape[dim]
    if whole is None:
        raise NotImplementedError("a split of a size that varies")
    parts = list(size) if isinstance(size, list | tuple) else [
        min(size, whole - at) for at in range(0, whole, size)]
    if len(parts) == 1:
        return (g.op("Identity", x),)
    return g.op("Split", x, g.constant(parts), outputs=len(parts), axis=dim)


def _chunk(g: Graph, x: OnnxValue, count: int, dim: int = 0) -> tuple[str, ...]:
    whole = x.shape[dim]
    if whole is None:
        raise NotImplementedError("chunks of a size that varies")
    return _split(g, x, -(-whole // count), dim)


def _mean(g: Graph, x: OnnxValue, dims: list[int], keepdim: bool = False, **_: Any) -> str:
    return g.op("ReduceMean", x, g.constant(list(dims)), keepdims=int(keepdim))


def _sum(g: Graph, x: OnnxValue, dims: list[int], keepdim: bool = False, **_: Any) -> str:
    return g.op("ReduceSum", x, g.constant(list(dims)), keepdims=int(keepdim))


def _to_dtype(g: Graph, x: OnnxValue, dtype: torch.dtype, *_: Any, **__: Any) -> str:
    return g.cast(x, dtype)


def _to_device(g: Graph, x: OnnxValue, device: Any, dtype: torch.dtype, *_: Any, **__: Any) -> str:
    return g.cast(x, dtype)


def _addmm(g: Graph, bias: OnnxValue, x: OnnxValue, weight: OnnxValue) -> str:
    return g.op("Add", g.op("MatMul", x, weight), bias)


def _select(g: Graph, x: OnnxValue, dim: int, index: Any) -> str:
    return g.op("Gather", x, _number(g, index, torch.int64), axis=dim)


def _layer_norm(g: Graph, x: OnnxValue, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
                *_: Any) -> str:
    if len(shape) != 1:
        raise NotImplementedError("a norm over several dimensions")
    return layer_norm(g, x, weight, bias, eps)


def _softmax(g: Graph, x: OnnxValue, dim: int, dtype: Any = None) -> str:
    return g.op("Softmax", x if dtype in (None, x.dtype) else g.cast(x, dtype), axis=dim)


def _sym_size(g: Graph, x: OnnxValue, dim: int) -> str:
    at = dim % len(x.shape)
    return g.op("Squeeze", g.op("Shape", x, start=at, end=at + 1))


def _where(g: Graph, condition: str, a: Any, b: Any) -> str:
    dtype = next((t.dtype for t in (a, b) if isinstance(t, OnnxValue)), torch.float32)
    return g.op("Where", condition, _number(g, a, dtype), _number(g, b, dtype))


MEANINGS: dict[object, Callable[..., Any]] = {
    aten.sym_size.int: _sym_size,
    operator.add: _binary("Add"), operator.sub: _binary("Sub"), operator.mul: _binary("Mul"),
    aten.add.Tensor: _binary("Add"), aten.add.Scalar: _binary("Add"), aten.sub.Tensor: _binary("Sub"),
    aten.sub.Scalar: _binary("Sub"), aten.mul.Tensor: _binary("Mul"), aten.mul.Scalar: _binary("Mul"),
    aten.div.Tensor: _binary("Div"), aten.div.Scalar: _binary("Div"),
    aten.rsub.Scalar: lambda g, x, n, alpha=1: _binary("Sub")(g, n, x, alpha=alpha),
    aten.pow.Tensor_Scalar: lambda g, x, n: g.op("Pow", x, g.constant(n, x.dtype)),
    aten.pow.Scalar: lambda g, n, x: g.op("Pow", g.constant(n, x.dtype), x),
    aten.maximum.default: _binary("Max"), aten.minimum.default: _binary("Min"),
    aten.tanh.default: _unary("Tanh"), aten.cos.default: _unary("Cos"), aten.sin.default: _unary("Sin"),
    aten.exp.default: _unary("Exp"), aten.neg.default: _unary("Neg"), aten.abs.default: _unary("Abs"),
    aten.sqrt.default: _unary("Sqrt"), aten.erf.default: _unary("Erf"), aten.sigmoid.default: _unary("Sigmoid"),
    aten.log.default: _unary("Log"), aten.floor.default: _unary("Floor"), aten.reciprocal.default: _unary("Reciprocal"),
    aten.rsqrt.default: lambda g, x: g.op("Reciprocal", g.op("Sqrt", x)),
    aten.relu.default: _unary("Relu"), aten.silu.default: lambda g, x: activated(g, x, "silu"),
    aten.gelu.default: lambda g, x, approximate="none": activated(
        g, x, "gelu_tanh" if approximate == "tanh" else "gelu"),
    aten.lt.Scalar: _comparison("Less"), aten.lt.Tensor: _comparison("Less"), aten.gt.Scalar: _comparison("Greater"),
    aten.gt.Tensor: _comparison("Greater"), aten.le.Tensor: _comparison("LessOrEqual"),
    aten.le.Scalar: _comparison("LessOrEqual"), aten.ge.Tensor: _comparison("GreaterOrEqual"),
    aten.ge.Scalar: _comparison("GreaterOrEqual"), aten.eq.Tensor: _comparison("Equal"),
    aten.eq.Scalar: _comparison("Equal"), aten.ne.Scalar: _comparison("Equal", True),
    aten.where.self: _where,
    aten.unsqueeze.default: lambda g, x, dim: g.op("Unsqueeze", x, g.constant([dim])),
    aten.squeeze.dim: lambda g, x, dim: g.op("Squeeze", x, g.constant([dim])),
    aten.cat.default: _cat,
    aten.stack.default: lambda g, parts, dim=0: g.op(
        "Concat", *(g.op("Unsqueeze", p, g.constant([dim])) for p in parts), axis=dim),
    aten.slice.Tensor: _slice, aten.select.int: _select, aten.expand.default: _expand, aten.arange.default: _arange,
    aten.arange.start: _arange, aten.full.default: _filled,
    aten.zeros.default: lambda g, sizes, **how: _filled(g, sizes, 0.0, **how),
    aten.ones.default: lambda g, sizes, **how: _filled(g, sizes, 1.0, **how),
    aten.new_ones.default: lambda g, x, sizes, dtype=None, **_: _filled(g, sizes, 1.0, dtype=dtype or x.dtype),
    aten.__and__.Tensor: _of_booleans("And"), aten.logical_and.default: _of_booleans("And"),
    aten.bitwise_and.Tensor: _of_booleans("And"), aten.index.Tensor: _index,
    aten.to.dtype_layout: lambda g, x, *, dtype=None, **_: g.cast(x, dtype or x.dtype),
    aten.view.default: _reshape, aten.reshape.default: _reshape,
    aten.transpose.int: _transpose, aten.permute.default: _permute, aten.t.default: lambda g, x: _transpose(g, x, 0, 1),
    aten.split.Tensor: _split, aten.split_with_sizes.default: _split, aten.chunk.default: _chunk,
    aten.mean.dim: _mean, aten.sum.dim_IntList: _sum, aten.to.dtype: _to_dtype, aten.to.device: _to_device,
    aten.contiguous.default: _same, aten.clone.default: _same, aten.alias.default: _same, aten.detach.default: _same,
    aten._assert_tensor_metadata.default: lambda g, *_, **__: None,
    aten.embedding.default: _embedding, aten.linear.default: linear, aten.addmm.default: _addmm,
    aten.gather.default: lambda g, x, dim, index, **_: g.op("GatherElements", x, index, axis=dim),
    aten.index_select.default: lambda g, x, dim, index: g.op("Gather", x, index, axis=dim),
    aten.matmul.default: lambda g, a, b: g.op("MatMul", a, b), aten.mm.default: lambda g, a, b: g.op("MatMul", a, b),
    aten.bmm.default: lambda g, a, b: g.op("MatMul", a, b), aten.layer_norm.default: _layer_norm,
    aten.softmax.int: _softmax, operator.getitem: lambda g, parts, i: parts[i],
}
