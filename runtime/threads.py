"""The device of a machine without a GPU: the caller's thread computes, a reader streams the disk, a worker copies."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping

import torch

from forebay.rewriter.program import (
    COMPUTE,
    DISK,
    LOOKUP,
    UNORDERED,
    UPLOAD,
    Copy,
    FileRows,
    FileSlice,
    Item,
    Launch,
    Record,
    Release,
    TensorRef,
    Wait,
)
from forebay.runtime.arena import Arena
from forebay.runtime.device import Call, RuntimeFault
from forebay.runtime.disk import DiskReader, Read
from forebay.runtime.streams import CopyLedger, Ticket, Worker
from forebay.runtime.trace import Trace


class ThreadDevice:
    """`device` is a budgeted slice of RAM. Launches run inline, so work issued to the compute stream is complete when
    its call returns; disk reads are asynchronous with several in flight; other copies run on a FIFO worker."""

    def __init__(
        self, reader: DiskReader, *, lookups: DiskReader | None = None, poison: bool = False, sync: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.readers = {DISK: reader, LOOKUP: lookups or reader}
        self.poison, self.sync, self.trace = poison, sync, trace
        self.arenas: dict[str, Arena] = {}
        self.ledgers = {stream: CopyLedger() for stream in UNORDERED}
        self.events: dict[int, Ticket] = {}
        self.worker: Worker | None = None

    def allocate(self, arenas: Mapping[str, int]) -> None:
        self.arenas = {name: Arena(nbytes) for name, nbytes in arenas.items()}

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        return self.arenas[ref.arena].tensor(ref)

    def bind(self, item: Item, launch: Call | None) -> Call | None:
        if isinstance(item, Launch):
            return launch
        if isinstance(item, Copy):
            call = self._bind_copy(item)
            return self._in_order(call) if self.sync else call
        if isinstance(item, Release):
            return self._bind_poison(item) if self.poison else None
        if isinstance(item, Record):
            return self._bind_record(item)
        assert isinstance(item, Wait)
        return self._bind_wait(item)

    def _in_order(self, call: Call) -> Call:
        def run() -> None:
            call()
            self.finish()

        return run

    def _begin(self, stream: str, label: str) -> Callable[[BaseException | None], None]:
        """Note an asynchronous read; with a trace, also when it began and ended."""
        done = self.ledgers[stream].begin()
        return done if self.trace is None else self.trace.until(stream, label, done)

    def _bind_copy(self, item: Copy) -> Call:
        arena = self.arenas[item.dst.arena]
        address = arena.address + item.dst.offset
        src, label = item.src, item.label
        begin = functools.partial(self._begin, item.stream)
        if isinstance(src, FileSlice):
            reader = self.readers[item.stream]
            before, after = item.room
            path, offset, nbytes = src.path, src.offset, src.nbytes
            return lambda: reader.submit(Read(path, offset, nbytes, address, before, after, begin(label)))
        if isinstance(src, FileRows):
            index = self.tensor(src.index)

            def gather(src: FileRows = src) -> None:
                rows = index.flatten().tolist()
                if rows and not 0 <= min(rows) <= max(rows) < src.rows:
                    raise RuntimeFault(f"{label}: row {max(rows)} (lowest {min(rows)}) of a table of {src.rows}")
                self.readers[item.stream].read_rows(src.path, src.offset, src.row_nbytes, rows, address, begin(label))

            return gather
        source = self.arenas[src.arena].bytes[src.offset : src.offset + src.nbytes]
        target = arena.bytes[item.dst.offset : item.dst.offset + item.dst.nbytes]
        worker = self._worker()
        return lambda: worker.submit(lambda: target.copy_(source))

    def _worker(self) -> Worker:
        if self.worker is None:
            self.worker = Worker("upload")
        return self.worker

    def _bind_poison(self, item: Release) -> Call:
        """Fill with a NaN in every float format and an index out of range in every integer one, when its turn comes."""
        span = item.span
        memory = self.arenas[span.arena].bytes[span.offset : span.offset + span.nbytes]
        if item.stream == UPLOAD:
            worker = self._worker()
            return lambda: worker.submit(lambda: memory.fill_(0xFF))
        return lambda: memory.fill_(0xFF)

    def _bind_record(self, item: Record) -> Call | None:
        events, number = self.events, item.event
        if item.stream == COMPUTE:  # complete by now: a wait for it has nothing to do
            return lambda: events.pop(number, None)
        if item.stream in UNORDERED:
            record = self.ledgers[item.stream].record

            def record_disk() -> None:
                events[number] = record()

            return record_disk
        worker = self._worker()

        def record_upload() -> None:
            ticket = events[number] = Ticket()
            worker.submit(lambda: ticket.done(worker.error))

        return record_upload

    def _bind_wait(self, item: Wait) -> Call | None:
        events, number = self.events, item.event
        if item.stream == COMPUTE or item.stream in UNORDERED:  # the caller's thread issues both

            def wait() -> None:
                ticket = events.get(number)
                if ticket is not None:  # None: recorded on the compute stream, whose work is done by now
                    ticket.wait()

            return wait
        worker = self._worker()

        def wait_upload() -> None:
            ticket = events.get(number)
            if ticket is not None:
                worker.submit(ticket.wait)

        return wait_upload

    def finish(self) -> None:
        """Wait for all copies under way; raise the first error any of them met."""
        for ledger in self.ledgers.values():
            ledger.record().wait()
        if self.worker is not None:
            idle = threading.Event()
            self.worker.submit(idle.set)
            idle.wait()
            if self.worker.error is not None:
                raise self.worker.error

    def close(self) -> None:
        for reader in set(self.readers.values()):
            reader.close()
        if self.worker is not None:
            self.worker.close()
        self.arenas = {}
