"""torch's operators of images, of attention without a cache, and of shapes, in ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forebay.exported.onnx_graph import Graph
from forebay.kernels.onnx_meaning import OnnxValue

aten = torch.ops.aten


def _sides(x: OnnxValue, numbers: Sequence[int] | int) -> list[int]:
    """One number for each dimension of an image."""
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return given * (len(x.shape) - 2) if len(given) == 1 else given


def _convolution(g: Graph, x: OnnxValue, weight: str, bias: str | None = None, stride: Any = 1, padding: Any = 0,
                 dilation: Any = 1, groups: int = 1) -> str:
    more: dict[str, Any] = {"pads": _sides(x, 0) * 2 if padding == "valid" else _sides(x, padding) * 2} if (
        padding != "same") else {"auto_pad": "SAME_UPPER"}
    return g.op("Conv", x, weight, *([] if bias is None else [bias]), strides=_sides(x, stride),
                dilations=_sides(x, dilation), group=groups, **more)


def _transposed_convolution(g: Graph, x: OnnxValue, weight: str, bias: str | None = None, stride: Any = 1,
                            padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> str:
    return g.op("ConvTranspose", x, weight, *([] if bias is None else [bias]), strides=_sides(x, stride),
                pads=_sides(x, padding) * 2, output_padding=_sides(x, output_padding), dilations=_sides(x, dilation),
                group=groups)


def _batch_norm(g: Graph, x: OnnxValue, weight: str | None, bias: str | None, mean: str, variance: str, training: bool,
                momentum: float, eps: float, cudnn: bool) -> str:
    if training or mean is None:
        raise NotImplementedError("of the batch's own statistics")
    channels = x.shape[1] or 1
    scale, shift = (g.constant([n] * channels, x.dtype) if t is None else t for t, n in ((weight, 1.0), (bias, 0.0)))
    return g.op("BatchNormalization", x, scale, shift, mean, variance, epsilon=eps)


def _group_norm(g: Graph, x: OnnxValue, groups: int, weight: str | None = None, bias: str | None = None,
                eps: float = 1e-5, cudnn: bool = True) -> str:
    channels = x.shape[1] or 1
    parts = g.op("Reshape", x, g.constant([0, groups, -1]))
    normed = g.op("InstanceNormalization", parts, g.constant([1.0] * groups, x.dtype),
                  g.constant([0.0] * groups, x.dtype), epsilon=eps)
    found = g.op("Reshape", normed, g.op("Shape", x))
    for kind, each in (("Mul", weight), ("Add", bias)):
        if each is not None:
            found = g.op(kind, found, g.op("Reshape", each, g.constant([channels, *[1] * (len(x.shape) - 2)])))
    return found


def _max_pool(g: Graph, x: OnnxValue, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
              ceil_mode: bool = False) -> str:
    return g.op("MaxPool", x, kernel_shape=_sides(x, kernel), strides=_sides(x, stride or kernel),
                pads=_sides(x, padding) * 2, dilations=_sides(x, dilation), ceil_mode=int(ceil_mode))


def _average_pool(g: Graph, x: OnnxValue, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
                  count_padding: bool = True, divisor: int | None = None) -> str:
    if divisor is not None:
        raise NotImplementedError("a mean by a divisor of its own")
    return g.op("AveragePool", x, kernel_shape=_sides(x, kernel), strides=_sides(x, stride or kernel),
                pads=_sides(x, padding) * 2, ceil_mode=int(ceil_mode), count_include_pad=int(count_padding))


def _adaptive_average_pool(g: Graph, x: OnnxValue, sizes: Any) -> str:
    wanted, given = _sides(x, sizes), x.shape[2:]
    if all(n == 1 for n in wanted):
        return g.op("GlobalAveragePool", x)
    if any(n is None or n % w for n, w in zip(given, wanted, strict=True)):
        raise NotImplementedError("parts of unequal size")
    parts = [(n or 0) // w for n, w in zip(given, wanted, strict=True)]
    return g.op("AveragePool", x, kernel_shape=parts, strides=parts)


def _upsample(mode: str) -> Callable[..., str]:
    def meaning(g: Graph, x: OnnxValue, sizes: Any, *rest: Any) -> str:
        corners, factors = (rest[0], rest[1]) if mode == "linear" else (False, rest[0])
        how = "align_corners" if corners else "asymmetric" if mode == "nearest" else "half_pixel"
        more: dict[str, Any] = {"nearest_mode": "floor"} if mode == "nearest" else {}
        if factors is not None:
            return g.op("Resize", x, "", g.constant([1.0, 1.0, *factors], torch.float32), mode=mode,
                        coordinate_transformation_mode=how, **more)
        kept = g.op("Shape", x, start=0, end=2)
        return g.op("Resize", x, "", "", g.op("Concat", kept, g.sizes(list(sizes)), axis=0), mode=mode,
                    coordinate_transformation_mode=how, **more)
    return meaning


def _attention(g: Graph, q: OnnxValue, k: OnnxValue, v: OnnxValue, mask: OnnxValue | None = None, dropout: float = 0.0,
               causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> str:
    """softmax(q k^T * scale + mask) v of q [..., H, S, D]; a mask of booleans is true where attention is allowed."""
    if dropout:
        raise NotImplementedError("with dropout")
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        raise NotImplementedError("of grouped queries without a cache")
    root = g.constant(math.sqrt(scale if scale is not None else (q.shape[-1] or 1) ** -0.5), q.dtype)
    scores = g.op("MatMul", g.op("Mul", q, root), _turned(g, OnnxValue(g.op("Mul", k, root), k.dtype, k.shape)))
    if causal:
        scores = g.op("Where", _lower(g, q, k), scores, g.constant(-math.inf, q.dtype))
    if mask is not None and mask.dtype == torch.bool:
        scores = g.op("Where", mask, scores, g.constant(-math.inf, q.dtype))
    elif mask is not None:
        scores = g.op("Add", scores, mask)
    shares: str = g.op("Softmax", scores, axis=-1)
    if mask is not None and mask.dtype == torch.bool:  # a row that may see nothing gives 0, as in torch
        shares = g.op("Where", g.op("IsNaN", shares), g.constant(0.0, q.dtype), shares)
    return g.op("MatMul", shares, v)


def _turned(g: Graph, x: OnnxValue) -> str:
    """[..., N, K] as [..., K, N]."""
    count = len(x.shape)
    return g.op("Transpose", x, perm=[*range(count - 2), count - 1, count - 2])


def _lower(g: Graph, q: str, k: str) -> str:
    """[S, T]: whether a query comes no earlier than a key."""
    rows, columns = (g.op("Range", g.constant(0), g.op("Squeeze", g.op("Shape", t, start=-2, end=-1)), g.constant(1))
                     for t in (q, k))
    return g.op("GreaterOrEqual", g.op("Unsqueeze", rows, g.constant([1])), columns)


def _unflatten(g: Graph, x: OnnxValue, dim: int, sizes: list[Any]) -> str:
    at = dim % len(x.shape)
    return g.op("Reshape", x, g.sizes([*[0] * at, *sizes, *_known(x.shape[at + 1 :])]))


def _flatten(g: Graph, x: OnnxValue, start: int = 0, end: int = -1) -> str:
    first, last = start % len(x.shape), end % len(x.shape)
    return g.op("Reshape", x, g.constant([*[0] * first, -1, *_known(x.shape[last + 1 :])]))


def _unbind(g: Graph, x: OnnxValue, dim: int = 0) -> tuple[str, ...]:
    count = x.shape[dim]
    if count is None:
        raise NotImplementedError("of a dimension whose size varies")
    return tuple(g.op("Gather", x, g.constant(i), axis=dim) for i in range(count))


def _known(sizes: Sequence[int | None]) -> list[int]:
    if any(n is None for n in sizes):
        raise NotImplementedError("before a dimension whose size varies")
    return [n for n in sizes if n is not None]


MEANINGS: dict[object, Callable[..., Any]] = {
    aten.conv1d.default: _convolution, aten.conv2d.default: _convolution, aten.conv2d.padding: _convolution,
    aten.conv3d.default: _convolution, aten.conv_transpose2d.input: _transposed_convolution,
    aten.batch_norm.default: _batch_norm, aten.group_norm.default: _group_norm,
    aten.max_pool2d.default: _max_pool, aten.avg_pool2d.default: _average_pool,
    aten.adaptive_avg_pool2d.default: _adaptive_average_pool, aten.upsample_nearest2d.vec: _upsample("nearest"),
    aten.upsample_bilinear2d.vec: _upsample("linear"), aten.scaled_dot_product_attention.default: _attention,
    aten.unflatten.int: _unflatten, aten.flatten.using_ints: _flatten,
    aten.unbind.int: _unbind,
    aten.mT.default: _turned,
}
