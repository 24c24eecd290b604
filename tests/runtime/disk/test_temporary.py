"""The file that a disk is measured with can be opened anew, with and without /proc, and is gone afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.runtime.disk.temporary import temporary_file


@pytest.fixture(params=["proc", "no proc"])
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether files need names, because none opens by its descriptor's path."""
    if request.param == "proc":
        return not os.path.isdir("/proc/self/fd")
    real = os.open

    def refuse(path: str, flags: int, *more: int, **options: int) -> int:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    return True


def test_it_opens_anew_and_leaves_nothing(tmp_path: Path, named: bool) -> None:
    with temporary_file(tmp_path) as (descriptor, path):
        os.write(descriptor, b"contents")
        again = os.open(path, os.O_RDONLY)
        assert os.read(again, 100) == b"contents"
        os.close(again)
        assert len(list(tmp_path.iterdir())) == named
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_work_with_it_fails(tmp_path: Path, named: bool) -> None:
    with pytest.raises(OSError, match="work"), temporary_file(tmp_path):
        raise OSError("work")
    assert not list(tmp_path.iterdir())
