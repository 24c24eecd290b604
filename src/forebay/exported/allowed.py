"""Which operations a stored graph may name. Nothing that is not in these tables is ever looked up or called."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from forebay.kernels import operators

# torch's own, all of them functions of their operands alone: none writes, draws, opens a file or reads a value back
ATEN = frozenset([
    "_softmax.default", "_to_copy.default", "abs.default", "add.Scalar", "add.Tensor", "addmm.default", "alias.default",
    "amax.default", "amin.default", "arange.default", "arange.start", "arange.start_step", "argmax.default",
    "baddbmm.default", "bitwise_and.Tensor", "bitwise_not.default", "bitwise_or.Tensor", "bmm.default",
    "broadcast_tensors.default", "cat.default", "ceil.default", "chunk.default", "clamp.Tensor", "clamp.default",
    "clamp_max.default", "clamp_min.default", "clone.default", "complex.default", "concat.default",
    "concatenate.default", "constant_pad_nd.default", "contiguous.default", "copy.default", "cos.default",
    "cumsum.default", "detach.default", "div.Scalar", "div.Tensor", "div.Tensor_mode", "elu.default",
    "embedding.default", "eq.Scalar", "eq.Tensor", "erf.default", "erfinv.default", "exp.default", "expand.default",
    "expand_as.default", "expm1.default", "flatten.using_ints", "floor.default", "floor_divide.default", "full.default",
    "full_like.default", "gather.default", "ge.Scalar", "ge.Tensor", "gelu.default", "glu.default",
    "group_norm.default", "gt.Scalar", "gt.Tensor", "hardtanh.default", "index.Tensor", "index_select.default",
    "layer_norm.default", "le.Scalar", "le.Tensor", "leaky_relu.default", "lift_fresh_copy.default",
    "linalg_vector_norm.default", "linear.default", "log.default", "log1p.default", "log_softmax.int",
    "logical_and.default", "logical_not.default", "logical_or.default", "lt.Scalar", "lt.Tensor", "masked_fill.Scalar",
    "masked_fill.Tensor", "matmul.default", "max.dim", "max.other", "maximum.default", "mean.default", "mean.dim",
    "min.dim", "min.other", "minimum.default", "mm.default", "mul.Scalar", "mul.Tensor", "multiply.Tensor",
    "narrow.default", "native_layer_norm.default", "ne.Scalar", "ne.Tensor", "neg.default", "new_full.default",
    "new_ones.default", "new_zeros.default", "ones.default", "ones_like.default", "outer.default", "pad.default",
    "permute.default", "polar.default", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal.default",
    "relu.default", "remainder.Scalar", "remainder.Tensor", "repeat.default", "repeat_interleave.self_int",
    "reshape.default", "rms_norm.default", "roll.default", "round.default", "rsqrt.default", "rsub.Scalar",
    "scalar_tensor.default", "scatter.src", "scatter.value", "select.int", "select_scatter.default", "sigmoid.default",
    "sign.default", "silu.default", "sin.default", "slice.Tensor", "slice_scatter.default", "softmax.int",
    "softplus.default", "split.Tensor", "split_with_sizes.default", "sqrt.default", "square.default", "squeeze.default",
    "squeeze.dim", "squeeze.dims", "stack.default", "std.dim", "sub.Scalar", "sub.Tensor", "sum.default",
    "sum.dim_IntList", "sym_numel.default", "sym_size.int", "t.default", "tanh.default", "tensor_split.indices",
    "to.device", "to.dtype", "to.dtype_layout", "topk.default", "transpose.int", "tril.default", "triu.default",
    "type_as.default", "unbind.int", "unflatten.int", "unsqueeze.default", "var.correction", "view.default",
    "view_as.default", "view_as_complex.default", "view_as_real.default", "where.Scalar", "where.ScalarOther",
    "where.ScalarSelf", "where.self", "zeros.default", "zeros_like.default",
])

LARGEST, MOST_BITS = 1 << 63, 63  # of a number, of an exponent: sizes are numbers of 64 bits


def _of_numbers(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` for numbers of 64 bits, or symbols of them, alone; ValueError for others, of which a few operations make one
    that fills all memory, and for strings and lists, which grow by arithmetic too."""
    @functools.wraps(f)
    def bounded(*args: Any) -> Any:
        fits = (isinstance(a, float | torch.SymInt | torch.SymFloat) or (
            isinstance(a, int) and -LARGEST <= a < LARGEST) for a in args)
        if not all(fits) or (
                f is operator.pow and isinstance(args[1], int) and args[1] > MOST_BITS):
            raise ValueError(f"{f.__name__} is for numbers that fit 64 bits")
        return f(*args)

    return bounded


# arithmetic on sizes, and a part of several results
_GROWING = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.pow)
_OTHERS: tuple[Callable[..., Any], ...] = (
    operator.truediv, operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.getitem, torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not)
PYTHON: dict[str, Callable[..., Any]] = {
    f"python.{f.__name__.strip('_')}": f for f in (*map(_of_numbers, _GROWING), *_OTHERS)}
_NAMES = {function: name for name, function in PYTHON.items()} | {
    function: f"python.{function.__name__}" for function in _GROWING}


def name_of(target: object) -> str | None:
    """The name under which a stored graph holds the operation `target`; None for one that none may hold."""
    ours = operators.of_target(target)
    if ours is not None:
        return ours.name
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = str(target).partition(".")
        return str(target) if space == "aten" and name in ATEN else None
    return _NAMES.get(target)  # type: ignore[call-overload, no-any-return]


def target_of(name: str) -> Callable[..., Any]:
    """Return the function that the operation `name` of a stored graph calls; ValueError for a name that is not in the
    tables."""
    ours = operators.find(name)
    if ours is not None:
        return ours.overload
    if name in PYTHON:
        return PYTHON[name]
    space, _, inner = name.partition(".")
    if space != "aten" or inner not in ATEN:
        raise ValueError(f"{name!r} is not an operation that a bundle may hold")
    packet, _, overload = inner.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)  # type: ignore[no-any-return]
