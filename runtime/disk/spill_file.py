"""A file for bytes that fit no faster tier; it ends with the process, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile
import weakref
from pathlib import Path

from forebay.rewriter.ir.files import open_input
from forebay.runtime.disk.chunks import Chunk
from forebay.runtime.disk.open_file import OpenFile
from forebay.runtime.disk.page_cache import in_page_cache_filesystem
from forebay.runtime.disk.temporary import opens

_NO_SUCH_FLAG = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR)  # what file systems answer to O_TMPFILE and O_DIRECT


_libc = ctypes.CDLL(None, use_errno=True)


_sync_range = getattr(_libc, "sync_file_range", None)  # Linux's own
if _sync_range is not None:
    _sync_range.argtypes = (ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint)


NAMED = ".forebay-run-"  # begins the names of files that need one


WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER


class SpillError(OSError):
    """A spill file that cannot be had; the message says where and what would help."""


class SpillFile(OpenFile):
    """`nbytes` of zeros on the disk of `folder`, taken at once: a disk without room is refused here, by SpillError.

    The file has no name where `path` opens it without, so nothing is left of it once it is closed, however the process
    ends. It is written directly; where the file system cannot, what was written is brought to the disk and dropped from
    the page cache.
    """

    __slots__ = ("__weakref__", "forget", "name", "nbytes")

    def __init__(self, name: str, folder: str, nbytes: int) -> None:
        self.name, self.nbytes, self.stale = name, nbytes, False
        try:
            self.fd, self.direct = _open_nameless(folder)
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"  # under which readers can open it
            if not opens(self.path):
                os.close(self.fd)
                self.fd, self.direct, self.path = _open_named(folder)
        except OSError as error:
            raise spill_refusal(folder, error) from error
        self.forget = weakref.finalize(self, _unlink, self.path, os.getpid())
        try:
            if nbytes:
                os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            self.close()
            raise SpillError(f"{folder}: the disk does not give the {nbytes} bytes of the spill file {name} "
                             f"({error.strerror}); free space there or choose another folder (budget disk=FOLDER)"
                             ) from error

    def took_part(self, chunk: Chunk, nbytes: int) -> OSError:
        """The error of a write of which the disk took only so many bytes."""
        return OSError(errno.EIO, f"the disk took {nbytes} of {chunk.nbytes} bytes at offset {chunk.offset}", self.name)

    def settle(self, offset: int, nbytes: int) -> None:
        """Bring what was written through the page cache to the disk, and drop it there."""
        if self.direct:
            return
        if _sync_range is None or _sync_range(self.fd, offset, nbytes, WRITE_AND_WAIT) != 0:
            os.fdatasync(self.fd)
        self.drop(offset + nbytes)

    def close(self) -> None:
        """Give the disk space back."""
        self.forget()
        os.close(self.fd)


def require_spill_folder(folder: str | None) -> None:
    """Raise SpillError unless spill files can be made in `folder`, or the folder itself where it is missing; to be told
    before the work, not when it spills. None is anywhere."""
    if folder is None:
        return
    place = Path(folder).absolute()
    try:
        if place.exists():
            os.close(_open_nameless(folder)[0])
            return
        above = next(parent for parent in place.parents if parent.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise spill_refusal(folder, error) from error


def spill_refusal(folder: str, error: OSError) -> SpillError:
    return SpillError(f"{folder}: no spill file can be made here ({error.strerror}); choose another folder on a local "
                      "disk (budget disk=FOLDER)")


def _open_nameless(folder: str) -> tuple[int, bool]:
    """A descriptor of a file without a name, and whether O_DIRECT holds for it."""
    flags = os.O_RDWR | os.O_CLOEXEC
    direct = 0 if in_page_cache_filesystem(folder) else os.O_DIRECT
    for attempt in dict.fromkeys((direct, 0)):
        try:
            return os.open(folder, flags | os.O_TMPFILE | attempt, 0o600), bool(attempt)
        except OSError as error:
            if error.errno not in _NO_SUCH_FLAG:
                raise
    made, path = tempfile.mkstemp(dir=folder, prefix=".forebay-spill-")
    try:
        return _opened(path, direct)
    finally:
        os.close(made)
        os.unlink(path)


def _opened(path: str, direct: int) -> tuple[int, bool]:
    """A descriptor of the file at `path`, and whether the flag `direct` holds for it."""
    for attempt in dict.fromkeys((direct, 0)):
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | attempt), bool(attempt)
        except OSError as error:
            if error.errno not in _NO_SUCH_FLAG or not attempt:
                raise
    raise AssertionError


def _open_named(folder: str) -> tuple[int, bool, str]:
    """Open like `_open_nameless` a file that keeps its name, which is the third result. A lock says that its process
    lives."""
    for left in Path(folder).glob(f"{NAMED}*"):
        with contextlib.suppress(OSError), open_input(left) as file:  # another user's, gone by now, or a pipe
            if _locked(file.fileno(), fcntl.LOCK_NB):
                left.unlink(missing_ok=True)
    made, path = tempfile.mkstemp(dir=folder, prefix=NAMED)
    try:
        fd, direct = _opened(path, 0 if in_page_cache_filesystem(folder) else os.O_DIRECT)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(made)
    _locked(fd)
    if os.fstat(fd).st_nlink == 0:  # before it was locked another process took it for one that was left
        os.close(fd)
        return _open_named(folder)
    return fd, direct, path


def _locked(fd: int, how: int = 0) -> bool:
    """Take the lock of an open file until it is closed; False where others hold it, or the file system has none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | how)
    except OSError:
        return False
    return True


def _unlink(path: str, owner: int) -> None:
    """Take a named file's name away; a forked child shares the file with its living parent."""
    if os.getpid() == owner and Path(path).name.startswith(NAMED):
        Path(path).unlink(missing_ok=True)
