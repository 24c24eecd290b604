"""A job that dies or hangs costs its own answer and no other's."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "isolated.py"
# By its path: in this suite the name `benchmarks` is the folder of this test.
spec = importlib.util.spec_from_file_location("isolated", FILE)
assert spec is not None and spec.loader is not None
isolated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(isolated)

JOBS = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from isolated import serve

def run(number):
    print("jobs may print")
    if number == 1 and os.environ.get("RANK") != "0":
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 2:
        time.sleep(60)
    if number == 3:
        return {"failed": "faulted", "lost": True}
    if number == 4:
        return {"failed": "inexact"}
    return {"pid": os.getpid(), "number": number, "ranks": os.environ.get("WORLD_SIZE")}

serve(run, stalled_s=0.5)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolated, "START_S", 20.0)
    (tmp_path / "jobs.py").write_text(JOBS)
    made = isolated.IsolatedWorker([sys.executable, str(tmp_path / "jobs.py"), str(FILE.parent)])
    yield made
    made.close()


def test_the_jobs_after_a_crash_a_fault_and_a_hang_are_answered(worker) -> None:
    first = worker.ask(0, 5)
    assert worker.ask(1, 5) == {"failed": "its process ended with signal 11"}
    second = worker.ask(5, 5)
    assert worker.ask(3, 5) == {"failed": "faulted"}
    third = worker.ask(6, 5)
    assert worker.ask(2, 0.2) == {"failed": "no answer in 0 s"}
    fourth = worker.ask(7, 5)
    assert [a["number"] for a in (first, second, third, fourth)] == [0, 5, 6, 7]
    assert len({a["pid"] for a in (first, second, third, fourth)}) == 4


def test_a_job_that_hangs_says_where(worker, capfd: pytest.CaptureFixture[str]) -> None:
    worker.ask(0, 5)
    assert worker.ask(2, 1.5) == {"failed": "no answer in 2 s"}
    assert " in run\n" in capfd.readouterr().err


def test_a_failure_that_leaves_its_process_sound_keeps_it(worker) -> None:
    before = worker.ask(0, 5)["pid"]
    assert worker.ask(4, 5) == {"failed": "inexact"}
    assert worker.ask(0, 5)["pid"] == before


def test_a_process_that_ends_between_jobs_is_told(worker) -> None:
    os.kill(worker.ask(0, 5)["pid"], 9)
    assert worker.ask(0, 5) == {"failed": "its process ended with signal 9"}
    assert worker.ask(8, 5)["number"] == 8


def test_closing_leaves_no_process(worker) -> None:
    pid = worker.ask(0, 5)["pid"]
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_new_process_gets_no_more_time_than_is_left(worker) -> None:
    begin = time.monotonic()
    assert worker.ask(2, 0.2, 0.3) == {"failed": "no answer in 0 s"}
    assert time.monotonic() - begin < 15  # it would have 20 s to start in


def test_ranks_do_a_job_together_and_one_that_dies_takes_the_others_along(worker) -> None:
    ranks = isolated.IsolatedRanks(worker.command, 2)
    first = ranks.ask(0, 5)
    assert first["ranks"] == "2" and ranks.ask(5, 5)["pid"] == first["pid"]
    pids = [each.process.pid for each in ranks.workers]
    assert len({*pids}) == 2 and pids[0] == first["pid"]
    assert ranks.ask(1, 5)["failed"] == "rank 1: its process ended with signal 11"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert ranks.ask(3, 5)["failed"] == "rank 0: faulted; rank 1: faulted"
    assert ranks.ask(6, 5)["number"] == 6
    ranks.close()
