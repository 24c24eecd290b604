"""The CUDA device: kernels on one stream, copies each way on one of their own, the disk through pinned memory."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from forebay.kernels.gpu_support.scratch import Scratch, scratch_of
from forebay.rewriter.ir.program import (
    ATTEND,
    COLLECT,
    COMPUTE,
    DISK,
    LOOKUP,
    MOVES,
    SCRATCH,
    UNORDERED,
    UPLOAD,
    WRITE,
    Copy,
    FileSlice,
    Item,
    Launch,
    Record,
    Release,
    Rows,
    Span,
    TensorRef,
    Wait,
    place_of,
)
from forebay.runtime.devices.cuda.events import DeviceEvent
from forebay.runtime.devices.cuda.pinned import InputStaging, pinned_arena, read_later, seen_by_gpu
from forebay.runtime.devices.cuda.pitched import RunCopier, pitched_copy
from forebay.runtime.devices.cuda.whole_steps import Captures
from forebay.runtime.devices.device import Call, RuntimeFault
from forebay.runtime.devices.landing import load_through
from forebay.runtime.devices.lookups import bind_fetches, brings_experts, is_lookup, look_up
from forebay.runtime.devices.outward import FindRuns, read_rows, runs_nbytes, write_rows
from forebay.runtime.devices.streamed import StreamedDevice
from forebay.runtime.devices.streams import Ticket, Worker, told
from forebay.runtime.disk.chunks import RowRun
from forebay.runtime.disk.file_reads import submit_slice
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.run.arena import Arena, view

LOAD_NBYTES = 16 << 20  # pinned memory that resident weights pass through while they are loaded, by halves
# Streams of devices that are closed, for others to come: torch keeps a workspace of cuBLAS (32 MiB on an H100) for each
# stream that ever multiplied, and gives new streams out of 32 in turn, which two devices in use must not share.
IDLE: list[list[torch.cuda.Stream]] = []
# Of kernels that move rows or sums: they begin before waiting parts of a matmul, else the link would wait for it too.
URGENT = -1
ISSUED = Ticket()  # of what the caller's thread issues itself
ISSUED.done()


class CudaDevice(StreamedDevice):
    """Streams as CUDA has them. The caller's thread issues kernels, and copies between host memory and the GPU that
    wait for nothing but what is issued already; worker threads issue disk reads and writes and all other copies, one
    for each stream, because they may have to wait on the host for another before they can issue. Launches of the host
    run on a worker too. Host memory is one slab, pinned in place (an allocator of pinned memory would round it up to a
    power of two)."""

    queues = True

    def __init__(self, reader: DiskReader, *, graphs: bool = True, whole: bool = False, reads_land: bool = False,
                 **options: Any) -> None:
        """Take the readers, spill files and switches of a `StreamedDevice`; `graphs` may capture launches, and `whole`
        steps with their copies, unless each item is to be seen. With `reads_land` the device's memory is pinned memory
        of the host, into which files are read."""
        if not torch.cuda.is_available():
            raise RuntimeFault("this plan is for a GPU, and torch finds none; plan for this machine instead")
        super().__init__(reader, **options)
        self.device_memory: torch.Tensor | None = None
        self.reads_land = reads_land
        self.near: Arena | None = None  # the memory of the device, where it is the host's
        self.scratch: Scratch | None = None
        self.host: Arena | None = None
        self.seen: torch.Tensor | None = None  # host memory, as kernels read it in place
        self.landing: Arena | None = None
        self.staging: InputStaging | None = None
        try:  # other threads may open devices too
            self.compute, *others = IDLE.pop()
        except IndexError:
            self.compute = torch.cuda.Stream()
            others = [torch.cuda.Stream(priority=URGENT) for _ in (*MOVES, COLLECT)]
        self.streams = dict(zip((*MOVES, COLLECT), others, strict=True))
        self.workers = {stream: Worker(stream) for stream in (*MOVES, COLLECT, *UNORDERED, ATTEND)}
        self.events: dict[int, DeviceEvent] = {}
        self.entered = False  # whether the caller's thread is within `issuing`
        streams = {COMPUTE: self.compute, LOOKUP: self.streams[COLLECT]} | {s: self.streams[s] for s in MOVES}
        self.captures = Captures(
            streams, self.tensor, self._bytes, self.named, self.finish,
            lambda: 0 if self.scratch is None else self.scratch.version, graphs,
            whole and not (self.poison or self.sync or self.trace))

    def allocate(self, arenas: Mapping[str, int]) -> None:
        if self.reads_land:
            self.near = pinned_arena(arenas["device"])
            self.device_memory = seen_by_gpu(self.near)
        else:
            with torch.inference_mode(False):  # workers write to it, which are in no mode of the caller's
                self.device_memory = torch.empty(arenas["device"], dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()  # which may still work in the memory for whoever had it before
        self.landing = pinned_arena(LOAD_NBYTES)
        if "host" in arenas:
            self.host = pinned_arena(arenas["host"])

    @contextlib.contextmanager
    def issuing(self) -> Iterator[None]:
        """Kernels go to the compute stream, whichever thread calls, behind what the caller's stream holds; it goes on
        behind them."""
        caller = torch.cuda.current_stream()
        self.compute.wait_stream(caller)
        self.captures.known = None
        with torch.cuda.stream(self.compute):
            self.entered = True
            try:
                yield
            finally:
                self.entered = False
        self.captures.until_known(caller)

    def _at_once(self, stream: str) -> bool:
        """Return whether the caller's thread may issue what comes next on a stream itself. A trace times each copy,
        which waits for it."""
        return self.entered and stream in MOVES and self.trace is None and self.workers[stream].idle

    def hold(self, held: Mapping[str, int]) -> None:
        """Take the scratch at once: grown launch by launch, what it was before would stay reserved."""
        if held.get(SCRATCH) and self.device_memory is not None:
            with torch.cuda.stream(self.compute):
                self.scratch = scratch_of(self.device_memory.device, self.compute.cuda_stream)
                self.scratch.hold(held[SCRATCH], 0)

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        memory = self.host.bytes if ref.arena == "host" and self.host is not None else self.device_memory
        assert memory is not None
        return view(memory, ref)

    def operand(self, stream: str, ref: TensorRef) -> torch.Tensor:
        if ref.arena != "host" or stream != COMPUTE or self.host is None:
            return self.tensor(ref)
        self.seen = seen_by_gpu(self.host) if self.seen is None else self.seen
        return view(self.seen, ref)

    def _bytes(self, span: Span) -> torch.Tensor:
        memory = self.host.bytes if span.arena == "host" and self.host is not None else self.device_memory
        assert memory is not None
        return memory[span.offset : span.offset + span.nbytes]

    def _beside(self, item: Launch, launch: Call) -> Call:
        """A launch of the host, or a collective, issued by the worker of its stream."""
        if item.stream != COLLECT:
            return super()._beside(item, launch)
        stream = self.streams[COLLECT]

        def run() -> None:
            with torch.cuda.stream(stream):
                launch()

        return super()._beside(item, run)

    def tell(self, ref: TensorRef, value: torch.Tensor) -> None:
        self.named.tell(ref, value)

    def write(self, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Through pinned memory: from any other, a copy would wait for the work before it."""
        self.staging = self.staging or InputStaging()
        self.staging.write(inputs)

    def read_later(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        return read_later(value)

    def joined(self, items: Sequence[tuple[Item, Call]]) -> list[Call]:
        """Join launches into CUDA graphs, or a whole step, unless these are switched off."""
        return self.captures.joined(items)

    def _bind_poison(self, item: Release) -> Call:
        memory = self._bytes(item.span)
        if item.stream == COMPUTE:
            # what other streams put there next waits for no release
            return self._in_order(lambda: memory.fill_(0xFF), always=True)

        def fill() -> None:
            if item.stream in self.streams:
                self.streams[item.stream].synchronize()  # it may still read there
            memory.fill_(0xFF)

        return lambda: self.workers[item.stream].submit(fill if not memory.is_cuda else lambda: None)

    # -- copies

    def _bind_copy(self, item: Copy) -> Call:
        if item.stream in MOVES:
            return self._bind_move(item)
        place, target = place_of(item.src), place_of(item.dst)
        assert isinstance(target, Span)
        if item.stream == WRITE:
            assert isinstance(place, Span)
            return self._bind_write(item, self._host_address(item, place))
        if isinstance(item.src, FileSlice) and target.arena == "device" and self.near is None:
            assert self.landing is not None
            return functools.partial(load_through, self.landing, item.src, self._bytes(target), self.readers[DISK],
                                     self.ledgers[DISK], self.streams[UPLOAD])
        return self._bind_read(item, self._host_address(item, target))

    def _host_address(self, item: Copy, span: Span) -> int:
        """Return the address of a span in host memory, which alone files are read to and written from."""
        memory = self.host if span.arena == "host" else self.near
        if memory is None:
            raise RuntimeFault(f"{item.label}: between disk and GPU bytes pass through host memory; plan with host_hop")
        return memory.address + span.offset

    def _bind_read(self, item: Copy, address: int) -> Call:
        src, disk, reader = item.src, self.workers[item.stream], self.readers[item.stream]
        if isinstance(src, FileSlice):

            def read(src: FileSlice = src) -> None:
                with told(self._begin(item, src.nbytes)) as done:
                    submit_slice(reader, src, address, item.room, done)

            return lambda: disk.submit(read)

        if brings_experts(item):
            fetch = bind_fetches(item, self.tensor, self.readers[DISK], address, self._begin)
            return lambda: disk.submit(fetch)
        find = self.named.moved(item)

        def gather() -> None:
            # What names rows waits for the device; the Wait before it made that valid.
            if is_lookup(item):
                look_up(item, self.tensor, self._bytes, reader, address, self._begin)
                return
            moved = find()
            read_rows(item, self.spill, reader, address, moved, self._begin(item, runs_nbytes(moved)))

        return lambda: disk.submit(gather)

    def _bind_write(self, item: Copy, address: int) -> Call:
        find = self.named.moved(item)

        def write() -> None:
            moved = find()
            write_rows(item, self._spill, address, moved, self._begin(item, runs_nbytes(moved)))

        return lambda: self.workers[WRITE].submit(write)

    def _bind_move(self, item: Copy) -> Call:
        """A copy between arenas, issued on the stream of its direction by that stream's worker."""
        place, target = place_of(item.src), place_of(item.dst)
        assert isinstance(place, Span) and isinstance(target, Span)
        source, end, worker = self._bytes(place), self._bytes(target), self.workers[item.stream]
        if isinstance(item.src, Rows) and item.src.keeps:
            return self._bind_fetch(item, item.src, source, end)
        find, stream = self.named.moved(item), self.streams[item.stream]
        named = isinstance(item.src, Rows) or isinstance(item.dst, Rows)
        copy = RunCopier(source, end, pitched_copy() if named else None)

        def issue() -> None:
            moved = self.named.known(item) if named else copy.whole
            if moved is None or not self._at_once(item.stream):
                known = find if moved is None else lambda: moved
                worker.submit(lambda: self._move(item, known, copy))
                return
            self._issue_now(stream, functools.partial(copy, moved))

        return issue

    def _issue_now(self, stream: torch.cuda.Stream, call: Call) -> None:
        torch.cuda.set_stream(stream)
        try:
            call()
        finally:
            torch.cuda.set_stream(self.compute)

    def _move(self, item: Copy, find: FindRuns, copy: Callable[[tuple[RowRun, ...]], None]) -> None:
        stream = self.streams[item.stream]
        with torch.cuda.stream(stream):
            moved = find()  # what names rows is read behind what the stream has waited for
            start = time.perf_counter()
            copy(moved)
            if self.trace is not None:
                stream.synchronize()
                self.trace.noting_copy(item)(start, runs_nbytes(moved))

    def _bind_fetch(self, item: Copy, rows: Rows, source: torch.Tensor, target: torch.Tensor) -> Call:
        """Experts that a tensor of the device names, brought by a kernel that reads host memory: the host never asks
        which they are, but for a trace."""
        from forebay.kernels.products.expert_slots.gpu import bind_fetch_rows

        assert rows.index is not None
        index, stream = self.tensor(rows.index), self.streams[item.stream]
        fetch = bind_fetch_rows(source, index, target, rows.row_nbytes, rows.alike)

        def issue() -> None:
            if self._at_once(item.stream):
                self._issue_now(stream, fetch)
            else:
                self.workers[item.stream].submit(lambda: self._move(item, counted, lambda _: fetch()))

        def counted() -> tuple[RowRun, ...]:
            return () if self.trace is None else ((0, 0, int((index >= 0).sum()) * rows.row_nbytes),)

        return issue

    # -- events

    def _stream(self, name: str) -> torch.cuda.Stream:
        return self.compute if name == COMPUTE else self.streams[name]

    def _bind_record(self, item: Record) -> Call:
        return functools.partial(self._record, item)

    def _bind_wait(self, item: Wait) -> Call:
        return functools.partial(self._wait, item)

    def _record(self, item: Record) -> None:
        before = self.events.get(item.event)
        spare = None if before is None else before.spare
        if item.stream == COMPUTE or self._at_once(item.stream):
            if before is None or spare is None or before.issued is not ISSUED:
                before = self.events[item.event] = DeviceEvent(ISSUED, spare or torch.cuda.Event())
            assert before.cuda is not None
            before.cuda.record(self._stream(item.stream))
            return
        event = self.events[item.event] = DeviceEvent(Ticket(watch=self._fault))
        worker = self.workers[item.stream]

        def record() -> None:
            if item.stream in UNORDERED:
                event.issued.error = worker.error
                self.ledgers[item.stream].record(event.issued)
                return
            if item.stream == ATTEND:
                event.issued.done(worker.error)  # what stands before it has run
                return
            try:
                event.cuda = spare or torch.cuda.Event()
                event.cuda.record(self.streams[item.stream])
            except BaseException as error:  # whoever waits for it must be told
                event.issued.done(error)
                raise
            event.issued.done(worker.error)

        worker.submit(record)

    def _wait(self, item: Wait) -> None:
        event = self.events.get(item.event)
        if event is None:
            raise RuntimeFault(f"{item.stream} waits for event {item.event}, which nothing recorded")
        if item.stream == COMPUTE or (event.issued.ready() and self._at_once(item.stream)):
            event.issued.wait()
            if event.cuda is not None:
                self._stream(item.stream).wait_event(event.cuda)
            return

        def wait() -> None:
            try:
                event.issued.wait()
                if event.cuda is None:
                    return
                if item.stream in self.streams:
                    self.streams[item.stream].wait_event(event.cuda)
                else:
                    event.cuda.synchronize()  # engines of the disk work from the host
            finally:
                event.met.append(None)

        event.handed += 1
        self.workers[item.stream].submit(wait)

    def finish(self) -> None:
        """Wait for everything issued; raise the first error any of it met."""
        for worker in self.workers.values():
            worker.wait_idle()
        for ledger in self.ledgers.values():
            ledger.record().wait()
        for stream in self.streams.values():
            stream.synchronize()
        self.compute.synchronize()

    def close(self) -> None:
        self._close_all(*self.workers.values(), *set(self.readers.values()))
        for arena in (self.host, self.near, self.landing):
            if arena is not None:
                torch.cuda.cudart().cudaHostUnregister(arena.address)
        if self.staging is not None:
            self.staging.close()
        self.host = self.near = self.landing = self.seen = self.device_memory = self.scratch = None
        with contextlib.suppress(RuntimeError):  # of a GPU that is lost, as those who used it were told
            streams = [self.compute, *self.streams.values()]
            for stream in streams:
                stream.synchronize()
            IDLE.append(streams)
