"""Blocks of computed prompts in the files of a folder, which outlive the process.

A block is one file, named by its key and the one before it. Its rows come first, so that direct reads land where they
are needed, then a checksum over name and rows: a file that a crash left torn is dropped when it is read. A thread
writes, so that steps do not wait for the disk. One process at a time keeps a folder, by a lock.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from forebay.rewriter.ir.alignment import PAGE_NBYTES, whole_pages
from forebay.rewriter.ir.files import StrPath, open_input, written_whole
from forebay.runtime.disk.open_file import OpenFile
from forebay.runtime.disk.page_cache import drop_file, in_page_cache_filesystem
from forebay.runtime.run.prefix_cache import PrefixBlock, PrefixTree

LOG = logging.getLogger("forebay")
NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})\.kv")
DRAFT = re.compile(rf"\.{NAME.pattern}\.\d+\.\d+\.draft")  # of `written_whole`
LOCK = "lock"
CHECKSUM_NBYTES = 32
READ_AHEAD = 4  # blocks
READERS = 2
MOST_PENDING_NBYTES = 64 << 20  # of rows that are yet to be written


class PrefixFolderError(OSError):
    """A folder that cannot keep prompts; the message says why."""


@dataclass(frozen=True)
class FileBlock:
    """A block in a file: the key of the one before it, and the bytes of the file in whole pages."""

    before: bytes
    nbytes: int


class PrefixFiles(PrefixTree[FileBlock]):
    """Blocks in the files of `folder`, at most `most_nbytes` of them, once it is open.

    Attributes:
        pending: By key the writes that are under way, and what they write.
    """

    def __init__(self, folder: StrPath, most_nbytes: int) -> None:
        super().__init__(most_nbytes)
        self.folder, self.pending = Path(folder).expanduser(), dict[bytes, tuple[Future[None], PrefixBlock]]()
        self._told = False  # that a write failed
        self._unlock: weakref.finalize | None = None  # type: ignore[type-arg]
        self._writer: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None

    # -- the folder

    def open(self) -> None:
        """Take the folder, which is made where it is missing, and look for blocks in it; nothing happens if it is open.

        Raises:
            PrefixFolderError: Another process keeps its prompts there.
            OSError: It cannot be written.
        """
        if self._unlock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):  # a file system without locks
                raise
            raise PrefixFolderError(f"{self.folder}: another process keeps its prompts here; name another folder "
                                    "(cache_dir)") from error
        self._unlock = weakref.finalize(self, _unlock, lock, os.getpid())
        self._find()
        self.has_room(())

    def _find(self) -> None:
        """Note the blocks of the folder, each as recently used as those that it leads to. What writes left that broke
        off goes."""
        found = dict[bytes, FileBlock]()
        used = dict[bytes, int]()
        for entry in os.scandir(self.folder):
            if DRAFT.fullmatch(entry.name):
                with suppress(OSError):
                    os.unlink(entry)
            elif (match := NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                key, before = map(bytes.fromhex, match.groups())
                stat = entry.stat()
                found[key], used[key] = FileBlock(before, whole_pages(stat.st_size)), stat.st_mtime_ns
        latest = dict[bytes, None]()  # each after the one before it
        for key in sorted(found, key=used.__getitem__, reverse=True):
            chain = list[bytes]()
            while key in found and key not in latest and key not in chain:
                chain.append(key)
                key = found[key].before
            latest |= dict.fromkeys(reversed(chain))
        for key in reversed(latest):
            self.blocks[key] = found[key]
            self.nbytes += found[key].nbytes

    def close(self) -> None:
        """End the writes under way, and give the folder to others."""
        if self._unlock is None:
            return
        self.settle(all_of_them=True)
        for pool in (self._writer, self._reader):
            if pool is not None:
                pool.shutdown()
        self._unlock()
        self._unlock = self._writer = self._reader = None
        self.blocks.clear()
        self.nbytes = 0

    def _path(self, key: bytes, before: bytes) -> Path:
        return self.folder / f"{key.hex()}-{before.hex()}.kv"

    # -- what is kept

    def count(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks a prompt of `keys` may begin with; they count as used, for later processes too."""
        self.settle()
        found, now = self.known(keys), time.time_ns()
        for i, (key, block) in enumerate(zip(keys, found, strict=False)):
            if key not in self.pending:
                with suppress(OSError):
                    os.utime(self._path(key, block.before), ns=(now - i, now - i))
        return len(found)

    def wants(self, keys: Sequence[bytes]) -> bool:
        """Return whether a block should be kept, while the folder is open and the disk keeps up."""
        self.settle()
        behind = sum(block.nbytes for _, block in self.pending.values()) > MOST_PENDING_NBYTES
        return self._unlock is not None and not behind and super().wants(keys)

    def add(self, keys: Sequence[bytes], block: PrefixBlock) -> None:
        """Write the block of the last of a prompt's `keys`, if all before it are kept and there is room for it."""
        if not self.wants(keys) or not self.put(keys, FileBlock(
                block.before, whole_pages(block.nbytes + CHECKSUM_NBYTES))):
            return
        self._writer = self._writer or ThreadPoolExecutor(1, "forebay-prompts")
        path = self._path(keys[-1], block.before)
        self.pending[keys[-1]] = self._writer.submit(_write, path, block.rows), block

    def drop(self, key: bytes) -> None:
        """Keep a block no longer: its file goes."""
        if (pending := self.pending.pop(key, None)) is not None and not pending[0].cancel():
            with suppress(OSError):
                pending[0].result()
        with suppress(OSError):
            self._path(key, self.blocks[key].before).unlink(missing_ok=True)
        super().drop(key)

    def settle(self, all_of_them: bool = False) -> None:
        """Note which writes have ended, or wait for them all; a block that could not be written is dropped."""
        for key, (write, _) in list(self.pending.items()):
            if not (all_of_them or write.done()):
                continue
            try:
                write.result()
                del self.pending[key]
            except OSError as error:
                LOG.log(logging.DEBUG if self._told else logging.WARNING, "a block of prompts is not kept: %s", error)
                self._told = True
                self.drop(key)

    def read(self, keys: Sequence[bytes]) -> Iterator[PrefixBlock]:
        """The blocks of `keys`, read ahead, up to the first that cannot be read. It is dropped with those after it,
        which nobody has read either."""
        self._reader = self._reader or ThreadPoolExecutor(READERS, "forebay-prompts-in")
        ahead: deque[tuple[bytes, PrefixBlock | Future[PrefixBlock]]] = deque()
        left = iter(keys)
        while True:
            for key in islice(left, READ_AHEAD + 1 - len(ahead)):
                block = self.blocks[key]
                ahead.append((key, self.pending[key][1] if key in self.pending else self._reader.submit(
                    _read, self._path(key, block.before), block)))
            if not ahead:
                return
            key, found = ahead.popleft()
            try:
                rows = found.result() if isinstance(found, Future) else found
            except OSError as error:
                LOG.warning("a block of prompts is dropped: %s", error)
                for each in keys[keys.index(key) :]:
                    if each in self.blocks:
                        self.drop(each)
                return
            yield rows


def _unlock(lock: int, process: int) -> None:
    """Give the folder to others, even if a process that was forked still has the file open."""
    if os.getpid() == process:
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _checksum(name: str, rows: torch.Tensor) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(rows.numpy().data)
    return digest.digest()


def _write(path: Path, rows: torch.Tensor) -> None:
    """Write a block, whole or not at all; it does not stay in the page cache. A link or pipe in its place goes."""
    path.unlink(missing_ok=True)
    with written_whole(path, "wb") as file:
        file.write(rows.numpy().data)
        file.write(_checksum(path.name, rows))
    drop_file(path)


def _read(path: Path, block: FileBlock) -> PrefixBlock:
    """Read a block past the page cache. OSError where the file is not what was written."""
    open_input(path).close()
    file = OpenFile(str(path), not in_page_cache_filesystem(path))
    try:
        nbytes, done = os.fstat(file.fd).st_size, 0
        if whole_pages(nbytes) != block.nbytes:
            raise OSError(errno.EIO, "the file is damaged", str(path))
        memory = torch.empty(block.nbytes + PAGE_NBYTES, dtype=torch.uint8)
        pages = memory[-memory.data_ptr() % PAGE_NBYTES :][: block.nbytes]
        while got := os.preadv(file.fd, [pages[done:].numpy().data], done):  # at most 2 GiB at a time
            done += got
            if done >= nbytes:
                break
        if not file.direct:
            file.drop(0)
    finally:
        os.close(file.fd)
    rows, checksum = pages[:nbytes][:-CHECKSUM_NBYTES], pages[:nbytes][-CHECKSUM_NBYTES:]
    if done != nbytes or not rows.numel() or _checksum(path.name, rows) != checksum.numpy().tobytes():
        raise OSError(errno.EIO, "the file is damaged", str(path))
    return PrefixBlock(block.before, rows)
