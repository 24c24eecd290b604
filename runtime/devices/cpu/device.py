"""The device of a machine without a GPU: the caller's thread computes, engines stream the disk, workers copy."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from forebay.kernels.build.process_limits import core_count, limited_cores
from forebay.kernels.cpu_support.native import chained
from forebay.rewriter.ir.program import (
    COLLECT,
    COMPUTE,
    DISK,
    READS,
    UNORDERED,
    WRITE,
    Copy,
    FileSlice,
    Item,
    Record,
    Release,
    Rows,
    Span,
    TensorRef,
    Wait,
    copy_nbytes,
    place_of,
)
from forebay.runtime.comm.faults import rank_fault
from forebay.runtime.devices.device import Call
from forebay.runtime.devices.lookups import bind_fetches, brings_experts, is_lookup, look_up
from forebay.runtime.devices.opening import Opening
from forebay.runtime.devices.outward import copy_runs, faults_named, read_rows, runs_nbytes, write_rows
from forebay.runtime.devices.streamed import StreamedDevice, joined_launches
from forebay.runtime.devices.streams import Ticket, Worker, told
from forebay.runtime.disk.chunks import OnDone, Read, Write
from forebay.runtime.disk.file_reads import prepare_slice
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.run.arena import Arena


class ThreadDevice(StreamedDevice):
    """`device` is a budgeted slice of RAM. Launches run inline, so work issued to the compute stream is complete when
    its call returns; disk reads and writes are asynchronous with several in flight; other copies run on a FIFO worker
    for each direction."""

    loads_beside = True

    def __init__(self, reader: DiskReader, **options: Any) -> None:
        """Take the readers, spill files and switches of a `StreamedDevice`."""
        super().__init__(reader, **options)
        self.arenas: dict[str, Arena] = {}
        self.events: dict[int, Call] = {}  # what blocks until the event's latest record is complete
        self.inline: set[int] = set()  # events that the compute stream records: complete whenever they are asked for

    def allocate(self, arenas: Mapping[str, int]) -> None:
        self.arenas = {name: Arena(nbytes) for name, nbytes in arenas.items()}

    def hold(self, held: Mapping[str, int]) -> None:
        """Nothing: on a CPU no launch keeps any."""

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        return self.arenas[ref.arena].tensor(ref)

    def _bind_copy(self, item: Copy) -> Call:
        place, target = place_of(item.src), place_of(item.dst)
        assert isinstance(target, Span)
        if item.stream == WRITE:
            assert isinstance(place, Span)
            return self._bind_write(item, self.arenas[place.arena].address + place.offset)
        if item.stream not in READS:
            return self._bind_move(item)
        address = self.arenas[target.arena].address + target.offset
        if isinstance(item.src, Rows) or isinstance(item.dst, Rows):
            return self._bind_rows(item, address)
        path = place.path if isinstance(place, FileSlice) else self._spill[place.arena].path
        return self._bind_read(item, path, place, address)

    def _bind_read(self, item: Copy, path: str, src: FileSlice | Span, address: int) -> Call:
        reader, (before, after) = self.readers[item.stream], item.room

        def prepare(done: OnDone) -> Call:
            if isinstance(src, FileSlice):
                return prepare_slice(reader, src, address, item.room, done)
            return reader.prepare(Read(path, src.offset, src.nbytes, address, before, after, faults_named(item, done)))

        return self._bind_asynchronous(item, prepare)

    def _bind_asynchronous(self, item: Copy, prepare: Callable[[OnDone], Call]) -> Call:
        """A call that issues what `prepare` made ready, once for all, to tell whom it is given that it is done."""
        ledger = self.ledgers[item.stream]
        numbers: deque[int] = deque()  # one at most, but for a program that overwrites what is still landing
        begin: Call | None = None

        def end(error: BaseException | None) -> None:
            ledger.end(numbers.popleft(), error)

        done: OnDone = end
        if self.trace is not None:
            begin, done = self.trace.under_way(item, copy_nbytes(item), end)
        queue = prepare(done)

        def issue() -> None:
            numbers.append(ledger.number())
            if begin is not None:
                begin()
            with told(done):
                queue()

        return issue

    def _bind_rows(self, item: Copy, address: int) -> Call:
        """Rows that are named when the copy is issued."""
        reader = self.readers[item.stream]
        if brings_experts(item):  # long reads, of which the first are to land first
            return bind_fetches(item, self.tensor, self.readers[DISK], address, self._begin)
        if is_lookup(item):
            return lambda: look_up(item, self.tensor, self._bytes, reader, address, self._begin)

        find = self.named.moved(item)

        def load() -> None:
            moved = find()
            read_rows(item, self.spill, reader, address, moved, self._begin(item, runs_nbytes(moved)))

        return load

    def _bind_write(self, item: Copy, address: int) -> Call:
        if not isinstance(item.src, Rows) and not isinstance(item.dst, Rows):
            file, dst = self._spill[item.dst.arena], item.dst
            pieces, nbytes = ((address, dst.nbytes),), dst.nbytes + item.room[1]
            return self._bind_asynchronous(item, lambda done: self._spill.writer.prepare_write(
                file, Write(dst.offset, nbytes, pieces, faults_named(item, done))))

        find = self.named.moved(item)

        def write() -> None:
            moved = find()
            write_rows(item, self._spill, address, moved, self._begin(item, runs_nbytes(moved)))

        return write

    def _bind_move(self, item: Copy) -> Call:
        """A copy between arenas, on the worker of its stream."""
        source, target = self._bytes(place_of(item.src)), self._bytes(place_of(item.dst))
        worker = self._worker(item.stream)
        note = None if self.trace is None else self.trace.noting_copy(item)
        if note is None and not isinstance(item.src, Rows) and not isinstance(item.dst, Rows):
            return lambda: worker.submit(lambda: target.copy_(source))

        find = self.named.moved(item)

        def move() -> None:
            moved, start = find(), time.perf_counter()
            copy_runs(moved, source, target)
            if note is not None:
                note(start, runs_nbytes(moved))

        return lambda: worker.submit(move)

    def _bytes(self, span: FileSlice | Span) -> torch.Tensor:
        assert isinstance(span, Span)
        return self.arenas[span.arena].bytes[span.offset : span.offset + span.nbytes]

    def _worker(self, stream: str) -> Worker:
        if stream not in self.workers:
            self.workers[stream] = Worker(stream, rank_fault) if stream == COLLECT else Worker(stream)
        return self.workers[stream]

    def _bind_poison(self, item: Release) -> Call:
        """Fill with a NaN in every float format and an index out of range in every integer one, when its turn comes."""
        span = item.span
        memory = self._bytes(span)
        if item.stream != COMPUTE:
            worker = self._worker(item.stream)
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
        worker = self._worker(item.stream)

        def record_upload() -> None:
            ticket = Ticket(watch=self._fault)
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
        worker = self._worker(item.stream)

        def wait_upload() -> None:
            ready = events.get(number)
            if ready is not None:
                worker.submit(ready)

        return wait_upload

    def tell(self, ref: TensorRef, value: torch.Tensor) -> None:
        """Nothing: what names rows is read where it was written."""

    def joined(self, items: Sequence[tuple[Item, Call]]) -> list[Call]:
        """Neighbouring C++ kernels as one call."""
        return joined_launches(items, lambda run: chained(call for _, call in run))

    def issuing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # launches run in the caller's thread, one after the other

    def finish(self) -> None:
        """Wait for all copies under way; raise the first error any of them met."""
        for ledger in self.ledgers.values():
            ledger.wait(ledger.mark())
        for worker in self.workers.values():
            worker.wait_idle()

    def close(self) -> None:
        self._close_all(*set(self.readers.values()), *self.workers.values())
        self.arenas = {}


def open_cpu(opening: Opening) -> ThreadDevice:
    """Open the CPU, with a warning where its threads would slow each other."""
    _warn_of_threads()
    return ThreadDevice(opening.reader, **opening.shared())


def _warn_of_threads() -> None:
    """Warn of threads that slow each other.

    More threads than the cores that a container may use are stopped in turn. On few cores OpenMP threads that spin
    while they wait take the core the reader needs (seen: 4 times slower).
    """
    calm = os.environ.get("GOMP_SPINCOUNT") == "0" or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    limit, threads = limited_cores(), torch.get_num_threads()
    if limit is not None and threads > limit:
        warnings.warn(f"torch computes in {threads} threads, but this container may use {limit} cores: call "
                      f"torch.set_num_threads({limit}), or set OMP_NUM_THREADS={limit} before Python starts (the "
                      "forebay command does)", RuntimeWarning, stacklevel=4)
    if core_count() <= 4 and not calm and threads > 1:
        warnings.warn("OpenMP threads spin while they wait, which slows streaming on few cores: set GOMP_SPINCOUNT=0 "
                      "before Python starts (the forebay command does)", RuntimeWarning, stacklevel=4)
