"""Reads of bands: pieces of rows that lie apart in a file and together in memory, by every engine."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from forebay.rewriter.ir.program import Band
from forebay.runtime.disk import chunks
from forebay.runtime.disk.chunks import Read
from forebay.runtime.disk.page_cache import cached_nbytes
from forebay.runtime.disk.reader import available_kinds, open_reader


@pytest.mark.parametrize("kind", available_kinds())
@pytest.mark.parametrize("bands", [
    (Band(0, 700, 1000, ((100, 130), (500, 1))),),  # small pieces, some across pages
    (Band(5000, 3, 200_000, ((7, 150_000),)), Band(900_000, 1, 0, ((0, 3),))),  # larger ones, far apart
    (Band(0, 40, 64, ((0, 64),)),),  # rows that meet
], ids=["small", "large", "whole"])
def test_pieces_land_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
                                         bands: tuple[Band, ...]) -> None:
    monkeypatch.setattr(chunks, "APART_NBYTES", 100_000)
    data = np.random.default_rng(0).integers(0, 256, 1_100_000, dtype=np.uint8)
    path = tmp_path / "weights"
    with open(path, "wb") as file:
        file.write(data.tobytes())
        os.fsync(file.fileno())  # what is not on disk yet cannot be dropped
    begin = 33
    want = np.concatenate([data[begin + b.offset + row * b.stride + at :][:nbytes]
                           for b in bands for row in range(b.count) for at, nbytes in b.pieces])
    out = np.full(len(want) + 200, 7, dtype=np.uint8)
    reader, done = open_reader(kind, depth=2, chunk_nbytes=1 << 16), threading.Event()
    failed: list[BaseException | None] = []
    try:
        reader.submit(Read(str(path), begin, len(want), out.ctypes.data + 100, 0, 0,
                           lambda error: (failed.append(error), done.set()), bands))  # type: ignore[func-returns-value]
        assert done.wait(20) and failed == [None]
    finally:
        reader.close()
    assert np.array_equal(out[100:-100], want)
    assert (out[:100] == 7).all() and (out[-100:] == 7).all()
    with open(path, "rb") as seen:
        assert cached_nbytes(seen.fileno()) == 0
