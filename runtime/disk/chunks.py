"""The arithmetic of disk reads and writes: cut into page-aligned chunks, whose edges pass through a bounce buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from forebay.rewriter.ir.alignment import GATHER_NBYTES, PAGE_NBYTES, ROW_GAP_NBYTES, ROW_READ_NBYTES, whole_pages
from forebay.rewriter.ir.program import Band

APART_NBYTES = 1 << 20  # of bands: a piece of a row as long as this is read by itself, where it is to lie

OnDone = Callable[[BaseException | None], None]
RowRun = tuple[int, int, int]  # bytes that stay together: offset in the source, offset in the target, nbytes


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes [offset, offset + nbytes) of the file `path`, to be placed at the pointer `address`.

    `room_before` and `room_after` are bytes around the destination that may be overwritten with anything; no other
    read in flight may have them as its destination. A read whose address is congruent to its offset modulo
    `PAGE_NBYTES` lands without a copy; 4095 bytes of room either side save its edge pages the copy too.
    `on_done` is called exactly once, from an engine's thread, with None after the last byte has landed or with the
    error after the last write to memory; it must be quick, because the engine issues nothing meanwhile. With `bands`
    the bytes are their pieces, one after the other; with `runs` they are those runs, whose offsets are counted from
    `offset` and `address`. `nbytes` counts these.
    """

    path: str
    offset: int
    nbytes: int
    address: int
    room_before: int
    room_after: int
    on_done: OnDone
    bands: tuple[Band, ...] = ()
    runs: tuple[RowRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """`pieces`, each (address, nbytes), to be written one after the other from `offset` of a spill file on, and zeros
    up to `nbytes`: whole pages, so that nothing around them is ever read. `on_done` as for a `Read`."""

    offset: int
    nbytes: int
    pieces: tuple[tuple[int, int], ...]
    on_done: OnDone


class Chunk(NamedTuple):
    """One request to the kernel: `nbytes` from `offset`, of which the first `need` must arrive.

    The leading `head` and trailing `tail` bytes land in the bounce buffer (tail after head), those between at
    `address`; `copies` are then made as (offset in bounce buffer, destination address, nbytes). Of a write nothing is a
    tail, and copies are made before, from their addresses into the bounce buffer.
    """

    offset: int
    nbytes: int
    need: int
    head: int
    tail: int
    address: int
    copies: tuple[tuple[int, int, int], ...]


def page_floor(n: int) -> int:
    """The last multiple of the page size that is not above `n`."""
    return n // PAGE_NBYTES * PAGE_NBYTES


def split_read(read: Read, direct: bool, chunk_nbytes: int, bounce_nbytes: int) -> list[Chunk]:
    """Cut a read into chunks of nearly equal size in file order, page-aligned in every way when `direct`."""
    wanted_end = read.offset + read.nbytes
    start, end = read.offset, wanted_end
    congruent = not direct or (read.address - read.offset) % PAGE_NBYTES == 0
    step = max(page_floor(chunk_nbytes if congruent else min(chunk_nbytes, bounce_nbytes)), PAGE_NBYTES)
    if direct:
        start, end = page_floor(start), whole_pages(end)
    if read.nbytes == 0:
        return []
    step = min(whole_pages(-(-(end - start) // -(-(end - start) // step))), step)
    to_memory = read.address - read.offset
    chunks = []
    for pos in range(start, end, step):
        stop = min(pos + step, end)
        low, high = max(pos, read.offset), min(stop, wanted_end)
        head = 0 if low - pos <= read.room_before else PAGE_NBYTES
        tail = 0 if stop - high <= read.room_after else PAGE_NBYTES
        if not congruent or 0 < head + tail >= stop - pos:
            head, tail = stop - pos, 0
        copies: tuple[tuple[int, int, int], ...] = ()
        if head:
            copies += ((low - pos, low + to_memory, min(high, pos + head) - low),)
        if tail:
            copies += ((head, stop - tail + to_memory, high - (stop - tail)),)
        chunks.append(Chunk(pos, stop - pos, high - pos, head, tail, pos + head + to_memory, copies))
    return chunks


def split_runs(read: Read, direct: bool, chunk_nbytes: int, bounce_nbytes: int) -> list[Chunk]:
    """Cut a read of runs into chunks, each run by itself."""
    return [chunk for source, target, nbytes in read.runs for chunk in split_read(
        replace(read, offset=read.offset + source, address=read.address + target, nbytes=nbytes), direct, chunk_nbytes,
        bounce_nbytes)]


def split_bands(read: Read, direct: bool, chunk_nbytes: int, bounce_nbytes: int) -> list[Chunk]:
    """Cut a read of bands into chunks in file order. Small pieces that lie close together are read with what lies
    between them, and copied from the bounce buffer; a piece of `APART_NBYTES` and more is read by itself."""
    chunks: list[Chunk] = []
    limit = page_floor(bounce_nbytes)
    first = end = 0
    copies: list[tuple[int, int, int]] = []

    def flush() -> None:
        if copies:
            start, stop = page_floor(first), whole_pages(end)
            chunks.append(Chunk(start, stop - start, end - start, stop - start, 0, 0, tuple(
                (at - start, to, nbytes) for at, to, nbytes in copies)))
            copies.clear()

    for offset, address, nbytes in sorted(_pieces_of(read)):  # bands may lie in any order
        if nbytes >= min(APART_NBYTES, limit - PAGE_NBYTES):
            flush()
            chunks += split_read(replace(read, offset=offset, nbytes=nbytes, address=address, room_before=0,
                                         room_after=0, bands=()), direct, chunk_nbytes, bounce_nbytes)
            continue
        if copies and (offset - end > GATHER_NBYTES or whole_pages(offset + nbytes) - page_floor(first) > limit):
            flush()
        if not copies:
            first = end = offset
        end = max(end, offset + nbytes)
        copies.append((offset, address, nbytes))
    flush()
    return chunks


def _pieces_of(read: Read) -> Iterator[tuple[int, int, int]]:
    """(offset in the file, address, nbytes) of every piece, those that meet at both ends put together."""
    address, held = read.address, (0, 0, 0)
    for band in read.bands:
        for row in range(band.count):
            for at, nbytes in band.pieces:
                offset = read.offset + band.offset + row * band.stride + at
                if held[2] and offset == held[0] + held[2]:
                    held = held[0], held[1], held[2] + nbytes
                else:
                    if held[2]:
                        yield held
                    held = offset, address, nbytes
                address += nbytes
    if held[2]:
        yield held


def split_rows(offset: int, row_nbytes: int, rows: Sequence[int], address: int, bounce_nbytes: int) -> list[Chunk]:
    """Cut a gather into page-aligned chunks in file order: rows at most `ROW_GAP_NBYTES` apart share one, repeats are
    copied."""
    places: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row, []).append(address + index * row_nbytes)
    chunks: list[Chunk] = []
    limit = page_floor(min(bounce_nbytes, ROW_READ_NBYTES))
    pos, stop, need = 0, 0, 0
    copies: list[tuple[int, int, int]] = []
    for row in sorted(places):
        low, row_end = offset + row * row_nbytes, offset + (row + 1) * row_nbytes
        while low < row_end:
            if not copies or page_floor(low) > stop + ROW_GAP_NBYTES or low >= pos + limit:
                if copies:
                    chunks.append(Chunk(pos, stop - pos, need, stop - pos, 0, 0, tuple(copies)))
                pos, copies = page_floor(low), []
            high = min(row_end, pos + limit)
            stop, need = whole_pages(high), high - pos
            done = low - (offset + row * row_nbytes)
            copies += [(low - pos, place + done, high - low) for place in places[row]]
            low = high
    if copies:
        chunks.append(Chunk(pos, stop - pos, need, stop - pos, 0, 0, tuple(copies)))
    return chunks


def split_write(write: Write, direct: bool, chunk_nbytes: int, bounce_nbytes: int) -> list[Chunk]:
    """Cut a write into chunks in file order. Whole pages are written from where they lie, if that is on a page border
    when `direct`; edges, and small pieces among others, are gathered in the bounce buffer first."""
    chunks: list[Chunk] = []
    copies: list[tuple[int, int, int]] = []
    at, gathered, limit = write.offset, 0, page_floor(bounce_nbytes)
    least = PAGE_NBYTES if len(write.pieces) == 1 else GATHER_NBYTES

    def flush(nbytes: int) -> None:
        nonlocal at, gathered
        if nbytes:
            chunks.append(Chunk(at, nbytes, nbytes, nbytes, 0, 0, tuple(copies)))
            at, gathered = at + nbytes, 0
            copies.clear()

    for address, left in write.pieces:
        while left:
            taken = page_floor(min(left, max(chunk_nbytes, least)))
            if taken >= least and gathered % PAGE_NBYTES == 0 and not (direct and address % PAGE_NBYTES):
                flush(gathered)
                chunks.append(Chunk(at, taken, taken, 0, 0, address, ()))
                at += taken
            else:
                taken = min(left, limit - gathered)
                copies.append((gathered, address, taken))
                gathered += taken
                if gathered == limit:
                    flush(gathered)
            address, left = address + taken, left - taken
    flush(whole_pages(gathered))
    while at < write.offset + write.nbytes:
        flush(min(limit, write.offset + write.nbytes - at))
    return chunks


def pieces(chunk: Chunk, bounce_address: int, got: int) -> list[tuple[int, int]]:
    """The (address, nbytes) list that receives the rest of a chunk after its first `got` bytes."""
    if chunk.head == chunk.tail == 0:
        return [(chunk.address + got, chunk.nbytes - got)]
    left = []
    middle = (chunk.address, chunk.nbytes - chunk.head - chunk.tail)
    for start, nbytes in ((bounce_address, chunk.head), middle, (bounce_address + chunk.head, chunk.tail)):
        skip = min(got, nbytes)
        got -= skip
        if nbytes > skip:
            left.append((start + skip, nbytes - skip))
    return left


_memmove = ctypes.CDLL(None).memmove  # lets other Python threads run meanwhile, unlike ctypes.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


def copy_in(chunk: Chunk, bounce_address: int) -> None:
    """Gather in the bounce buffer what a chunk writes from there, and zeros behind it."""
    end = 0
    for at, source, nbytes in chunk.copies:
        (_memmove if nbytes > 65536 else ctypes.memmove)(bounce_address + at, source, nbytes)
        end = at + nbytes
    if end < chunk.head:
        ctypes.memset(bounce_address + end, 0, chunk.head - end)


def copy_out(chunk: Chunk, bounce_address: int) -> None:
    """Copy what a chunk left in the bounce buffer to its destinations."""
    for source, destination, nbytes in chunk.copies:
        # Below 64 KiB (some 5 us) giving up the interpreter lock costs more than holding it.
        (_memmove if nbytes > 65536 else ctypes.memmove)(destination, bounce_address + source, nbytes)
