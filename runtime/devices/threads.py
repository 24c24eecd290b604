"""The device of a machine without a GPU: the caller's thread computes, a reader streams the disk, a worker copies."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from forebay.rewriter.ir.program import (
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
from forebay.runtime.devices.device import Call, RuntimeFault
from forebay.runtime.devices.streams import CopyLedger, Ticket, Worker, told
from forebay.runtime.disk.chunks import Read
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.run.arena import Arena
from forebay.runtime.run.trace import Trace


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
        self.events: dict[int, Call] = {}  # what blocks until the event's latest record is complete
        self.inline: set[int] = set()  # events that the compute stream records: complete whenever they are asked for
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

    def _bind_read(self, item: Copy, src: FileSlice, address: int) -> Call:
        reader, ledger, (before, after) = self.readers[item.stream], self.ledgers[item.stream], item.room
        if self.trace is not None:
            return lambda: reader.submit(Read(
                src.path, src.offset, src.nbytes, address, before, after, self._begin(item.stream, item.label)))
        numbers: deque[int] = deque()  # one at most, but for a program that overwrites what is still landing

        def done(error: BaseException | None) -> None:
            ledger.end(numbers.popleft(), error)

        queue = reader.prepare(Read(src.path, src.offset, src.nbytes, address, before, after, done))

        def read() -> None:
            numbers.append(ledger.number())
            queue()

        return read

    def _bind_copy(self, item: Copy) -> Call:
        arena = self.arenas[item.dst.arena]
        address = arena.address + item.dst.offset
        src, label = item.src, item.label
        if isinstance(src, FileSlice):
            return self._bind_read(item, src, address)
        begin = functools.partial(self._begin, item.stream)
        if isinstance(src, FileRows):
            index = self.tensor(src.index)

            def gather(src: FileRows = src) -> None:
                rows = index.flatten().tolist()
                if rows and not 0 <= min(rows) <= max(rows) < src.rows:
                    raise RuntimeFault(f"{label}: row {max(rows)} (lowest {min(rows)}) of a table of {src.rows}")
                with told(begin(label)) as done:
                    self.readers[item.stream].read_rows(src.path, src.offset, src.row_nbytes, rows, address, done)

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
        if item.stream == COMPUTE:  # complete by the time anything behind it in the list is issued
            self.inline.add(number)
            return None
        self.inline.discard(number)
        if item.stream in UNORDERED:
            ledger = self.ledgers[item.stream]

            def record_disk() -> None:
                events[number] = functools.partial(ledger.wait, ledger.mark())

            return record_disk
        worker = self._worker()

        def record_upload() -> None:
            ticket = Ticket()
            events[number] = ticket.wait
            worker.submit(lambda: ticket.done(worker.error))

        return record_upload

    def _bind_wait(self, item: Wait) -> Call | None:
        events, number = self.events, item.event
        if number in self.inline:
            return None
        if item.stream == COMPUTE or item.stream in UNORDERED:  # the caller's thread issues both

            def wait() -> None:
                ready = events.get(number)
                if ready is not None:  # None: not recorded yet
                    ready()

            return wait
        worker = self._worker()

        def wait_upload() -> None:
            ready = events.get(number)
            if ready is not None:
                worker.submit(ready)

        return wait_upload

    def issuing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # launches run in the caller's thread, one after the other

    def finish(self) -> None:
        """Wait for all copies under way; raise the first error any of them met."""
        for ledger in self.ledgers.values():
            ledger.wait(ledger.mark())
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
