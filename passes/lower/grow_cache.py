"""Move the cache from where a prefill keeps it, close together, to where decoding finds room for new tokens.

The cache grows upward from below, activations downward from above. A prefill holds only the prompt's tokens, so that
its activations may use what later is cache; then this Program runs, once, and decoding has the wider cache and the
smaller activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from forebay.rewriter.ir.cache_layout import CacheRows
from forebay.rewriter.ir.operator_names import called
from forebay.rewriter.ir.plan import BufferPlacement
from forebay.rewriter.ir.program import (
    COMPUTE,
    Item,
    Launch,
    Program,
    Release,
    Span,
    TensorRef,
    dtype_itemsize,
    span_of,
)


def grow_cache(
    narrow: Sequence[BufferPlacement], wide: Sequence[BufferPlacement], shapes: Mapping[str, CacheRows],
    tokens: tuple[int, int], arenas: Mapping[str, int],
) -> Program:
    """Copies that turn every buffer [rows, tokens[0], width] of `narrow` into [rows, tokens[1], width] at its place in
    `wide`; what lies behind the first tokens[0] is zero, as attention that masks a whole cache must find no NaN there.

    From the top down, each row moves up or stays, so that nothing is overwritten before it has moved; no copy overlaps
    itself. ValueError where a buffer would have to move down or the rows to shrink.
    """
    places = {b.name: b for b in wide}
    items: list[Item] = []
    for old in sorted(narrow, key=lambda b: -b.offset):
        new = places[old.name]
        if new.offset < old.offset or tokens[1] < tokens[0] or new.arena != old.arena:
            raise ValueError(f"grow_cache: {old.name} lies at {old.arena} {old.offset} and cannot move to {new.arena} "
                             f"{new.offset}: a cache only moves up")
        items += _moves(old, new, shapes[old.name], tokens)
        if tokens[1] > tokens[0]:
            items.append(_clear(new, shapes[old.name], tokens))
        left = min(new.offset - old.offset, old.nbytes)
        if left:
            items.append(Release(COMPUTE, Span(old.arena, old.offset, left, old.name)))
    resident = {b.name: Span(b.arena, b.offset, b.nbytes, b.name) for b in narrow}
    outputs = {b.name: _part(b, shapes[b.name], tokens[1], 0) for b in wide}
    return Program("cache growth", tuple(items), (), dict(arenas), resident, outputs=outputs, once=True)


def _moves(old: BufferPlacement, new: BufferPlacement, shape: CacheRows, tokens: tuple[int, int]) -> Iterator[Launch]:
    """The copies of one buffer, last row first: as many rows at once as do not overlap where they go."""
    itemsize = dtype_itemsize(shape.dtype)
    length, stride = (n * shape.width for n in tokens)  # elements of a row's contents, and between rows at the end
    up = (new.offset - old.offset) // itemsize
    end = shape.rows
    while end:
        begin = min(max(0, -(-(end * length - up) // stride)), end)
        if begin < end:
            yield _copy(old, new, shape, (begin * length, begin * stride), (end - begin, length), (length, stride))
            end = begin
            continue
        end -= 1
        shift = up + end * (stride - length)
        for piece in range(length, 0, -shift) if shift else ():
            first = max(0, piece - shift)
            at = end * length + first, end * stride + first
            yield _copy(old, new, shape, at, (1, piece - first), (length, stride))


def _part(b: BufferPlacement, shape: CacheRows, tokens: int, first: int) -> TensorRef:
    """Tokens [first, tokens) of every row of a buffer that has room for `tokens`."""
    at = b.offset + first * shape.width * dtype_itemsize(shape.dtype)
    return TensorRef(b.arena, at, shape.dtype, (shape.rows, tokens - first, shape.width),
                     (tokens * shape.width, shape.width, 1), b.name)


def _clear(new: BufferPlacement, shape: CacheRows, tokens: tuple[int, int]) -> Launch:
    """Set to zero the tokens that are yet to come."""
    tail = _part(new, shape, tokens[1], tokens[0])
    return Launch(COMPUTE, called(torch.ops.aten.zero_.default), (tail,), {}, (), (),
                  (span_of(tail),), f"clear {new.name}")


def _copy(
    old: BufferPlacement, new: BufferPlacement, shape: CacheRows, at: tuple[int, int], size: tuple[int, int],
    strides: tuple[int, int],
) -> Launch:
    """Copy size[0] rows of size[1] elements, from element at[0] of `old` to element at[1] of `new`."""
    itemsize = dtype_itemsize(shape.dtype)
    source, target = (TensorRef(b.arena, b.offset + first * itemsize, shape.dtype, size, (stride, 1), b.name)
                      for b, first, stride in zip((old, new), at, strides, strict=True))
    return Launch(COMPUTE, "copy", (source,), {}, (target,), (span_of(source),), (span_of(target),),
                  f"grow {old.name}")
