"""Count and drop a file's pages in the kernel's page cache, and recognize file systems that live in it."""

from __future__ import annotations

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
SYS_CACHESTAT = 451  # the same on every architecture
_MAP_FAILED = ctypes.c_void_p(-1).value
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "rootfs")


def resident_nbytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the file's pages that are in the page cache (`mincore`), whole pages counted.

    Exact for files the caller owns or may write; of others the kernel tells nothing and calls every page resident.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes == 0:
            return 0
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(path))
        try:
            states = bytearray(-(-nbytes // mmap.PAGESIZE))
            vector = (ctypes.c_ubyte * len(states)).from_buffer(states)
            if _libc.mincore(address, nbytes, vector) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(path))
            # Only the lowest bit of each state is defined.
            return sum(states.count(state) for state in set(states) if state & 1) * mmap.PAGESIZE
        finally:
            _libc.munmap(address, nbytes)
    finally:
        os.close(fd)


def cached_nbytes(fd: int) -> int:
    """Bytes of an open file's pages in the page cache, those still on their way from disk included (`cachestat`).

    Counts 0 before Linux 6.5, and where the caller may not ask.
    """
    span, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if _libc.syscall(SYS_CACHESTAT, fd, span, counts, 0) != 0:
        return 0
    return counts[0] * mmap.PAGESIZE


def drop_file(path: str | os.PathLike[str]) -> None:
    """Write the file's dirty pages back and drop it from the page cache; pages someone maps stay."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # dirty pages cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def in_page_cache_filesystem(path: str | os.PathLike[str]) -> bool:
    """Return whether the file or folder lives on a file system made of RAM (tmpfs), where nothing is ever read from
    disk."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1] in _MEMORY_FILESYSTEMS
    except OSError:
        return False
    return False
