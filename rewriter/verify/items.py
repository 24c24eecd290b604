"""Check each item of a `Program` by itself: a copy fills its target, and what a launch hands to its operator lies in
what it says it reads and writes. `verify` proves the order of those reads and writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import cache
from itertools import chain
from typing import Any

import torch

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.program import (
    COMPUTE,
    DOWNLOAD,
    HOST,
    READS,
    UPLOAD,
    WRITE,
    Copy,
    FileSlice,
    Launch,
    Program,
    Rows,
    Span,
    TensorRef,
    place_of,
    span_of,
)

Extents = dict[tuple[Any, ...], int]  # of views: by shape, stride and dtype, the bytes up to behind the last element


class ItemFault(ValueError):
    """What is wrong with an item; the message names it."""


def check_items(program: Program) -> None:
    """Raise ItemFault unless every copy brings as many bytes as its target has, whole pages where that is a file, every
    tensor that an operator gets lies in a span of the same buffer that its launch reads or, if the operator writes it,
    writes, nothing but copies touches a file, and copies and launches stand on streams that run them in order."""
    extents: Extents = {}
    files = program.files
    for name, ref in chain(program.inputs.items(), program.outputs.items()):
        _extent(ref, f"the caller's {name}", extents)
        _check_memory((span_of(ref),), f"the caller's {name}", files)
    for item in chain(program.prologue, program.step):
        kind = type(item)
        if kind is Launch:
            _check_launch(item, extents)  # type: ignore[arg-type]
            if files:
                _check_memory((*item.reads, *item.writes), item.label, files)  # type: ignore[union-attr]
        elif kind is Copy:
            _check_copy(item, files, extents)  # type: ignore[arg-type]


def _check_memory(spans: Iterable[Span], label: str, files: Collection[str]) -> None:
    """What is computed with, or says what to copy, lies in memory."""
    for span in spans:
        if span.arena in files:
            raise ItemFault(f"{label} touches {span_text(span)}, which is a file: only copies reach it")


def _check_copy(copy: Copy, files: Collection[str], extents: Extents) -> None:
    src, dst = copy.src, copy.dst
    for end in (src, dst):
        if type(end) is Rows:
            _check_rows(end, copy.label, files, extents)
    if type(src) is Rows and type(dst) is Rows:
        raise ItemFault(f"{copy.label} has rows at both ends: one end must lie densely")
    if src.nbytes != dst.nbytes:
        where = place_of(dst)
        assert type(where) is Span
        raise ItemFault(f"{copy.label} brings {src.nbytes} bytes into {span_text(where)}, which has {dst.nbytes}")
    _check_stream(copy, files)


def _check_stream(copy: Copy, files: Collection[str]) -> None:
    src, dst = place_of(copy.src), place_of(copy.dst)
    assert type(dst) is Span
    reads, writes = type(src) is FileSlice or src.arena in files, dst.arena in files  # type: ignore[union-attr]
    if reads and writes:
        raise ItemFault(f"{copy.label} goes from file to file: take it through memory")
    right = READS if reads else (WRITE,) if writes else (DOWNLOAD,) if dst.arena == HOST else (UPLOAD,)
    if copy.stream not in right:
        raise ItemFault(f"{copy.label} is on the stream {copy.stream}: files are read on {' or '.join(READS)} and "
                        f"written on {WRITE}, copies between arenas run on {UPLOAD}, or to the host on {DOWNLOAD}")
    if not writes:
        return
    (before, after), scattered = copy.room, type(copy.dst) is Rows
    sizes = [dst.offset, copy.dst.row_nbytes if type(copy.dst) is Rows else dst.nbytes + after]
    if type(copy.src) is Rows and (copy.src.skips or copy.src.count is not None):
        sizes.append(copy.src.row_nbytes)  # what is left out must not share a page with what is written
    if before or not 0 <= after < (1 if scattered else PAGE_NBYTES) or any(size % PAGE_NBYTES for size in sizes):
        raise ItemFault(f"{copy.label} writes parts of pages of {span_text(dst)}: give each piece of a spill file "
                        f"whole pages of {PAGE_NBYTES} bytes")


def _check_rows(rows: Rows, label: str, files: Collection[str], extents: Extents) -> None:
    if rows.row_nbytes <= 0 or rows.table.nbytes % rows.row_nbytes:
        raise ItemFault(f"{label}: a table of {rows.table.nbytes} bytes has no rows of {rows.row_nbytes} bytes")
    if rows.skips and rows.index is None:
        raise ItemFault(f"{label}: rows are skipped by their numbers, and it has none")
    for ref in rows.told_by:
        _extent(ref, label, extents)
        _check_memory((span_of(ref),), label, files)
        if ref.dtype != "int64":
            raise ItemFault(f"{label} is told its rows by {ref.buffer} of {ref.dtype}: it must be int64")
    if rows.count is not None and math.prod(rows.count.shape) != 1:
        raise ItemFault(f"{label} takes its count from {rows.count.buffer} of shape {rows.count.shape}: it must be one "
                        "number")


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
    """What a copy reads in arenas and spill files, and what it may write: its target, then the room around it."""
    source, dst, (before, after) = place_of(copy.src), place_of(copy.dst), copy.room
    assert isinstance(dst, Span)
    reads: tuple[Span, ...] = (source,) if isinstance(source, Span) else ()
    for end in (copy.src, copy.dst):
        if isinstance(end, Rows):
            reads += tuple(span_of(ref) for ref in end.told_by)
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
