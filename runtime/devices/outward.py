"""Shared code of devices for copies to and from spill files, and of rows that are named at run time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch

from forebay.rewriter.ir.program import (
    Copy,
    Rows,
    Span,
    TensorRef,
    dtype_itemsize,
    place_of,
    row_major_strides,
    span_of,
    tier_of,
)
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.disk.chunks import OnDone, Read, RowRun, Write
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.disk.together import Together

FindRuns = Callable[[], tuple[RowRun, ...]]


class SpillFault(RuntimeFault):
    """A copy to or from a spill file failed; the message names tier, tensor and layer."""


class NamedRows:
    """The rows of copies that tensors name at run time. What a table of one step says to one layer's copy it says to
    those of all: it is read anew, and thought about where it says something else than the last time."""

    def __init__(self, tensor: Callable[[TensorRef], torch.Tensor]) -> None:
        self._tensor = tensor
        self._known: dict[tuple, tuple[object, tuple[RowRun, ...]]] = {}
        self._told: dict[TensorRef, np.ndarray | None] = {}  # of the tensors that name rows, what was written there
        self._within: dict[TensorRef, list[tuple[TensorRef, int]]] = {}  # of an input, which of them lie where in it

    def moved(self, item: Copy) -> FindRuns:
        """A call that tells what the copy is to move then, offsets counted from where each end begins; rows that follow
        each other at both ends are one run. The call raises RuntimeFault where a row is named that the table lacks."""
        rows, inward = _named_end(item)
        if rows is None:
            whole = ((0, 0, item.src.nbytes),)
            return lambda: whole
        tensors = [self._tensor(ref) for ref in rows.index_tensors]
        if unmet := set(rows.index_tensors) - self._told.keys():
            self._told |= dict.fromkeys(unmet)
            self._within.clear()
        return lambda: self._found(rows, inward, item.label, [tensor.numpy(force=True) for tensor in tensors])

    def tell(self, ref: TensorRef, value: torch.Tensor) -> None:
        """`value` was written to `ref`; what lay there before is no more."""
        within = self._within.get(ref)
        if within is None:
            places = ((other, _within(other, ref)) for other in self._told)
            within = self._within[ref] = [(other, at) for other, at in places if at is not None]
        if not within:
            return
        raw = None
        if value.is_cpu:
            raw = np.ascontiguousarray(np.broadcast_to(value.numpy(), ref.shape), dtype=ref.dtype).reshape(-1)
        for other, at in within:
            self._told[other] = None if raw is None or at < 0 else raw[at : at + math.prod(other.shape)].copy()

    def known(self, item: Copy) -> tuple[RowRun, ...] | None:
        """Return the rows to copy, from the tensors that name them; None where one of them holds what a step computes,
        and must be read when the copy runs."""
        rows, inward = _named_end(item)
        if rows is None:
            return ((0, 0, item.src.nbytes),)
        said = [self._told.get(ref) for ref in rows.index_tensors]
        held = [each for each in said if each is not None]
        return self._found(rows, inward, item.label, held) if len(held) == len(said) else None

    def _found(self, rows: Rows, inward: bool, label: str, said: list[np.ndarray]) -> tuple[RowRun, ...]:
        """Return the rows to copy for these values of the naming tensors."""
        index = None if rows.index is None else said[0].reshape(-1)
        named = rows.rows if index is None else index.size
        count = named if rows.count is None else int(said[-1].item())
        key = rows.index, rows.count, rows.rows, rows.row_nbytes, rows.skips, inward
        now = index is not None and index.tobytes(), count
        found = self._known.get(key)
        if found is None or found[0] != now:
            every = np.arange(rows.rows) if index is None else index
            found = self._known[key] = now, _runs(rows, inward, every, count, label)
        return found[1]


def _within(part: TensorRef, whole: TensorRef) -> int | None:
    """At which element of `whole` a part of it begins, -1 where it is no part that lies together, or another buffer's,
    None where none of its bytes lie there."""
    inner, outer = span_of(part), span_of(whole)
    if inner.arena != outer.arena or inner.offset >= outer.offset + outer.nbytes or (
            outer.offset >= inner.offset + inner.nbytes):
        return None
    whole_rows = all(ref.stride == row_major_strides(ref.shape) for ref in (part, whole)) and part.dtype == whole.dtype
    at, rest = divmod(part.offset - whole.offset, dtype_itemsize(part.dtype))
    inside = at >= 0 and rest == 0 and at + math.prod(part.shape) <= math.prod(whole.shape)
    return at if part.buffer == whole.buffer and whole_rows and inside else -1


def _named_end(item: Copy) -> tuple[Rows | None, bool]:
    """The end of a copy whose rows are named, None where neither's are; and whether that is where it begins."""
    if isinstance(item.src, Rows):
        return item.src, True
    return (item.dst, False) if isinstance(item.dst, Rows) else (None, False)


def _runs(rows: Rows, inward: bool, named: np.ndarray, count: int, label: str) -> tuple[RowRun, ...]:
    """The runs that the first `count` of `named` rows are."""
    if not 0 <= count <= len(named):
        raise RuntimeFault(f"{label}: {count} rows are to be moved, of {len(named)} at most")
    named = named[:count]
    if rows.alike:
        named = np.where(named < 0, named, np.arange(count))
    there = (named >= 0) & (named < rows.rows)
    lacking = ~there & (named >= 0) if rows.skips else ~there
    if lacking.any():
        raise RuntimeFault(f"{label}: row {named[lacking][0]} of a table of {rows.rows}")
    near = np.flatnonzero(there)
    if not len(near):
        return ()
    far = named[near]
    first = np.concatenate(([0], np.flatnonzero((np.diff(near) != 1) | (np.diff(far) != 1)) + 1))
    lengths = np.diff(first, append=len(near)) * rows.row_nbytes
    ends = (far[first] * rows.row_nbytes, near[first] * rows.row_nbytes)
    return tuple(zip(*((end.tolist()) for end in (ends if inward else ends[::-1])), lengths.tolist(), strict=True))


def runs_nbytes(moved: tuple[RowRun, ...]) -> int:
    """Bytes of some runs."""
    return sum(nbytes for _, _, nbytes in moved)


def read_rows(
    item: Copy, spill: SpillSpace | None, reader: DiskReader, address: int, moved: tuple[RowRun, ...], done: OnDone
) -> None:
    """Read runs of a file, as one read, to the memory at `address`; `done` is called once."""
    place, path = place_of(item.src), ""
    if isinstance(place, Span):
        assert spill is not None
        path, done = spill[place.arena].path, faults_named(item, done)
    else:
        path = place.path
    if not moved:
        done(None)
        return
    before, after = item.room if len(moved) == 1 else (0, 0)
    try:
        reader.submit(Read(path, place.offset, runs_nbytes(moved), address, before, after, done, runs=moved))
    except BaseException as error:  # what cannot be issued has ended
        done(error)


def write_rows(item: Copy, spill: SpillSpace, address: int, moved: tuple[RowRun, ...], done: OnDone) -> None:
    """Write runs of the memory at `address` to a spill file, those that follow each other there in one piece; `done` is
    called once."""
    place = place_of(item.dst)
    assert isinstance(place, Span)
    file, done = spill[place.arena], faults_named(item, done)
    if not moved:
        done(None)
        return
    parts: list[tuple[int, int, list[tuple[int, int]]]] = []  # offset in the file, nbytes, pieces
    for source, target, nbytes in sorted(moved, key=lambda run: run[1]):
        if parts and parts[-1][0] + parts[-1][1] == place.offset + target:
            offset, before, pieces = parts.pop()
            parts.append((offset, before + nbytes, [*pieces, (address + source, nbytes)]))
        else:
            parts.append((place.offset + target, nbytes, [(address + source, nbytes)]))
    together = Together(len(parts), done)
    together.issue(functools.partial(spill.writer.write, file, Write(
        offset, nbytes + item.room[1], tuple(pieces), together.part)) for offset, nbytes, pieces in parts)


def faults_named(item: Copy, done: OnDone) -> OnDone:
    """`done`, which is told of an error as a SpillFault that names tier, tensor and layer."""

    def named(error: BaseException | None) -> None:
        if error is None or isinstance(error, SpillFault):
            done(error)
            return
        outward = tier_of(item.dst) == "disk"
        place = place_of(item.dst if outward else item.src)
        assert isinstance(place, Span)
        layer = f" of layer {item.layer}" if item.layer >= 0 else ""
        reason = getattr(error, "strerror", None) or str(error)
        what, where = ("writing", "to") if outward else ("reading", "from")
        fault = SpillFault(f"disk: {what} {place.buffer}{layer} {where} the spill file {place.arena} failed "
                           f"({item.label}): {reason}")
        fault.__cause__ = error
        done(fault)

    return named


def copy_runs(moved: tuple[RowRun, ...], source: torch.Tensor, target: torch.Tensor, **how: bool) -> None:
    """Copy runs between two byte tensors."""
    for at, to, nbytes in moved:
        target[to : to + nbytes].copy_(source[at : at + nbytes], **how)
