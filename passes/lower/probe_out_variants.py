"""Whether an operator's `out=` overload leaves its result in the very memory it is given: tried, as no schema tells.

Some resize what they are given or put other memory in its place (`binary_cross_entropy` with a reduction), some write
wrongly into part of a larger memory (`linalg_qr`). A proof about addresses says nothing of such an operator, so
lowering asks here first.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.rewriter.ir.graph import values_of

LARGE = 1 << 18  # elements that are tried as they are; beyond, long dimensions are tried shorter
SHORT = 8  # longer dimensions become odd numbers from here on, in order of length
REMEMBERED = 4096  # trials

_known: dict[object, bool] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class _Strided:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Elements from the first to the last, those between them included."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def filled(self) -> torch.Tensor:
        """A CPU tensor of 0.1 .. 0.9, of integers 0."""
        values = torch.zeros(self.length, dtype=self.dtype)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            values.copy_(torch.rand(self.length, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1)
        return values.as_strided(self.shape, self.stride)

    def resized(self, shape: tuple[int, ...]) -> _Strided:
        """Another shape; strides keep their order, and those of 0 stay."""
        if shape == self.shape:
            return self
        stride, step = list(self.stride), 1
        for dim in sorted(range(len(shape)), key=lambda d: (self.stride[d], -d)):
            if stride[dim]:
                stride[dim], step = step, step * max(1, shape[dim])
        return _Strided(tuple(shape), tuple(stride), self.dtype)

    def within(self, arena: torch.Tensor, offset: int) -> torch.Tensor:
        """Memory of an arena of bytes."""
        return arena[offset:].view(self.dtype).as_strided(self.shape, self.stride, offset // self.dtype.itemsize)


def keeps_memory(
    variant: torch._ops.OpOverload, op: torch._ops.OpOverload, node: fx.Node, arguments: Mapping[str, Any]
) -> bool:
    """Return whether `variant` writes what `op` returns into outputs laid out as the node's values, and leaves them
    there.

    Tried on the CPU with arguments of the node's shapes; False where the operator refuses such.
    """
    given = map_aggregate(dict(arguments), _described)  # type: ignore[arg-type]
    results = tuple(_layout(value) for value in values_of(node))
    layouts: list[_Strided] = list(results)
    map_aggregate(given, lambda leaf: layouts.append(leaf) if isinstance(leaf, _Strided) else None)
    if sum(math.prod(layout.shape) for layout in layouts) > LARGE:
        shorter = _shorter(layouts)
        given, results = map_aggregate(given, shorter), tuple(map(shorter, results))
    key = (str(variant), repr(given), results)
    with _lock:
        if key not in _known:
            if len(_known) >= REMEMBERED:
                _known.clear()
            _known[key] = _try(variant, op, given, results)  # type: ignore[arg-type]
        return _known[key]


def _try(
    variant: torch._ops.OpOverload, op: torch._ops.OpOverload, given: Mapping[str, Any], results: tuple[_Strided, ...]
) -> bool:
    names = [a.name for a in variant._schema.arguments if a.is_out]
    taken = {a.name for a in variant._schema.arguments if not a.is_out}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it resizes shows by itself
            wanted = op(**_filled(given))
            wanted = wanted if isinstance(wanted, tuple | list) else (wanted,)
            # Lengths that are sums of others (`cat`) are what they become.
            layouts = [layout.resized(w.shape) for layout, w in zip(results, wanted, strict=True)]
            offsets = [0]
            for layout in layouts:  # as in an arena: one storage, in which others have their place
                offsets.append(offsets[-1] + (layout.length * layout.dtype.itemsize + 64) // 64 * 64)
            arena = torch.full((offsets[-1],), 0xFF, dtype=torch.uint8)  # NaN, and integers of -1
            out, read = ([a.within(arena, at) for a, at in zip(layouts, offsets, strict=False)] for _ in range(2))
            places = [_place(t) for t in out]
            variant(**_filled({k: v for k, v in given.items() if k in taken}), **dict(zip(names, out, strict=True)))
    except Exception:  # whatever an operator has against such arguments: it is computed apart then, and copied
        return False
    if [_place(t) for t in out] != places:
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        return True
    return all(torch.allclose(o, w, equal_nan=True) for o, w in zip(read, wanted, strict=True))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride()


def _filled(given: Mapping[str, Any]) -> dict[str, Any]:
    return map_aggregate(dict(given), lambda v: v.filled() if isinstance(v, _Strided) else v)  # type: ignore


def _described(value: Any) -> Any:
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return _layout(value) if isinstance(value, torch.Tensor) else value


def _layout(value: torch.Tensor) -> _Strided:
    return _Strided(tuple(value.shape), value.stride(), value.dtype)


def _shorter(layouts: list[_Strided]) -> Callable[[Any], Any]:
    """Maps long dimensions, and numbers that equal one, to short odd ones, the same length to the same number."""
    lengths = sorted({size for layout in layouts for size in layout.shape if size > SHORT})
    short = {length: SHORT + 1 + 2 * i for i, length in enumerate(lengths)}

    def one(value: Any) -> Any:
        if isinstance(value, _Strided):
            return value.resized(tuple(short.get(size, size) for size in value.shape))
        return short.get(value, value) if type(value) is int else value

    return one
