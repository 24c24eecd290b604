"""Rows of a weight that a step names, brought together from its file or from host memory; or each into its place among
others, as experts are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from forebay.rewriter.ir.program import LOOKUP, Copy, FileSlice, Rows, Span, TensorRef
from forebay.rewriter.ir.schedule.routed_fetch import PLACE_NBYTES, expert_place
from forebay.runtime.devices.device import Call, RuntimeFault
from forebay.runtime.devices.streams import told
from forebay.runtime.disk.chunks import OnDone
from forebay.runtime.disk.file_reads import submit_slice
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.disk.together import Together

_UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def is_lookup(item: Copy) -> bool:
    """Return whether a copy brings the rows of a weight that tokens name."""
    src = item.src
    return item.stream == LOOKUP and isinstance(src, Rows) and src.index is not None


def brings_experts(item: Copy) -> bool:
    """Return whether a copy reads experts that a router names from a file."""
    return is_lookup(item) and isinstance(item.src, Rows) and item.src.skips


def look_up(
    item: Copy, tensor: Callable[[TensorRef], torch.Tensor], memory: Callable[[Span], torch.Tensor],
    reader: DiskReader, address: int, begin: Callable[[Copy, int], OnDone],
) -> None:
    """Begin a lookup, to `address`, of the rows that its index names now; `memory` gives the bytes of a span.
    RuntimeFault where one is named that the table lacks."""
    src, dst = item.src, item.dst
    assert isinstance(src, Rows) and src.index is not None and isinstance(dst, Span)
    table = src.table
    rows = tensor(src.index).flatten().tolist()
    if rows and not 0 <= min(rows) <= max(rows) < src.rows:
        raise RuntimeFault(f"{item.label}: row {max(rows)} (lowest {min(rows)}) of a table of {src.rows}")
    with told(begin(item, len(rows) * src.row_nbytes)) as done:
        if isinstance(table, FileSlice):
            reader.read_rows(table.path, table.offset, src.row_nbytes, rows, address, done)
            return
        unit = next(dtype for dtype in _UNITS if src.row_nbytes % dtype.itemsize == 0)
        whole, found = (memory(span).view(unit).view(-1, src.row_nbytes // unit.itemsize) for span in (table, dst))
        torch.index_select(whole, 0, torch.tensor(rows, dtype=torch.int64), out=found)
        done(None)


def bind_fetches(
    item: Copy, tensor: Callable[[TensorRef], torch.Tensor], reader: DiskReader, address: int,
    begin: Callable[[Copy, int], OnDone],
) -> Call:
    """A call that begins to read the rows of a file that its index names then, in the order in which they lie there,
    the i-th that is named into slot i of the memory at `address`; a slot without one keeps what it holds. The call
    raises RuntimeFault where a row is named that the table lacks."""
    src = item.src
    assert isinstance(src, Rows) and src.index is not None and isinstance(src.table, FileSlice)
    index, nbytes = tensor(src.index), src.row_nbytes
    part_of = src.table.rows(nbytes)

    @cache
    def place_of(row: int) -> tuple[FileSlice, int]:
        entry = part_of(row)
        return entry, expert_place(entry) * PLACE_NBYTES if src.apart else 0

    def placed(row: int, slot: int) -> tuple[FileSlice, int]:
        entry, place = place_of(row)
        return entry, address + slot * (src.apart or nbytes) + place

    def fetch() -> None:
        named = sorted((row, i) for i, row in enumerate(index.tolist()) if row >= 0)
        if named and named[-1][0] >= src.rows:
            raise RuntimeFault(f"{item.label}: row {named[-1][0]} of a table of {src.rows}")
        with told(begin(item, len(named) * nbytes)) as done:
            if not named:
                done(None)
                return
            together = Together(len(named), done)
            together.issue(partial(submit_slice, reader, *placed(row, i), (0, 0), together.part) for row, i in named)

    return fetch
