"""Blocks of prompts in files: found again by later processes, within their bytes, whatever a crash left of them."""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from forebay.rewriter.ir.alignment import PAGE_NBYTES, whole_pages
from forebay.runtime.run import prefix_files
from forebay.runtime.run.prefix_cache import PrefixBlock, PrefixCache, block_keys
from forebay.runtime.run.prefix_files import PrefixFiles, PrefixFolderError

ROOT = bytes(32)
NBYTES = 2 * PAGE_NBYTES  # of a file whose block has more than a page


def keys_of(name: str) -> list[bytes]:
    return block_keys(ROOT, torch.tensor(list(map(ord, name))), 1)


def rows_of(name: str) -> torch.Tensor:
    """Other bytes for every path."""
    made = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=made)


def put(files: PrefixFiles, name: str) -> None:
    keys = keys_of(name)
    for i in range(1, len(keys) + 1):
        files.add(keys[:i], PrefixBlock(keys[i - 2] if i > 1 else ROOT, rows_of(name[:i])))
        files.settle(all_of_them=True)


@contextmanager
def opened(folder: Path, blocks: int = 100) -> Iterator[PrefixFiles]:
    files = PrefixFiles(folder, blocks * NBYTES)
    files.open()
    try:
        yield files
    finally:
        files.close()


def found(files: PrefixFiles, name: str) -> int:
    """How many blocks of a path are known; each is what was put."""
    keys = keys_of(name)[: files.count(keys_of(name))]
    blocks = list(files.read(keys))
    assert all(torch.equal(block.rows, rows_of(name[: i + 1])) for i, block in enumerate(blocks))
    return len(blocks)


def on_disk(folder: Path) -> int:
    return sum(whole_pages(path.stat().st_size) for path in folder.iterdir() if path.name != "lock")


def test_later_processes_find_what_was_kept_and_drop_what_was_used_first(tmp_path: Path) -> None:
    with opened(tmp_path, 5) as files:
        put(files, "abcd")
        put(files, "abce")
        assert files.nbytes == 5 * NBYTES == on_disk(tmp_path)
        assert found(files, "abcd") == 4  # used last
    with opened(tmp_path, 5) as files:
        put(files, "x")
        assert [found(files, name) for name in ("abcd", "abce", "x")] == [4, 3, 1]
    with opened(tmp_path, 2) as files:  # less room than before
        assert on_disk(tmp_path) == files.nbytes == 2 * NBYTES and found(files, "abcd") + found(files, "x") == 2
    with opened(tmp_path, 0) as files:
        put(files, "z")
        assert on_disk(tmp_path) == 0 == files.count(keys_of("z"))


def spoil_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4999] ^= 1
    path.write_bytes(data)


def other_block(path: Path) -> None:
    other = next(each for each in path.parent.glob("*.kv") if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("spoil", [
    spoil_byte, other_block, Path.unlink, lambda path: os.truncate(path, 4999), lambda path: os.truncate(path, 0),
    lambda path: path.write_bytes(bytes(5032))])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_damaged_block_is_dropped_and_may_be_kept_again(tmp_path: Path, spoil: object, reopened: bool) -> None:
    keys = keys_of("abcd")
    with opened(tmp_path) as files:
        put(files, "abcd")
        path = tmp_path / f"{keys[2].hex()}-{keys[1].hex()}.kv"
        if not reopened:
            spoil(path)  # type: ignore[operator]
            assert found(files, "abcd") == 2 == len(files.blocks) and not path.exists()
            return
    spoil(path)  # type: ignore[operator]
    with opened(tmp_path) as files:
        assert found(files, "abcd") == 2
        put(files, "abcd")
        assert found(files, "abcd") == 4


def test_only_whole_files_in_the_folder_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies where a block belongs, such as a link or a pipe, is replaced; a read of a file may come in parts."""
    first, second, third = keys_of("abc")
    elsewhere, at = tmp_path / "elsewhere", tmp_path / f"{second.hex()}-{first.hex()}.kv"
    elsewhere.write_text("mine")
    at.symlink_to(elsewhere)
    os.mkfifo(pipe := tmp_path / f"{third.hex()}-{second.hex()}.kv")
    draft = tmp_path / f".{at.name}.1.2.draft"
    draft.mkdir()
    with opened(tmp_path) as files:
        put(files, "abc")
        assert elsewhere.read_text() == "mine" and at.is_file() and not at.is_symlink() and found(files, "abc") == 3
        preadv = os.preadv
        with monkeypatch.context() as patch:
            patch.setattr(prefix_files.os, "preadv", lambda fd, into, offset: preadv(
                fd, [memoryview(into[0]).cast("B")[:PAGE_NBYTES]], offset))
            assert found(files, "abc") == 3
        pipe.unlink()
        os.mkfifo(pipe)
        os.truncate(at, 1 << 42)
        assert found(files, "abc") == 1
        put(files, "abc")
        assert found(files, "abc") == 3
        os.unlink(pipe)
        os.mkfifo(pipe)
        assert found(files, "abc") == 2


def test_a_forked_process_does_not_hold_the_folder(tmp_path: Path) -> None:
    with opened(tmp_path):
        if (child := os.fork()) == 0:
            signal.pause()
    try:
        with opened(tmp_path) as files:
            put(files, "a")
            if (other := os.fork()) == 0:
                try:
                    files._unlock()  # type: ignore[misc]
                finally:
                    os._exit(0)
            os.waitpid(other, 0)
            with pytest.raises(PrefixFolderError):
                PrefixFiles(tmp_path, 1).open()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_is_kept_by_one_at_a_time(tmp_path: Path) -> None:
    for name in ("notes.txt", ".notes.1.2.draft"):
        (tmp_path / name).write_text("mine")
    with opened(tmp_path / "new" / "folder"), opened(tmp_path), pytest.raises(
            PrefixFolderError, match="another process keeps its prompts here; name another folder"):
        PrefixFiles(tmp_path, 1).open()
    with opened(tmp_path, 0):
        pass
    del files_left_open(tmp_path)[:]
    with opened(tmp_path):
        assert all((tmp_path / name).read_text() == "mine" for name in ("notes.txt", ".notes.1.2.draft"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        PrefixFiles(tmp_path / "file", 1).open()


def files_left_open(folder: Path) -> list[PrefixFiles]:
    """One that nobody closes."""
    files = PrefixFiles(folder, 1)
    files.open()
    return [files]


def test_a_disk_that_takes_no_more_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, rows: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as files:
        put(files, "ab")
        with monkeypatch.context() as patch:
            patch.setattr(prefix_files, "_write", full)
            put(files, "abcd")
            assert found(files, "abcd") == 2 and files.nbytes == 2 * NBYTES == on_disk(tmp_path)
        put(files, "abcd")
        assert found(files, "abcd") == 4


def test_steps_do_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are yet to be written are known; beyond so many bytes of them nothing more is kept."""
    gate, write = threading.Event(), prefix_files._write
    monkeypatch.setattr(prefix_files, "MOST_PENDING_NBYTES", 10_000)
    monkeypatch.setattr(prefix_files, "_write", lambda path, rows: gate.wait(60) and write(path, rows))
    with opened(tmp_path) as files:
        keys = keys_of("abcdef")
        for i in range(1, 7):
            files.add(keys[:i], PrefixBlock(keys[i - 2] if i > 1 else ROOT, rows_of("abcdef"[:i])))
        known = found(files, "abcdef")
        gate.set()
    assert known == 3
    with opened(tmp_path) as files:
        assert found(files, "abcdef") == 3


def test_what_is_dropped_before_it_was_written_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), prefix_files._write
    monkeypatch.setattr(prefix_files, "_write", lambda path, rows: gate.wait(60) and write(path, rows))
    with opened(tmp_path, 4) as files:
        keys = keys_of("abcd")
        for i in range(1, 5):
            files.add(keys[:i], PrefixBlock(keys[i - 2] if i > 1 else ROOT, rows_of("abcd"[:i])))
        for key in keys[:0:-1]:
            files.drop(key)
        assert not gate.is_set() and found(files, "abcd") == 1
        gate.set()
    assert len(list(tmp_path.glob("*.kv"))) == 1


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks(tmp_path: Path) -> None:
    longest = "".join(map(chr, range(97, 117)))
    for delay_s in (0.0, 0.003, 0.01, 0.03):
        child = os.fork()
        if child == 0:
            try:
                with opened(tmp_path, 12) as files:
                    for number in range(200):
                        put(files, longest[: 1 + number % 20])
                        put(files, "x" * (1 + number % 7))
            finally:
                os._exit(0)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with opened(tmp_path, 12) as files:
            assert files.nbytes == on_disk(tmp_path) <= 12 * NBYTES
            for name in (longest, "x" * 7):
                assert found(files, name) == files.count(keys_of(name))  # none was damaged
            files.clear()


def test_what_leaves_memory_comes_back_from_the_disk(tmp_path: Path) -> None:
    def cache() -> PrefixCache:
        made = PrefixCache(2 * 5000, PrefixFiles(tmp_path, 6 * NBYTES))
        made.open()
        return made

    def rows(of: PrefixCache, name: str) -> list[bool]:
        keys: Sequence[bytes] = keys_of(name)
        count = of.count(keys)
        return [torch.equal(got, rows_of(name[: i + 1])) for i, got in of.read(keys[:count], range(count))]

    first = cache()
    for name in ("abcd", "xy"):
        for i in range(1, len(name) + 1):
            assert first.lacks(keys_of(name[:i]))
            first.add(keys_of(name[:i]), rows_of(name[:i]), ROOT)
            assert not first.lacks(keys_of(name[:i]))
    assert first.nbytes <= 2 * 5000 and len(first.known(keys_of("xy"))) == 2 and not first.known(keys_of("abcd"))
    assert rows(first, "abcd") == [True] * 4 and len(first.known(keys_of("abcd"))) == 2  # in memory again
    first.close()
    first.add(keys_of("q"), rows_of("q"), ROOT)  # after it is closed: in memory alone
    again = cache()
    assert not again.blocks and rows(again, "abcd") == [True] * 4 and rows(again, "xyz") == [True] * 2
    assert again.count(keys_of("q")) == 0
    again.close()
