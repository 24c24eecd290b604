"""Disk reads and writes through io_uring by raw system calls: one thread issues all and reaps every completion."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import struct
import threading
import time

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.disk.chunk_queue import BOUNCE_NBYTES, ChunkQueue, Job
from forebay.runtime.disk.chunks import Chunk, copy_in, copy_out, page_floor, pieces
from forebay.runtime.disk.queue_engine import QueueEngine

SYS_SETUP, SYS_ENTER = 425, 426  # the same on every architecture
OP_NOP, OP_READV, OP_WRITEV = 0, 1, 2
ENTER_GETEVENTS = 1
FEATURE_SINGLE_MMAP = 1
OFFSET_RING, OFFSET_SQES = 0, 0x10000000
SQE = struct.Struct("<BBHiQQIIQQQQ")  # struct io_uring_sqe: opcode, flags, ioprio, fd, off, addr, len, …, user_data
CQE = struct.Struct("<QiI")  # struct io_uring_cqe: user_data, res, flags
BREAK_OFF_S = 5.0  # how long a broken engine waits for what is in flight
WAKE = (1 << 64) - 1  # user_data of the NOP that wakes the thread

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# For what returns at once: keeps the interpreter's lock, which the thread that is woken would take first otherwise.
_held_enter = ctypes.PyDLL(None).syscall
_held_enter.restype = ctypes.c_long
_held_enter.argtypes = (ctypes.c_long, ctypes.c_int, *[ctypes.c_uint] * 3, ctypes.c_void_p, ctypes.c_size_t)


class _Offsets(ctypes.Structure):
    # For submissions f4, f5, f6 are flags, dropped, array; for completions overflow, cqes, flags.
    _fields_ = [(n, ctypes.c_uint32) for n in ("head", "tail", "mask", "entries", "f4", "f5", "f6", "reserved")]
    _fields_.append(("user_addr", ctypes.c_uint64))  # type: ignore[arg-type]


class _Params(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint32) for n in ("sq_entries", "cq_entries", "flags", "core", "idle", "features", "wq_fd")),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq", _Offsets),
        ("cq", _Offsets),
    ]


class _Ring:
    """The shared rings of one io_uring; pushes need outside locking, `reap` is for one thread only.

    Ring indices are plain loads and stores, which x86-64 keeps in order; elsewhere the engine is unavailable.
    """

    def __init__(self, entries: int) -> None:
        params = _Params()
        self.fd = _libc.syscall(SYS_SETUP, ctypes.c_uint(entries), ctypes.byref(params))
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"io_uring_setup: {os.strerror(code)}; choose the engine direct or buffered")
        if platform.machine() != "x86_64" or not params.features & FEATURE_SINGLE_MMAP:
            os.close(self.fd)
            raise OSError(errno.ENOSYS, "io_uring: needs x86-64 and Linux 5.4; choose the engine direct or buffered")
        sq, cq = params.sq, params.cq
        nbytes = max(sq.f6 + params.sq_entries * 4, cq.f5 + params.cq_entries * CQE.size)
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            self._map = mmap.mmap(self.fd, nbytes, flags=shared, offset=OFFSET_RING)
            self._sqes = mmap.mmap(self.fd, params.sq_entries * SQE.size, flags=shared, offset=OFFSET_SQES)
        except OSError:
            os.close(self.fd)
            raise
        u32 = ctypes.c_uint32
        self._sq_tail = u32.from_buffer(self._map, sq.tail)
        self._sq_mask = params.sq_entries - 1
        self._cq_head = u32.from_buffer(self._map, cq.head)
        self._cq_tail = u32.from_buffer(self._map, cq.tail)
        self._cq_mask, self._cqes = params.cq_entries - 1, cq.f5
        array = (u32 * params.sq_entries).from_buffer(self._map, sq.f6)
        array[:] = range(params.sq_entries)

    def push(self, opcode: int, fd: int, offset: int, address: int, length: int, user_data: int) -> None:
        """Write one submission; at most `entries` may be pushed between two calls of `enter` that submit."""
        tail = self._sq_tail.value
        at = (tail & self._sq_mask) * SQE.size
        SQE.pack_into(self._sqes, at, opcode, 0, 0, fd, offset, address, length, 0, user_data, 0, 0, 0)
        self._sq_tail.value = (tail + 1) & 0xFFFFFFFF

    def submit(self, count: int) -> None:
        """Hand `count` pushed submissions to the kernel."""
        while count:
            count -= self._enter(count, 0, 0)

    def wake(self) -> None:
        """Complete a NOP, so that who waits goes on."""
        self.push(OP_NOP, -1, 0, 0, 0, WAKE)
        if _held_enter(SYS_ENTER, self.fd, 1, 0, 0, None, 0) != 1:
            self.submit(1)

    def wait(self) -> None:
        """Block until a completion is there, with the interpreter lock released."""
        if self._cq_head.value == self._cq_tail.value:
            self._enter(0, 1, ENTER_GETEVENTS)

    def _enter(self, to_submit: int, min_complete: int, flags: int) -> int:
        unsigned = ctypes.c_uint
        n = _libc.syscall(
            SYS_ENTER, self.fd, unsigned(to_submit), unsigned(min_complete), unsigned(flags), None, ctypes.c_size_t(0)
        )
        if n >= 0:
            return n
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
            return 0  # the caller's loop comes again
        raise OSError(code, f"io_uring_enter: {os.strerror(code)}")

    def reap(self) -> list[tuple[int, int]]:
        """Every completion that is there, as (user_data, result)."""
        done = []
        head, tail = self._cq_head.value, self._cq_tail.value
        while head != tail:
            user_data, result, _ = CQE.unpack_from(self._map, self._cqes + (head & self._cq_mask) * CQE.size)
            done.append((user_data, result))
            head = (head + 1) & 0xFFFFFFFF
        self._cq_head.value = head
        return done

    def close(self) -> None:
        del self._sq_tail, self._cq_head, self._cq_tail  # they pin the mapping
        self._map.close()
        self._sqes.close()
        os.close(self.fd)


@functools.cache
def uring_available() -> bool:
    """Return whether this kernel, and this process's sandbox, let us set up an io_uring."""
    try:
        _Ring(2).close()
    except OSError:
        return False
    return True


class _Flight:
    """A chunk in flight in a slot, and the bytes of it that have arrived."""

    __slots__ = ("chunk", "got", "job")

    def __init__(self, job: Job, chunk: Chunk) -> None:
        self.job, self.chunk, self.got = job, chunk, 0


class UringEngine(QueueEngine):
    """`depth` chunks in flight, O_DIRECT where the file allows it.

    One thread issues all reads, because the kernel runs a completion in the thread that issued its request and would
    otherwise interrupt a computing thread; `submit` at most posts a NOP that wakes it. Bounce memory: `BOUNCE_NBYTES`.
    """

    def __init__(self, depth: int, chunk_nbytes: int) -> None:
        self._bounce_nbytes = page_floor(BOUNCE_NBYTES // depth)
        super().__init__(ChunkQueue(True, chunk_nbytes, self._bounce_nbytes))
        self._bounce = mmap.mmap(-1, depth * self._bounce_nbytes)
        self._ring = _Ring(2 * depth + 2)
        self._push_lock = threading.Lock()
        self._asleep = False  # the thread is about to block, or blocked, with a free slot
        self._bounce_address = ctypes.addressof(ctypes.c_char.from_buffer(self._bounce))
        self._vectors = (ctypes.c_uint64 * (6 * depth))()  # three (address, nbytes) pairs a slot
        self._vectors_address = ctypes.addressof(self._vectors)
        self._free = list(range(depth))
        self._flights: dict[int, _Flight] = {}
        self._threads.append(threading.Thread(target=self._run, name="forebay-uring", daemon=True))
        try:
            self._threads[0].start()
        except RuntimeError:  # the system gives no more threads
            self._ring.close()
            raise

    def _wake(self) -> None:
        if not self._asleep:
            return  # it looks at the queue once more after it has set the flag
        with self._push_lock:
            if self._asleep:
                self._asleep = False
                self._ring.wake()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # told to whoever waits; nobody would hear of it here
            self._break_off(error)

    def _break_off(self, error: BaseException) -> None:
        """End every read by `error`; those in flight once the kernel no longer writes to their memory."""
        until = time.monotonic() + BREAK_OFF_S
        while self._flights and time.monotonic() < until:
            time.sleep(0.001)  # the kernel's completions run when the thread enters it
            for slot, _ in self._ring.reap():
                if slot in self._flights:
                    flight = self._flights.pop(slot)
                    self._queue.finish(flight.job, flight.chunk, error)
        for flight in self._flights.values():
            self._queue.finish(flight.job, flight.chunk, error)
        self._flights.clear()
        self._queue.fail(error)
        self._close_ring()

    def _serve(self) -> None:
        while True:
            self._issue()
            if not self._flights:
                self._queue.settle()
            if self._free:
                self._asleep = True
                if self._queue.jobs:
                    self._asleep = False
                    continue
                if self._queue.closed and not self._flights:
                    break
            self._ring.wait()
            self._asleep = False
            for slot, result in self._ring.reap():
                if slot != WAKE:
                    self._land(slot, result)
        self._close_ring()

    def _close_ring(self) -> None:
        with self._push_lock:  # a late `_wake` must not push to a ring that is gone
            self._asleep = False
            self._ring.close()

    def _issue(self) -> None:
        """Fill the free slots with chunks in order and submit them in one call."""
        count = 0
        while self._free and (taken := self._queue.take(wait=False)) is not None:
            job, chunk = taken
            if chunk is None:
                self._queue.finish(job, None, None)
                continue
            slot = self._free.pop()
            self._flights[slot] = _Flight(job, chunk)
            if job.task.spill is not None:
                copy_in(chunk, self._bounce_address + slot * self._bounce_nbytes)
            with self._push_lock:
                self._push(slot)
            count += 1
        if count:
            with self._push_lock:
                self._ring.submit(count)

    def _push(self, slot: int) -> None:
        flight = self._flights[slot]
        parts = pieces(flight.chunk, self._bounce_address + slot * self._bounce_nbytes, flight.got)
        for i, (address, nbytes) in enumerate(parts):
            self._vectors[6 * slot + 2 * i], self._vectors[6 * slot + 2 * i + 1] = address, nbytes
        assert flight.job.file is not None
        vectors = self._vectors_address + 48 * slot
        opcode = OP_READV if flight.job.task.spill is None else OP_WRITEV
        self._ring.push(opcode, flight.job.file.fd, flight.chunk.offset + flight.got, vectors, len(parts), slot)

    def _land(self, slot: int, result: int) -> None:
        """Account for one completion: go on with a partial read, or finish the chunk and free its slot."""
        flight = self._flights[slot]
        job, chunk = flight.job, flight.chunk
        assert job.file is not None
        flight.got += max(result, 0)
        error: BaseException | None = None
        if result < 0 and -result not in (errno.EAGAIN, errno.EINTR):
            error = OSError(-result, os.strerror(-result), job.task.path)
        elif flight.got < chunk.need:
            if result == 0 or (job.file.direct and result > 0 and result % PAGE_NBYTES):
                spill = job.task.spill
                error = job.file.truncated(job.task.offset, job.task.nbytes) if spill is None else (
                    spill.took_part(chunk, flight.got))
            else:
                with self._push_lock:
                    self._push(slot)
                    self._ring.submit(1)
                return
        elif job.task.spill is None:
            copy_out(chunk, self._bounce_address + slot * self._bounce_nbytes)
        else:
            job.task.spill.settle(chunk.offset, chunk.nbytes)
        del self._flights[slot]
        self._free.append(slot)
        self._queue.finish(job, chunk, error)
