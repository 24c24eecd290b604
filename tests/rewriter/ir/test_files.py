"""Files that others give are regular files, and files that are written are there whole or not at all."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.rewriter.ir import files
from forebay.rewriter.ir.files import open_input, read_input, read_input_text, write_text, written_whole

FULL = Path("/dev/full")


def special_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """A pipe, a socket, a device, and links to them; each with what it is called."""
    os.mkfifo(folder / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.close()
    (folder / "link").symlink_to("/dev/zero")
    yield from ((folder / "pipe", "a named pipe"), (folder / "socket", "a socket"), (folder / "link", "a device"),
                (Path("/dev/zero"), "a device"))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    for path, kind in special_files(tmp_path):
        for read in (open_input, read_input, read_input_text):
            with pytest.raises(OSError, match=f"regular file but {kind}") as raised:
                read(path)
            assert raised.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        read_input(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_input(tmp_path / "none")


def test_a_pipe_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a device may rewind a tape; a pipe that takes a file's place at that moment makes nobody wait."""
    os.mkfifo(tmp_path / "pipe")
    opened: list[int] = []
    real = os.open

    def noted(path: str, flags: int, *more: int) -> int:
        opened.append(flags)
        return real(path, flags, *more)

    monkeypatch.setattr(files.os, "open", noted)
    with pytest.raises(OSError, match="named pipe"):
        open_input(tmp_path / "pipe")
    assert not opened
    (tmp_path / "file").write_text("x")
    regular = os.stat(tmp_path / "file")
    with monkeypatch.context() as swapped:
        swapped.setattr(files.os, "stat", lambda path: regular)
        with pytest.raises(OSError, match="named pipe"):
            open_input(tmp_path / "pipe")
    assert len(opened) == 1 and opened[0] & os.O_NONBLOCK


def test_no_more_is_read_than_the_size_says(tmp_path: Path) -> None:
    """Files of /proc say 0, and some of them never end."""
    assert read_input("/proc/self/status") == b""
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_input_text(tmp_path / "file", encoding="utf-8-sig") == "one\ntwo\nthree\n"
    with pytest.raises(UnicodeDecodeError):
        (tmp_path / "bad").write_bytes(b"\xff")
        read_input_text(tmp_path / "bad")


@pytest.mark.parametrize("before", [None, "old"])
def test_what_breaks_off_leaves_what_was_there(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before)
    with pytest.raises(ZeroDivisionError), written_whole(path) as file:
        file.write("new" * 100_000)
        raise ZeroDivisionError
    assert [each.name for each in tmp_path.iterdir()] == ([] if before is None else ["file"])
    assert before is None or path.read_text() == before


def test_a_full_disk_is_said_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as full:
            def fail(*_: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            full.setattr(files.os, "fsync", fail) if name == "fsync" else full.setattr(Path, "replace", fail)
            with pytest.raises(OSError, match="No space left") as raised:
                write_text(path, "new")
        assert raised.value.filename == str(path)
        assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_device_is_written_to_and_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        write_text(FULL, "x" * 100)
    assert raised.value.filename == str(FULL) and FULL.is_char_device()
    write_text("/dev/null", "x")


def test_a_pipe_takes_what_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "text")
    reader.join(60)
    assert read == ["text"] and (tmp_path / "pipe").is_fifo()


def test_a_file_keeps_its_place_and_its_mode(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    with written_whole(tmp_path / "link", "wb") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_missing_folder_is_said_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        write_text(tmp_path / "none" / "file", "x")
    assert raised.value.filename == str(tmp_path / "none" / "file")
