"""Which files a model was read from: their state, to see a change; and a cheap digest of what they hold."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forebay.rewriter.ir.files import naming, read_input

if TYPE_CHECKING:
    from forebay.rewriter.checkpoints.records import TensorRecord

SAMPLE_NBYTES = 4096
MOST_SAMPLES = 1024  # one per tensor; 0.1 s of random reads on an NVMe disk
TICK_NS = 20_000_000  # file times advance with the kernel's clock tick, 10 ms at the slowest
# What decides how text becomes tokens, beside the weights; of a folder these and no others.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
                   "tekken.json", "spiece*")


class FileState(NamedTuple):
    """A file as `stat` tells it. Whoever writes to a file changes `ctime_ns`, and cannot set it back."""

    nbytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def file_state(path: str | os.PathLike[str]) -> FileState:
    """The state of a file, once it is old enough that a later write will differ from it."""
    found = _state(path)
    if 0 <= time.time_ns() - found.ctime_ns < TICK_NS:
        time.sleep(TICK_NS / 1e9)
        found = _state(path)
    return found


def file_states(paths: Iterable[str]) -> dict[str, FileState]:
    """The state of each file, by path."""
    return {path: file_state(path) for path in sorted(set(paths))}


def states_checksum(states: Mapping[str, FileState]) -> str:
    """SHA-256 over names, sizes and times of change: differs for files that were written to, or copied, since."""
    digest = hashlib.sha256()
    for path, state in sorted(states.items(), key=lambda entry: Path(entry[0]).name):
        digest.update(f"{Path(path).name} {list(state[:3])}\n".encode())
    return digest.hexdigest()


def changed_file(states: Mapping[str, FileState]) -> str | None:
    """The first file that is not in the state noted, or is gone; None where all are."""
    for path, state in states.items():
        try:
            if _state(path) != state:
                return path
        except OSError:
            return path
    return None


def sample_tensors(tensors: Mapping[str, TensorRecord]) -> str:
    """SHA-256 over 4 KiB from the middle of every tensor (of 1024 spread evenly, where there are more).

    Tells models of one architecture apart without reading them; a change elsewhere in a tensor is not seen. None of
    the pages stays in the page cache.
    """
    digest = hashlib.sha256()
    names = sorted(tensors)
    fds: dict[str, int] = {}
    try:
        for name in names[:: -(-len(names) // MOST_SAMPLES)] if names else ():
            record = tensors[name]
            fd = fds.get(record.path)
            if fd is None:
                fd = fds[record.path] = os.open(record.path, os.O_RDONLY | os.O_CLOEXEC)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
            nbytes = min(SAMPLE_NBYTES, record.nbytes)
            start = record.offset + (record.nbytes - nbytes) // 2
            with naming(record.path):
                digest.update(read_whole(fd, nbytes, start))
            first = start // SAMPLE_NBYTES * SAMPLE_NBYTES
            os.posix_fadvise(fd, first, start + nbytes - first + SAMPLE_NBYTES, os.POSIX_FADV_DONTNEED)
    finally:
        for fd in fds.values():
            os.close(fd)
    return digest.hexdigest()


def read_whole(fd: int, nbytes: int, offset: int) -> bytes:
    """Bytes of a file from `offset` on, fewer only where it ends before: one read may bring a part of the bytes."""
    found = b""
    while len(found) < nbytes:
        piece = os.pread(fd, nbytes - len(found), offset + len(found))
        if not piece:
            break
        found += piece
    return found


def tokenizer_checksum(folder: Path) -> str:
    """SHA-256 over names and contents of the files that a folder's tokenizer is made from."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(read_input(path))
    return digest.hexdigest()


def _state(path: str | os.PathLike[str]) -> FileState:
    status = os.stat(path)
    return FileState(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
