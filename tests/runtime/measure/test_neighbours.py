"""The share of the cores that others take, from the kernel's counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.runtime.measure import neighbours


def _stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> Path:
    """Counters that the test writes, of cores 0 and 1 that it may use, at 100 ticks a second; clock[0] is the time,
    clock[1] what this process computed."""
    file = tmp_path / "stat"
    monkeypatch.setattr(neighbours, "STAT", file)
    monkeypatch.setattr(neighbours.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(neighbours.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(neighbours.time, "process_time", lambda: clock[1])
    return file


def _lines(*user_ticks: int) -> str:
    """Counters of cores that worked so long; waiting and idling are no work, and guests are counted in user."""
    cores = [f"cpu{i} {t} 1 1 5000 700 0 1 1 {t} 0" for i, t in enumerate(user_ticks)]
    return "\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *cores, "intr 1 2 3"]) + "\n"


def test_own_work_and_other_cores_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0, 1.0]
    file = _stat(tmp_path, monkeypatch, clock)
    file.write_text(_lines(1000, 2000, 3000))
    seen = neighbours.Neighbours()
    clock[:] = [14.0, 4.0]  # 4 s on two cores, of which 3 are this process's
    file.write_text(_lines(1000 + 300, 2000 + 200, 3000 + 400))
    assert seen.share() == pytest.approx((3.0 + 2.0 - 3.0) / 8.0)
    clock[:] = [14.0, 4.0]
    file.write_text(_lines(1000 + 300, 2000, 3000 + 400))
    assert seen.share() == 0.0, "all work was this process's"


def test_without_counters_nobody_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0, 1.0]
    _stat(tmp_path, monkeypatch, clock)
    seen = neighbours.Neighbours()
    clock[0] = 11.0
    assert seen.share() == 0.0


def test_the_share_of_this_moment() -> None:
    assert 0.0 <= neighbours.share_now() <= 1.0
