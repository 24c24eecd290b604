"""Check each item of a `Program` by itself: a copy fills its target, and what a launch hands to its operator lies in
what it says it reads and writes. `verify` proves the order of those reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any

import torch

from forebay.rewriter.ir.program import (
    COMPUTE,
    UNORDERED,
    UPLOAD,
    Copy,
    FileRows,
    Launch,
    Program,
    Span,
    TensorRef,
    span_of,
)

Extents = dict[tuple[Any, ...], int]  # of views: by shape, stride and dtype, the bytes up to behind the last element


class ItemFault(ValueError):
    """What is wrong with an item; the message names it."""


def check_items(program: Program) -> None:
    """Raise ItemFault unless every copy brings as many bytes as its target has, every tensor that an operator gets lies
    in a span of the same buffer that its launch reads or, if the operator writes it, writes, and copies and launches
    stand on streams that run them in order."""
    extents: Extents = {}
    for name, ref in chain(program.inputs.items(), program.outputs.items()):
        _extent(ref, f"the caller's {name}", extents)
    for item in chain(program.prologue, program.step):
        kind = type(item)
        if kind is Launch:
            _check_launch(item, extents)  # type: ignore[arg-type]
        elif kind is Copy:
            _check_copy(item, extents)  # type: ignore[arg-type]


def _check_copy(copy: Copy, extents: Extents) -> None:
    src, dst, stream = copy.src, copy.dst, copy.stream
    if type(src) is FileRows:
        _extent(src.index, copy.label, extents)
        nbytes = math.prod(src.index.shape) * src.row_nbytes
    else:
        nbytes = src.nbytes  # type: ignore[union-attr]
    if nbytes != dst.nbytes:
        raise ItemFault(f"{copy.label} brings {nbytes} bytes into {span_text(dst)}, which has {dst.nbytes}")
    if stream != UPLOAD if type(src) is Span else stream not in UNORDERED:
        raise ItemFault(f"{copy.label} is on the stream {stream}: files are read on {' or '.join(UNORDERED)}, copies "
                        f"between arenas run on {UPLOAD}")


def _check_launch(launch: Launch, extents: Extents) -> None:
    if launch.stream != COMPUTE:
        raise ItemFault(f"{launch.label} is on the stream {launch.stream}: launches run on {COMPUTE}")
    kwargs, changed = launch.kwargs, launch.out
    written = _written(launch.op)
    if written is None:
        raise ItemFault(f"{launch.label} runs {launch.op}, which torch {torch.__version__} does not know")
    if not written:
        taken = _refs(launch.args)
        if kwargs:
            taken += _refs(kwargs.values())
    else:  # cache appends, and what works in place
        given = (*enumerate(launch.args), *kwargs.items())
        taken = _refs(value for key, value in given if key not in written)
        changed = (*changed, *_refs(value for key, value in given if key in written))
    if kwargs and kwargs.get("accumulate"):
        taken += launch.out
    _check_within(taken, launch.reads, "reads", launch, extents)
    _check_within(changed, launch.writes, "writes", launch, extents)


def _check_within(refs: Iterable[TensorRef], spans: tuple[Span, ...], what: str, launch: Launch, extents: Extents
                  ) -> None:
    for ref in refs:
        nbytes = extents.get((ref.shape, ref.stride, ref.dtype))
        if nbytes is None:
            nbytes = _extent(ref, launch.label, extents)
        offset, buffer = ref.offset, ref.buffer
        for span in spans:
            if (span.buffer == buffer and span.offset <= offset and offset + nbytes <= span.offset + span.nbytes
                    and span.arena == ref.arena):
                break
        else:
            raise ItemFault(f"{launch.label} {what} {buffer} at {ref.arena} [{offset}, {offset + nbytes}), which is "
                            f"not among what it says it {what}")


def span_text(span: Span) -> str:
    """A span as messages name it."""
    return f"{span.buffer} at {span.arena} [{span.offset}, {span.offset + span.nbytes})"


def copy_spans(copy: Copy) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """What a copy reads in arenas, and what it may write: its target, then the room around it."""
    src, dst, (before, after) = copy.src, copy.dst, copy.room
    reads = (span_of(src.index),) if isinstance(src, FileRows) else (src,) if isinstance(src, Span) else ()
    if not before and not after:
        return reads, (dst,)
    margins = (Span(dst.arena, dst.offset - before, before, dst.buffer),
               Span(dst.arena, dst.offset + dst.nbytes, after, dst.buffer))
    return reads, (dst, *(span for span in margins if span.nbytes))


def _extent(ref: TensorRef, label: str, extents: Extents) -> int:
    """Bytes from the first element of a view to behind its last."""
    if (len(ref.shape) != len(ref.stride) or min((*ref.shape, *ref.stride), default=0) < 0
            or not isinstance(getattr(torch, ref.dtype, None), torch.dtype)):
        raise ItemFault(f"{label}: {ref.buffer} is no tensor: {ref.dtype}, shape {ref.shape}, stride {ref.stride}")
    nbytes = extents[ref.shape, ref.stride, ref.dtype] = span_of(ref).nbytes
    return nbytes


@cache
def _written(op: str) -> frozenset[int | str] | None:
    """Positions and names of the arguments that an operator of torch writes; None if torch does not know it."""
    namespace, _, name = op.removeprefix("call:").partition(".")
    if not name:
        return frozenset()  # a move of the runtime's own
    packet, _, overload = name.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    return None if found is None else frozenset(
        key for i, argument in enumerate(found._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write for key in (i, argument.name))


def _refs(values: Iterable[Any]) -> list[TensorRef]:
    """The tensors among some values and in lists of them."""
    found: list[TensorRef] = []
    for value in values:
        if type(value) is TensorRef:
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _refs(value)
    return found
