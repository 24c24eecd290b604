"""An open file whose pages do not stay in the page cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

from forebay.rewriter.ir.alignment import PAGE_NBYTES, whole_pages


class TruncatedFileError(OSError):
    """The file ends before the bytes that were asked for."""


class OpenFile:
    """An open file; `direct` says whether O_DIRECT holds, `stale` that read-ahead may have left pages behind."""

    __slots__ = ("direct", "fd", "path", "stale")

    def __init__(self, path: str, direct: bool) -> None:
        self.path, self.stale = path, False
        self.fd = _open_direct(path) if direct else -1
        self.direct = self.fd >= 0
        if not self.direct:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.drop(0)

    def drop(self, end: int) -> None:
        """Drop the pages up to `end`, the page that holds it too; 0 drops the whole file.

        Always from the start of the file: a folio of many pages is dropped only by a range that holds all of it.
        """
        with contextlib.suppress(OSError):  # a file system without the advice has nothing better to offer
            os.posix_fadvise(self.fd, 0, whole_pages(end), os.POSIX_FADV_DONTNEED)

    def truncated(self, offset: int, nbytes: int) -> TruncatedFileError:
        """The error of a read of `nbytes` at `offset` that the file is too short for."""
        size = os.fstat(self.fd).st_size
        return TruncatedFileError(
            f"{self.path}: truncated: expected {nbytes} bytes at offset {offset}, but the file holds {size} "
            f"bytes; fetch or convert the checkpoint again"
        )


def _open_direct(path: str) -> int:
    """A descriptor that is seen to read with O_DIRECT, or -1 where the file system refuses it."""
    fd = -1
    with mmap.mmap(-1, PAGE_NBYTES) as page:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            os.preadv(fd, [page], 0)  # some file systems accept the flag and refuse the read
            return fd
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return -1
            error.filename = error.filename or path  # a read does not say of what
            raise
