"""Check each item of a `Program` by itself: a copy fills its target, and what a launch hands to its operator lies in
what it says it reads and writes. `verify` proves the order of those reads and writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from itertools import chain
from typing import Any

import torch

from forebay.kernels.formats.slot_state import ITEMSIZE, SlotState
from forebay.kernels.operators import ASSIGN_SLOTS, find
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.operator_names import called, overload_of
from forebay.rewriter.ir.program import (
    ATTEND,
    COLLECT,
    COMPUTE,
    DOWNLOAD,
    HOST,
    LOOKUP,
    READS,
    UPLOAD,
    UPWARD,
    WRITE,
    Copy,
    FileSlice,
    Launch,
    Program,
    Rows,
    Span,
    TensorRef,
    dtype_itemsize,
    place_of,
    span_of,
)

aten = torch.ops.aten
# Operators in place that read nothing of what they write.
OVERWRITING = frozenset(map(called, (aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default)))
# Of views: by shape, stride and dtype, the bytes up to behind the last element, and those of one.
Extents = dict[tuple[Any, ...], tuple[int, int]]


class ItemFault(ValueError):
    """An error in an item, which the message names."""


def check_sizes(program: Program, budget: Mapping[str, int | None]) -> None:
    """Raise ItemFault unless arenas with workspace, and spill files, fit the budget, and have names of their own."""
    for arena, nbytes in program.arenas.items():
        limit = budget.get(arena)
        total = nbytes + program.workspace_nbytes(arena)
        if limit is not None and total > limit:
            raise ItemFault(f"{arena} needs {total} bytes (arena {nbytes} and workspace {total - nbytes}), the budget "
                            f"is {limit}")
    limit, total = budget.get("disk"), sum(program.files.values())
    if limit is not None and total > limit:
        raise ItemFault(f"the spill files need {total} bytes, the budget of the disk is {limit}")
    both = sorted(program.files.keys() & program.arenas.keys())
    if both:
        raise ItemFault(f"{both[0]} is both an arena and a spill file; name one of them otherwise")


def check_items(program: Program) -> None:
    """Raise ItemFault unless sizes are sizes, every copy brings as many bytes as its target has from elsewhere, whole
    pages where that is a file, every tensor that an operator gets is aligned and lies in a span of the same buffer that
    its launch reads and, if the operator writes it, writes, no result is written over part of an input, nothing but
    copies touches a file, and copies and launches stand on streams that run them in order."""
    extents: Extents = {}
    told = [item for item in program.step if type(item) is Launch and find(item.op) is ASSIGN_SLOTS]
    for arena, nbytes in program.arenas.items():
        if nbytes < 0:
            raise ItemFault(f"the arena {arena} has {nbytes} bytes")
    files = program.files
    for name, ref in chain(program.inputs.items(), program.outputs.items()):
        _extent(ref, f"the caller's {name}", extents)
        _check_memory((span_of(ref),), f"the caller's {name}", files)
    for item in chain(program.prologue, program.step):
        kind = type(item)
        if kind is Launch:
            _check_launch(item, extents, program.in_place)  # type: ignore[arg-type]
            if files:
                _check_memory((*item.reads, *item.writes), item.label, files)  # type: ignore[union-attr]
        elif kind is Copy:
            _check_copy(item, files, extents)  # type: ignore[arg-type]
            _check_spared(item, told)  # type: ignore[arg-type]


def _check_memory(spans: Iterable[Span], label: str, files: Collection[str]) -> None:
    """Check that operands, and tensors that name rows to copy, lie in memory."""
    for span in spans:
        if span.arena in files:
            raise ItemFault(f"{label} touches {span_text(span)}, which is a file: only copies reach it")


def _check_copy(copy: Copy, files: Collection[str], extents: Extents) -> None:
    src, dst = copy.src, copy.dst
    for end in (src, dst):
        if type(end) is Rows:
            _check_rows(end, copy.label, files, extents)
    places = [place_of(end) for end in (src, dst)]
    if min(*copy.room, *(n for place in places for n in (place.offset, place.nbytes))) < 0:
        raise ItemFault(f"{copy.label} has a negative offset, size or room: {copy}")
    if type(src) is Rows and type(dst) is Rows:
        raise ItemFault(f"{copy.label} has rows at both ends: one end must lie densely")
    brought, there = (end.room_nbytes if type(end) is Rows else end.nbytes for end in (src, dst))
    if brought != there:
        where = place_of(dst)
        assert type(where) is Span
        raise ItemFault(f"{copy.label} brings {brought} bytes into {span_text(where)}, which has {there}")
    _check_stream(copy, files)
    source, target = places
    assert type(target) is Span
    if type(source) is Span and source.arena == target.arena and _meet(source, target):
        raise ItemFault(f"{copy.label} copies {span_text(source)} to {span_text(target)}, which overlap")


def _check_stream(copy: Copy, files: Collection[str]) -> None:
    src, dst = place_of(copy.src), place_of(copy.dst)
    assert type(dst) is Span
    reads, writes = type(src) is FileSlice or src.arena in files, dst.arena in files  # type: ignore[union-attr]
    if reads and writes:
        raise ItemFault(f"{copy.label} goes from file to file: take it through memory")
    right: tuple[str, ...] = READS if reads else (WRITE,) if writes else UPWARD
    if not reads and not writes and type(src) is Span:
        looked_up = (LOOKUP,) if src.arena == HOST and type(copy.src) is Rows else ()
        right = looked_up + (UPWARD if dst.arena != HOST else (DOWNLOAD,) if src.arena != HOST else ())
    if copy.stream not in right:
        raise ItemFault(f"{copy.label} is on the stream {copy.stream}. Files are read on {' or '.join(READS)} and "
                        f"written on {WRITE}, copies between arenas run on {UPLOAD}, to the host on {DOWNLOAD}, rows "
                        f"of its tables on {LOOKUP}")
    if not writes:
        return
    (before, after), scattered = copy.room, type(copy.dst) is Rows
    sizes = [dst.offset, copy.dst.row_nbytes if type(copy.dst) is Rows else dst.nbytes + after]
    if type(copy.src) is Rows and (copy.src.skips or copy.src.count is not None):
        sizes.append(copy.src.row_nbytes)  # bytes left out must not share a page with written ones
    if before or not 0 <= after < (1 if scattered else PAGE_NBYTES) or any(size % PAGE_NBYTES for size in sizes):
        raise ItemFault(f"{copy.label} writes parts of pages of {span_text(dst)}: give each piece of a spill file "
                        f"whole pages of {PAGE_NBYTES} bytes")


def _check_rows(rows: Rows, label: str, files: Collection[str], extents: Extents) -> None:
    if rows.row_nbytes <= 0 or rows.table.nbytes % rows.row_nbytes:
        raise ItemFault(f"{label}: a table of {rows.table.nbytes} bytes has no rows of {rows.row_nbytes} bytes")
    if rows.keeps and not rows.skips:
        raise ItemFault(f"{label} keeps what it leaves out, and leaves nothing out by its number")
    if rows.alike and rows.nbytes != rows.table.nbytes:
        raise ItemFault(f"{label}: a table of {rows.table.nbytes} bytes is not like the {rows.nbytes} of its other end")
    if rows.skips and rows.index is None:
        raise ItemFault(f"{label}: rows are skipped by their numbers, and it has none")
    for ref in rows.index_tensors:
        _extent(ref, label, extents)
        _check_memory((span_of(ref),), label, files)
        if ref.dtype != "int64":
            raise ItemFault(f"{label} gets its rows from {ref.buffer} of {ref.dtype}: it must be int64")
    if rows.count is not None and math.prod(rows.count.shape) != 1:
        raise ItemFault(f"{label} takes its count from {rows.count.buffer} of shape {rows.count.shape}: it must be one "
                        "number")


def _check_spared(copy: Copy, told: Iterable[Launch]) -> None:
    """A copy leaves to others, while it is under way, no other places than those of which it was told so: by what was
    `told` of the rounds before its own that it may be fetched beside (`SlotState`)."""
    src = copy.src
    if type(src) is not Rows or not src.spares:
        return
    assert src.index is not None, "rows are skipped by their numbers"
    for launch in told:
        row, sizes = launch.args[2], SlotState(*launch.args[3:8])
        number, rest = divmod((src.index.offset - row.offset) // ITEMSIZE, sizes.numbers)
        if row.buffer == src.index.buffer and not rest and 0 < number <= sizes.rounds:
            before = range(max(0, number - sizes.beside), number)
            places = {(at(i), count) for i in before for at, count in (
                (sizes.want, sizes.slots), (sizes.entries, sizes.experts))}
            if all(ref.buffer == row.buffer and ((ref.offset - row.offset) // ITEMSIZE, *ref.shape) in places
                   for ref in src.spares):
                return
    raise ItemFault(f"{copy.label} leaves places to others that may be its own")


def _check_launch(launch: Launch, extents: Extents, in_place: Collection[str]) -> None:
    if launch.stream not in (COMPUTE, ATTEND, COLLECT):
        raise ItemFault(f"{launch.label} is on the stream {launch.stream}: launches run on {COMPUTE}, those of the "
                        f"host on {ATTEND}, collectives on {COLLECT}")
    far = next((s for s in (*launch.reads, *launch.writes) if (s.arena == HOST) != (launch.stream == ATTEND)
                and (launch.stream != COMPUTE or s.buffer not in in_place)), None)
    if far is not None:
        raise ItemFault(f"{launch.label} on {launch.stream} touches {far.buffer} in the {far.arena} arena, which it "
                        "cannot reach")
    if launch.workspace_nbytes < 0 or any(nbytes < 0 for _, nbytes in launch.held):
        raise ItemFault(f"{launch.label} has a workspace of {launch.workspace_nbytes} bytes")
    kwargs, changed = launch.kwargs, launch.out
    written = _written(launch.op)
    if written is None:
        raise ItemFault(f"{launch.label} runs {launch.op}, which torch {torch.__version__} does not know")
    taken = _refs(launch.args)
    if kwargs:
        taken += _refs(kwargs.values())
    if written:  # cache appends, and what works in place: what is written is read before, unless all of it is written
        given = (*enumerate(launch.args), *kwargs.items())
        changed = (*changed, *_refs(value for key, value in given if key in written))
        if launch.op in OVERWRITING:
            taken = _refs(value for key, value in given if key not in written)
    if kwargs and kwargs.get("accumulate") and getattr(overload_of(launch.op), "namespace", "") != aten.name:
        taken += launch.out  # torch's `index_put` and `put` add to a copy of an operand
    _check_within(taken, launch.reads, "reads", launch, extents)
    _check_within(changed, launch.writes, "writes", launch, extents)
    for ref in changed:
        for other in taken:
            if other.buffer == ref.buffer and other != ref:
                _check_apart(ref, other, launch)


def _interleaved(ref: TensorRef, other: TensorRef) -> bool:
    """Return whether two views have no byte in common though their ranges meet, as K and V of tokens that lie beside
    each other: both are made of pieces a whole number of periods apart, and within a period the pieces lie apart."""
    size = dtype_itemsize(ref.dtype)
    if other.dtype != ref.dtype or 0 in ref.shape or 0 in other.shape:
        return False
    for period in {stride * size for stride, n in zip(ref.stride, ref.shape, strict=True) if n > 1 and stride}:
        pieces = [_piece_nbytes(view, period, size) for view in (ref, other)]
        apart = (other.offset - ref.offset) % period
        if all(pieces) and pieces[0] <= apart and apart + pieces[1] <= period:
            return True
    return False


def _piece_nbytes(view: TensorRef, period: int, size: int) -> int:
    """Bytes from the first to behind the last element of what a view repeats every `period` bytes; 0 if it does not."""
    extent = size
    for stride, n in zip(view.stride, view.shape, strict=True):
        if n > 1 and stride * size < period:
            extent += (n - 1) * stride * size
        elif n > 1 and stride * size % period:
            return 0
    return extent if extent <= period else 0


def _check_apart(ref: TensorRef, other: TensorRef, launch: Launch) -> None:
    """Two views of one buffer of which one is written: the same elements in the same order, or no byte in common."""
    written, read = span_of(ref), span_of(other)
    same = (ref.offset, ref.shape, ref.stride, ref.dtype) == (other.offset, other.shape, other.stride, other.dtype)
    if not same and ref.arena == other.arena and _meet(written, read) and not _interleaved(ref, other):
        raise ItemFault(f"{launch.label} writes {span_text(written)} over part of what it reads there, [{read.offset}, "
                        f"{read.offset + read.nbytes})")


def _meet(a: Span, b: Span) -> bool:
    """Return whether two spans of one arena have a byte in common."""
    return a.nbytes > 0 and b.nbytes > 0 and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _check_within(refs: Iterable[TensorRef], spans: tuple[Span, ...], what: str, launch: Launch, extents: Extents
                  ) -> None:
    for ref in refs:
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


def writes_in_part(copy: Copy) -> bool:
    """Return whether a copy may leave bytes of its target as they are, which must hold something then."""
    return isinstance(copy.dst, Rows) or (isinstance(copy.src, Rows) and copy.src.keeps)


def copy_spans(copy: Copy) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the spans that a copy reads in arenas and spill files, and those that it may write: its target, then the
    room around it."""
    source, dst, (before, after) = place_of(copy.src), place_of(copy.dst), copy.room
    assert isinstance(dst, Span)
    reads: tuple[Span, ...] = (source,) if isinstance(source, Span) else ()
    for end in (copy.src, copy.dst):
        if isinstance(end, Rows):
            reads += tuple(span_of(ref) for ref in end.index_tensors)
    if not before and not after:
        return reads, (dst,)
    margins = (Span(dst.arena, dst.offset - before, before, dst.buffer),
               Span(dst.arena, dst.offset + dst.nbytes, after, dst.buffer))
    return reads, (dst, *(span for span in margins if span.nbytes))


def _extent(ref: TensorRef, label: str, extents: Extents) -> int:
    """Bytes from the first element of a view to behind its last."""
    known = extents.get((ref.shape, ref.stride, ref.dtype))
    if known is None:
        if (len(ref.shape) != len(ref.stride) or min((*ref.shape, *ref.stride), default=0) < 0
                or not isinstance(getattr(torch, ref.dtype, None), torch.dtype)):
            raise ItemFault(f"{label}: {ref.buffer} is no tensor: {ref.dtype}, shape {ref.shape}, stride {ref.stride}")
        known = extents[ref.shape, ref.stride, ref.dtype] = span_of(ref).nbytes, dtype_itemsize(ref.dtype)
    if ref.offset % known[1]:
        raise ItemFault(f"{label}: {ref.buffer} begins at byte {ref.offset} of {ref.arena}, where no {ref.dtype} can")
    return known[0]


@cache
def _written(op: str) -> frozenset[int | str] | None:
    """Positions and names of the arguments that an operator of torch writes; None if torch does not know it."""
    if "." not in op:
        return frozenset()  # a move of the runtime's own
    found = overload_of(op)
    return None if found is None else frozenset(
        key for i, argument in enumerate(found._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write for key in (i, argument.name))


def _refs(values: Iterable[Any]) -> list[TensorRef]:
    """The tensors among some values and in lists and mappings of them."""
    found: list[TensorRef] = []
    for value in values:
        if type(value) is TensorRef:
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _refs(value)
        elif isinstance(value, dict):
            found += _refs(value.values())
    return found
