"""Resident pages are counted as the kernel sees them, and dropped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from forebay.runtime.disk.page_cache import cached_nbytes, drop_file, in_page_cache_filesystem, resident_nbytes


def test_count_and_drop(tmp_path: Path) -> None:
    if in_page_cache_filesystem(tmp_path):
        pytest.skip("tmpfs is the page cache")
    file = tmp_path / "pages"
    npages = 37
    file.write_bytes(b"x" * ((npages - 1) * mmap.PAGESIZE + 5))
    assert resident_nbytes(file) == npages * mmap.PAGESIZE
    drop_file(file)
    assert resident_nbytes(file) == 0
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 10, 5 * mmap.PAGESIZE)
        assert 0 < resident_nbytes(file) < npages * mmap.PAGESIZE
        assert cached_nbytes(fd) in (0, resident_nbytes(file)), "0: a kernel that cannot tell"
    finally:
        os.close(fd)


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert resident_nbytes(tmp_path / "empty") == 0


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        resident_nbytes(tmp_path / "absent")


def test_tmpfs_is_told_apart() -> None:
    assert not in_page_cache_filesystem("/proc")
    with open("/proc/self/mountinfo") as mounts:
        shm = [line for line in mounts if line.split()[4] == "/dev/shm" and " - tmpfs " in line]
    if not shm:
        pytest.skip("no tmpfs at /dev/shm")
    assert in_page_cache_filesystem("/dev/shm")
