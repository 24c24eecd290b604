"""Files that others give, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

StrPath = str | os.PathLike[str]
# Kinds of files that have no end, that wait for somebody, or that do something when they are opened.
_SPECIAL_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
          (stat.S_ISBLK, "a device"))


@contextmanager
def naming(path: StrPath, draft: Path | None = None) -> Iterator[None]:
    """Add `path` to an OSError that names no file, or its `draft`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, draft and os.fspath(draft)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def special_kind(mode: int) -> str | None:
    """Name the kind of a special file, as in "a named pipe"; None for regular files and folders."""
    return next((kind for is_kind, kind in _SPECIAL_KINDS if is_kind(mode)), None)


def open_input(path: StrPath, buffering: int = -1) -> BinaryIO:
    """Open a regular file that may come from anybody, to read its bytes.

    A pipe, a device or a socket is not opened: reading one may never end, and opening one may wait or have an effect.

    Raises:
        OSError: For those, for folders, and for files that cannot be opened; it names the file.
    """
    return open(path, "rb", buffering=buffering, opener=_open_regular)


def read_input(path: StrPath) -> bytes:
    """The bytes of a regular file (`open_input`), as many as its size says when it is opened."""
    with naming(path), open_input(path) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_input_text(path: StrPath, encoding: str = "utf-8") -> str:
    """The text of a regular file (`read_input`), every end of a line as a newline character."""
    return read_input(path).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def _open_regular(path: str, flags: int) -> int:
    _require_regular(os.stat(path), path)
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe may have replaced it meanwhile
    try:
        _require_regular(os.fstat(opened), path)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _require_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        kind = special_kind(status.st_mode) or "something else"
        raise OSError(errno.EINVAL, f"not a regular file but {kind}; save its contents in a file and name that", path)


@contextmanager
def written_whole(path: StrPath, mode: str = "w", newline: str | None = None) -> Iterator[IO]:
    """Open a file to write that replaces `path` in one rename, once its bytes are on disk.

    `mode` is "w" for text in UTF-8, "wb" for bytes. If anything fails, the file at `path` stays and nothing else is
    left. A pipe or device is written to directly, and so is a file in a folder that cannot be written.

    Raises:
        OSError: For what cannot be written; it names `path`.
    """
    target = Path(path).resolve()
    encoding = None if "b" in mode else "utf-8"
    exists = target.exists()
    if exists and not (target.is_file() and os.access(target.parent, os.W_OK)):
        with naming(path), open(path, mode, encoding=encoding, newline=newline) as file:
            yield file
        return
    draft = target.with_name(f".{target.name[:200]}.{os.getpid()}.{threading.get_ident()}.draft")
    try:
        with naming(path, draft):
            with open(draft, mode, encoding=encoding, newline=newline) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if exists:
                draft.chmod(stat.S_IMODE(target.stat().st_mode))
            draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: StrPath, text: str) -> None:
    """Write a text file whole or not at all (`written_whole`)."""
    with written_whole(path) as file:
        file.write(text)
