"""Slices whose bytes lie in several places: in any order, and in several files."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.rewriter.ir.program import Band, FileSlice
from forebay.runtime.disk.chunks import Read
from forebay.runtime.disk.file_reads import prepare_slice, submit_slice
from forebay.runtime.disk.reader import available_kinds, open_reader


def scattered(folder: Path, generator: random.Random, largest: int) -> tuple[FileSlice, bytes]:
    """A slice of pieces in any order, of two files, and its bytes."""
    contents = [generator.randbytes(400_000 + 4 * largest) for _ in range(2)]
    paths = [folder / f"{i}" for i in range(2)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    bands, whole = [], b""
    for _ in range(generator.randint(1, 40)):
        file, nbytes = generator.randrange(2), generator.randint(1, largest)
        at = generator.randrange(len(contents[file]) - nbytes)
        bands.append(Band(at, 1, nbytes, ((0, nbytes),), str(paths[file])))
        whole += contents[file][at : at + nbytes]
    return FileSlice(str(paths[0]), 0, len(whole), tuple(bands)), whole


@pytest.mark.parametrize("kind", available_kinds())
@pytest.mark.parametrize("largest", [900, 70_000, 3 << 20])
def test_bytes_arrive_in_order_again_and_again(tmp_path: Path, kind: str, largest: int) -> None:
    generator = random.Random(largest)
    reader = open_reader(kind)
    try:
        for _ in range(6):
            source, whole = scattered(tmp_path, generator, largest)
            lower = generator.randrange(len(whole))
            part = source.part(lower, generator.randint(1, len(whole) - lower))
            memory = torch.zeros(part.nbytes + 128, dtype=torch.uint8)
            ended: list[BaseException | None] = []
            event = threading.Event()

            def done(error: BaseException | None, ended: list = ended, event: threading.Event = event) -> None:
                ended.append(error)
                event.set()

            queue = prepare_slice(reader, part, memory.data_ptr() + 64, (0, 0), done)
            for _ in range(2):
                memory.zero_()
                event.clear()
                queue()
                assert event.wait(60)
                found = memory.numpy().tobytes()
                assert found[64:-64] == whole[lower : lower + part.nbytes]
                assert not any(found[:64] + found[-64:])
            assert ended == [None, None]
    finally:
        reader.close()


def test_an_error_of_one_file_is_told_once(tmp_path: Path) -> None:
    generator = random.Random(0)
    source, _ = scattered(tmp_path, generator, 5000)
    while len({band.path for band in source.bands}) < 2:
        source, _ = scattered(tmp_path, generator, 5000)
    (tmp_path / "1").write_bytes(b"")
    memory, ended, event = torch.zeros(source.nbytes, dtype=torch.uint8), [], threading.Event()
    reader = open_reader("buffered")
    try:
        submit_slice(reader, source, memory.data_ptr(), (0, 0), lambda e: (ended.append(e), event.set()))
        assert event.wait(60)
    finally:
        reader.close()
    assert len(ended) == 1 and isinstance(ended[0], BaseException)


class Held:
    """A reader whose reads end when they are told to, and of which one cannot be issued."""

    def __init__(self, refuses: int) -> None:
        self.reads: list[Read] = []
        self.refuses = refuses

    def submit(self, read: Read) -> None:
        if len(self.reads) == self.refuses:
            raise RuntimeError("closed")
        self.reads.append(read)

    def prepare(self, read: Read) -> Callable[[], None]:
        return lambda: self.submit(read)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_a_read_that_cannot_be_issued_is_told_behind_those_under_way(refuses: int, again: bool) -> None:
    """Else whoever is told would take memory as free into which the earlier reads still write."""
    paths = ["a", "b", "a", "b"]
    source = FileSlice("a", 0, 400, tuple(Band(100 * i, 1, 100, ((0, 100),), path) for i, path in enumerate(paths)))
    assert len(list(source.by_file())) == 4
    ended: list[BaseException | None] = []
    reader = Held(refuses)
    given: Any = reader, source, 0, (0, 0), ended.append
    queue = prepare_slice(*given) if again else partial(submit_slice, *given)
    for _ in range(1 + again):
        reader.reads.clear()
        ended.clear()
        queue()
        assert len(reader.reads) == refuses and bool(ended) is (refuses == 0)
        for i, read in enumerate(reader.reads):
            assert not ended, f"told before read {i} has ended"
            read.on_done(None)
        assert [str(each) for each in ended] == ["closed"]
