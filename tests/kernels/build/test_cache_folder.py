"""One folder for what is kept, by one function."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from forebay.kernels.build.cache_folder import cache_folder, make_cache_folder


@pytest.mark.parametrize(("said", "below"), [("~/kept", "kept"), ("", ".cache/forebay"), (None, ".cache/forebay")])
def test_a_home_is_expanded(said: str | None, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if said is None:
        monkeypatch.delenv("FOREBAY_CACHE", raising=False)
    else:
        monkeypatch.setenv("FOREBAY_CACHE", said)
    assert cache_folder() == tmp_path / below
    assert make_cache_folder() == tmp_path / below
    assert stat.S_IMODE((tmp_path / below).stat().st_mode) == 0o700
