"""One failing call in a process: the k-th that a place in the project's code makes, of a kind such as reads or threads.

Python's own entry points to the system are replaced (`os`, `open`, `mmap`, threads, torch's memory, io_uring's
completions), so a fault needs no compiler. A place is the innermost line of the project's code on the stack; so what
libraries do on its behalf counts as its own, and the order in which threads run does not change what a fault means.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import mmap
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import forebay
from forebay.runtime.disk import uring

ROOT = str(Path(forebay.__file__).parent) + os.sep
PAGE = 4096
NO_MEMORY = ("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
             "allocate 4096 bytes. Error code 12 (Cannot allocate memory)")
# What each kind fails with, in turn by k.
CODES = {
    "open": (errno.EMFILE, errno.EIO, errno.EACCES), "read": (errno.EIO,), "rename": (errno.EIO, errno.ENOSPC),
    "write": (errno.ENOSPC, errno.EIO, errno.EFBIG), "fsync": (errno.EIO, errno.ENOSPC), "mmap": (errno.ENOMEM,),
    "process": (errno.EAGAIN, errno.ENOMEM), "uring": (errno.EIO, errno.EINVAL), "setup": (errno.ENOMEM, errno.EMFILE),
}
KINDS = (*CODES, "thread", "allocation", "short", "death")


@dataclass(frozen=True)
class Fault:
    """The `k`-th call (from 0) of `kind` that `place` makes fails; of kind "short" it moves a part of its bytes, of
    kind "death" it ends the thread that makes it, as a thread that nobody waits for ends."""

    kind: str
    place: str
    k: int


class Faults:
    """Counts calls by kind and place once `install` was called, and fails the one asked for."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.seen: Counter[tuple[str, str]] = Counter()
        self.struck = False
        self._lock = threading.Lock()

    def due(self, kind: str) -> bool:
        """Count a call; whether it is the one that fails."""
        place = _place()
        if place is None:
            return False
        with self._lock:
            k = self.seen[kind, place]
            self.seen[kind, place] += 1
            now = self.fault == Fault(kind, place, k)
            self.struck |= now
        return now

    def check(self, kind: str, path: object = None) -> None:
        """Count a call, and raise OSError if it is the one that fails, or what ends a thread beside the first."""
        if threading.current_thread() is not threading.main_thread() and self.due("death"):
            raise SystemExit
        if self.due(kind):
            assert self.fault is not None
            code = CODES[kind][self.fault.k % len(CODES[kind])]
            named = (os.fspath(path),) if isinstance(path, str | os.PathLike) else ()  # type: ignore[arg-type]
            raise OSError(code, os.strerror(code), *named)

    def install(self) -> None:
        """Replace the entry points, for the rest of the process."""
        self._files()
        self._moves()
        self._uring()
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            if self.due("thread"):
                raise RuntimeError("can't start new thread")
            start(thread)

        threading.Thread.start = started  # type: ignore[method-assign]
        faults, before = self, subprocess.Popen.__init__

        def spawned(process: Any, *args: Any, **kwargs: Any) -> None:
            faults.check("process")
            before(process, *args, **kwargs)

        subprocess.Popen.__init__ = spawned  # type: ignore[assignment, method-assign]
        for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "full_like", "arange"):
            setattr(torch, name, self._allocating(getattr(torch, name)))
        torch.Tensor.clone = self._allocating(torch.Tensor.clone)  # type: ignore[method-assign]

        class Map(mmap.mmap):
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                faults.check("mmap")
                return super().__new__(cls, *args, **kwargs)

        mmap.mmap = Map  # type: ignore[misc]

    def _allocating(self, make: Callable) -> Callable:
        def made(*args: Any, **kwargs: Any) -> Any:
            if self.due("allocation"):
                raise RuntimeError(NO_MEMORY)
            return make(*args, **kwargs)

        return made

    def _replace(self, kind: str, name: str) -> None:
        call = getattr(os, name)

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check(kind, args[0] if args else None)
            return call(*args, **kwargs)

        setattr(os, name, checked)

    def _files(self) -> None:
        for kind, names in (("open", ("open",)), ("fsync", ("fsync", "fdatasync")),
                            ("rename", ("rename", "replace", "unlink", "ftruncate", "truncate", "mkdir", "utime")),
                            ("write", ("posix_fallocate",))):
            for name in names:
                self._replace(kind, name)
        faults = self

        class Raw(io.FileIO):
            def readinto(self, buffer: Any) -> Any:
                faults.check("read")
                view = memoryview(buffer).cast("B")
                return super().readinto(view[: max(1, len(view) // 2)] if faults.due("short") else view)

            def readall(self) -> bytes:
                faults.check("read")
                return super().readall()

            def write(self, data: Any) -> Any:
                faults.check("write")
                view = memoryview(data).cast("B")
                return super().write(view[: max(1, len(view) // 2)] if faults.due("short") else view)

        def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None,
                   errors: str | None = None, newline: str | None = None, closefd: bool = True, opener: Any = None
                   ) -> Any:
            faults.check("open", file)
            raw = Raw(file, mode.replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            kind: Any = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
            if "b" in mode:
                return kind(raw)
            return io.TextIOWrapper(kind(raw), encoding or "utf-8", errors, newline, buffering == 1)

        builtins.open = io.open = opened  # type: ignore[assignment]

    def _moves(self) -> None:
        """Reads and writes by descriptor; a part of the bytes is whole pages where the file is open for direct I/O."""
        read, write, pread, pwrite, preadv, pwritev = (
            os.read, os.write, os.pread, os.pwrite, os.preadv, os.pwritev)

        def part(fd: int, nbytes: int) -> int:
            if not self.due("short"):
                return nbytes
            direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
            return max(PAGE, nbytes // 2 // PAGE * PAGE) if direct else max(1, nbytes // 2)

        def reading(kind: str, fd: int, nbytes: int) -> int:
            self.check(kind)
            return min(nbytes, part(fd, nbytes))

        os.read = lambda fd, n: read(fd, reading("read", fd, n))
        os.pread = lambda fd, n, at: pread(fd, reading("read", fd, n), at)
        os.write = lambda fd, data: write(fd, _first([data], reading("write", fd, _nbytes([data])))[0])
        os.pwrite = lambda fd, data, at: pwrite(fd, _first([data], reading("write", fd, _nbytes([data])))[0], at)
        os.preadv = lambda fd, into, at, *flags: preadv(
            fd, _first(into, reading("read", fd, _nbytes(into))), at, *flags)
        os.pwritev = lambda fd, data, at, *flags: pwritev(
            fd, _first(data, reading("write", fd, _nbytes(data))), at, *flags)

    def _uring(self) -> None:
        """Completions with an error, and one that is made up; system calls that fail."""
        ring: Any = uring._Ring
        reap, enter, init = ring.reap, ring._enter, ring.__init__

        def reaped(self_: Any) -> list[tuple[int, int]]:
            found = reap(self_)
            for i, (slot, _) in enumerate(found):
                if slot != uring.WAKE and self.due("uring"):
                    assert self.fault is not None
                    found[i] = slot, -CODES["uring"][self.fault.k % 2]
                elif slot != uring.WAKE and self.due("short"):
                    found[i] = slot, -(errno.EINTR, errno.EAGAIN)[self.seen["short", _place() or ""] % 2]
            return found

        def entered(self_: Any, *args: int) -> int:
            if self.due("short"):
                return 0  # as EINTR is told
            if self.due("uring"):
                raise OSError(errno.EINVAL, "io_uring_enter: Invalid argument")
            return enter(self_, *args)

        def begun(self_: Any, entries: int) -> None:
            self.check("setup")
            init(self_, entries)

        ring.reap, ring._enter, ring.__init__ = reaped, entered, begun


def _nbytes(buffers: Any) -> int:
    return sum(memoryview(b).nbytes for b in buffers)


def _first(buffers: Any, nbytes: int) -> list[memoryview]:
    """The first bytes of a list of buffers."""
    found = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:nbytes]
        nbytes -= len(view)
        if len(view):
            found.append(view)
    return found or [memoryview(b"")]


def _place() -> str | None:
    """The innermost line of the project on the stack, as file:line; None where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT):
            return f"{name[len(ROOT):]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
