"""One profile is kept per environment, made by one process at a time; a poor one is measured again when it is quiet."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forebay.rewriter.machine.profile import Machine, load_machine, save_machine
from forebay.runtime.measure import kept
from forebay.runtime.measure import machine as measuring
from forebay.runtime.measure.kept import cached_machine, kept_machine, machine_cache_path

POOR = dataclasses.replace(Machine.default(), guessed=("link disk to device by direct (R2 0.30)",))
GOOD = dataclasses.replace(Machine.default(), name="good")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """Profiles that measuring gives, one after the other; those that are left were not asked for."""
    found: list[Machine] = []
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "measure_machine", lambda *_, **__: found.pop(0))
    monkeypatch.setattr(kept, "share_now", lambda: 0.0)
    return found


def test_a_good_profile_is_measured_once(measured: list[Machine], tmp_path: Path) -> None:
    measured += [GOOD, POOR]
    assert kept_machine(tmp_path) is None
    assert cached_machine(tmp_path) == cached_machine(tmp_path) == kept_machine(tmp_path) == GOOD
    assert load_machine(machine_cache_path(tmp_path)) == GOOD and measured == [POOR]
    machine_cache_path(tmp_path).write_text("{")
    assert cached_machine(tmp_path) == POOR, "what cannot be read is measured anew"


def test_two_environments_have_a_profile_each(
    measured: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured += [GOOD, Machine.default()]
    first = machine_cache_path(tmp_path)
    cached_machine(tmp_path)
    with monkeypatch.context() as other:
        other.setattr(measuring, "versions", lambda: {"torch": "other"})
        assert machine_cache_path(tmp_path) != first and kept_machine(tmp_path) is None
        assert cached_machine(tmp_path) == Machine.default()
    assert cached_machine(tmp_path) == GOOD and not measured, "the other environment left it alone"
    for name, value in (("core_count", 99), ("versions", {})):
        with monkeypatch.context() as other:
            other.setattr(measuring, name, lambda value=value: value)
            assert machine_cache_path(tmp_path) != first
    with monkeypatch.context() as other:
        other.setattr(kept, "memory_limit_nbytes", lambda: 1 << 30)
        assert machine_cache_path(tmp_path) != first, "what a container has is not what its machine has"
    monkeypatch.setattr("torch.get_num_threads", lambda: 99)
    assert machine_cache_path(tmp_path) != first


def test_a_poor_profile_is_measured_again_and_says_so(
    measured: list[Machine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured += [POOR, POOR, GOOD]
    assert cached_machine(tmp_path) == POOR
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and "rest in part on a guess" in caplog.text
    assert "R2 0.30" not in caplog.text, "which is for who asks: `forebay machine`"
    assert cached_machine(tmp_path) == POOR and len(measured) == 2, "not at every command"
    _an_hour_later(tmp_path)
    assert cached_machine(tmp_path) == POOR and len(measured) == 1
    assert cached_machine(tmp_path) == POOR and len(measured) == 1, "an hour from the last try"
    _an_hour_later(tmp_path)
    assert cached_machine(tmp_path) == GOOD == kept_machine(tmp_path)
    _an_hour_later(tmp_path)
    assert cached_machine(tmp_path) == GOOD, "a good one stays for good"


def test_what_was_timed_beside_others_is_measured_again(measured: list[Machine], tmp_path: Path) -> None:
    beside = dataclasses.replace(Machine.default(), others_share=0.3)
    measured += [beside, GOOD]
    assert cached_machine(tmp_path) == cached_machine(tmp_path) == beside
    _an_hour_later(tmp_path)
    assert cached_machine(tmp_path) == GOOD


def _an_hour_later(folder: Path) -> None:
    """As far as the kept profile tells: it is an hour older."""
    path = machine_cache_path(folder)
    old = path.stat().st_mtime - kept.AGAIN_S - 1
    os.utime(path, (old, old))


def test_on_a_busy_machine_a_poor_profile_waits(
    measured: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured += [POOR, GOOD]
    cached_machine(tmp_path)
    _an_hour_later(tmp_path)
    caplog.clear()
    looked: list[float] = []
    monkeypatch.setattr(kept, "share_now", lambda: looked.append(0.4) or 0.4)
    assert cached_machine(tmp_path) == cached_machine(tmp_path) == POOR and measured == [GOOD]
    assert len(caplog.records) == 1 and "40 %" in caplog.text
    assert len(looked) == 1, "the next command neither sleeps to look nor says it again"
    _an_hour_later(tmp_path)
    monkeypatch.setattr(kept, "share_now", lambda: 0.0)
    assert cached_machine(tmp_path) == GOOD


def test_the_profile_with_fewer_guesses_stays(measured: list[Machine], tmp_path: Path) -> None:
    worse = dataclasses.replace(POOR, guessed=(*POOR.guessed, "attention of float32 (R2 0.10)"))
    measured += [POOR, worse]
    cached_machine(tmp_path)
    _an_hour_later(tmp_path)
    assert cached_machine(tmp_path) == POOR == kept_machine(tmp_path)
    assert not measured


def test_measuring_anew_replaces_what_is_kept(measured: list[Machine], tmp_path: Path) -> None:
    measured += [GOOD, Machine.default()]
    cached_machine(tmp_path)
    assert cached_machine(tmp_path, anew=True) == Machine.default() == kept_machine(tmp_path)


def test_without_keeping_the_cache_stays_untouched(measured: list[Machine], tmp_path: Path) -> None:
    measured += [GOOD]
    assert cached_machine(tmp_path, keep=False) == GOOD and not (tmp_path / "cache").exists()


HOLD = """
import fcntl, sys
from forebay.kernels.build.cache_folder import locked
with locked("machine.lock"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_measures_and_the_others_take_its_profile(measured: list[Machine], tmp_path: Path) -> None:
    """The lock is another process's; when it lets go, what it left is taken, and nothing measured here."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    found: list[Machine] = []
    waiting = threading.Thread(target=lambda: found.append(cached_machine(tmp_path)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not found
    save_machine(GOOD, machine_cache_path(tmp_path))
    holder.stdin.close()
    waiting.join(60)
    assert holder.wait(60) == 0 and found == [GOOD]
