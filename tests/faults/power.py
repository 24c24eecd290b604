"""What a loss of power can leave of a folder: operations on its files are recorded, and every moment is cut off.

The disk of this model keeps what was synced and nothing else for sure. Of a file, writes since its last fsync may be
there or not, each page by itself, so that zeros can stand where a page was not written and a later one was. Of the
folder, creations, renames and removals since its last fsync may be there or not, each by itself.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PAGE = 4096


@dataclass(frozen=True)
class Event:
    """`kind` write, truncate, sync (of the file `file`, a number), link and unlink (of `name`), syncdir, or mark."""

    kind: str
    file: int = 0
    name: str = ""
    at: int = 0
    data: bytes = b""
    replaced: str = ""


@dataclass
class Recorder:
    """The operations on the files of one folder, in order."""

    folder: Path
    log: list[Event] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # by inode

    def mark(self, name: str) -> None:
        """Note that from here on something is promised."""
        self.log.append(Event("mark", name=name))

    def _name(self, path: Any) -> str | None:
        try:
            full = Path(os.fsdecode(path))
        except TypeError:
            return None
        return full.name if full.parent == self.folder else None

    def _opened(self, fd: int, path: Any, existed: bool) -> None:
        name = self._name(path)
        if name is not None and not existed:
            number = self.numbers[os.fstat(fd).st_ino] = len(self.log) + 1
            self.log.append(Event("link", number, name))

    def _number(self, fd: int) -> int | None:
        return self.numbers.get(os.fstat(fd).st_ino)

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record what is done meanwhile through `os` and `open`.

        Long: a small stand-in for each function of the system, over the same few variables."""
        patch = pytest.MonkeyPatch()
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "rename", "unlink",
                                                     "ftruncate")}
        opened, number, log = self._opened, self._number, self.log

        def os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            existed = os.path.exists(path)
            fd = real["open"](path, flags, *args, **kwargs)
            opened(fd, path, existed)
            if flags & os.O_TRUNC and existed and (found := number(fd)):
                log.append(Event("truncate", found))
            return fd

        def written(fd: int, write: Any) -> int:
            found = number(fd)
            appends = found and os.get_blocking is not None and _flags(fd) & os.O_APPEND
            at = os.fstat(fd).st_size if appends else os.lseek(fd, 0, os.SEEK_CUR) if found else 0
            done, data = write()
            if found:
                log.append(Event("write", found, at=at, data=bytes(data[:done])))
            return done

        def os_write(fd: int, data: Any) -> int:
            return written(fd, lambda: (real["write"](fd, data), memoryview(data).cast("B")))

        def os_fsync(fd: int) -> None:
            real["fsync"](fd)
            if os.path.samestat(os.fstat(fd), os.stat(self.folder)):
                log.append(Event("syncdir"))
            elif found := number(fd):
                log.append(Event("sync", found))

        def os_replace(source: Any, target: Any, **kwargs: Any) -> None:
            inode = os.stat(source).st_ino
            real["replace"](source, target, **kwargs)
            a, b = self._name(source), self._name(target)
            if a and b and inode in self.numbers:
                log.append(Event("link", self.numbers[inode], b, replaced=a))

        def os_unlink(path: Any, **kwargs: Any) -> None:
            real["unlink"](path, **kwargs)
            if name := self._name(path):
                log.append(Event("unlink", name=name))

        def os_ftruncate(fd: int, nbytes: int) -> None:
            real["ftruncate"](fd, nbytes)
            if found := number(fd):
                log.append(Event("truncate", found, at=nbytes))

        class Raw(io.FileIO):
            def write(self, data: Any) -> Any:
                view = memoryview(data).cast("B")
                return written(self.fileno(), lambda: (super(Raw, self).write(view), view))

        def file_open(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
                      newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:
            if mode.rstrip("bt") == "r" or isinstance(file, int):
                return io_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if "w" in mode else os.O_APPEND)
            raw = Raw(os_open(file, flags | os.O_CLOEXEC, 0o644), "w" if "w" in mode else "a")
            whole = raw if buffering == 0 else io.BufferedWriter(raw)
            return whole if "b" in mode else io.TextIOWrapper(whole, encoding or "utf-8")  # type: ignore[arg-type]

        def no_sendfile(*args: Any) -> int:
            raise OSError(errno.EINVAL, "not recorded")

        io_open = builtins.open
        for name, call in (("open", os_open), ("write", os_write), ("fsync", os_fsync), ("replace", os_replace),
                           ("rename", os_replace), ("unlink", os_unlink), ("ftruncate", os_ftruncate),
                           ("sendfile", no_sendfile)):
            patch.setattr(os, name, call)
        patch.setattr(builtins, "open", file_open)
        patch.setattr(io, "open", file_open)
        try:
            yield self
        finally:
            patch.undo()


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


def crashes(log: list[Event], each: int, rng: random.Random) -> Iterator[tuple[int, dict[str, bytes]]]:
    """For every moment some states that a loss of power then can leave: how many events had happened, and the folder's
    files; `each` random ones beside the two in which nothing, and all, of what was not synced is there."""
    for count in range(len(log) + 1):
        done = log[:count]
        for how in ("none", "all", *["some"] * each):
            chance = random.Random(rng.random()) if how == "some" else None
            names: dict[str, int] = {}
            synced = max((i for i, e in enumerate(done) if e.kind == "syncdir"), default=-1)
            for i, event in enumerate(done):
                if event.kind not in ("link", "unlink") or not (
                        i < synced or how == "all" or (chance is not None and chance.random() < 0.5)):
                    continue
                names.pop(event.replaced or event.name, None)
                if event.kind == "link":
                    names[event.name] = event.file
            yield count, {name: _contents(done, number, how, chance) for name, number in names.items()}


def _contents(done: list[Event], number: int, how: str, chance: random.Random | None) -> bytes:
    own = [(i, e) for i, e in enumerate(done) if e.file == number]
    synced = max((i for i, e in own if e.kind == "sync"), default=-1)
    data = bytearray()
    for i, event in own:
        if i > synced and (how == "none" or (chance is not None and chance.random() < 0.4)):
            continue  # neither its bytes nor its length
        if event.kind == "truncate":
            del data[event.at :]
            data.extend(bytes(event.at - len(data)))
        if event.kind != "write":
            continue
        data.extend(bytes(max(0, event.at + len(event.data) - len(data))))
        at = 0
        while at < len(event.data):  # page by page
            end = min(len(event.data), at + PAGE - (event.at + at) % PAGE)
            if i < synced or chance is None or chance.random() < 0.7:
                data[event.at + at : event.at + end] = event.data[at:end]
            at = end
    return bytes(data)
