"""What a job says of itself while it runs."""

from __future__ import annotations

import random

import pytest

import forebay.commands.job_progress as job_progress
from forebay.commands.job_progress import JobProgress, left_time_s, progress_note
from forebay.runtime.run.progress import WorkDone


def test_without_answers_that_stop_the_rest_is_known() -> None:
    work = WorkDone(tokens=100, ended=3, left=300)
    assert left_time_s(work, 10, 20.0) == pytest.approx(60.0)
    assert progress_note(work, 10, 20.0) == "3/10 answers, 5.00 tokens/s, about 1:00 left"
    begun = WorkDone(left=400)
    assert left_time_s(begun, 10, 20.0) is None and "left" not in progress_note(begun, 10, 20.0)
    assert left_time_s(WorkDone(tokens=100, ended=10), 10, 20.0) == 0.0
    assert progress_note(WorkDone(tokens=1, left=9999), 2, 1.0).endswith("about 2:46:39 left")
    drafted = WorkDone(prefills=2, decodes=8, tokens=30, ended=1, left=1, offered=30, accepted=20)
    assert progress_note(drafted, 2, 3.0).startswith("1/2 answers, 10.00 tokens/s, 3.00 tokens per pass, ")


@pytest.mark.parametrize("chance", [0.02, 0.2])
def test_answers_that_stop_by_themselves_are_foreseen(chance: float) -> None:
    """Half way through a simulated job in 16 slots, though the long answers have not ended; to an eighth."""
    draw, count, most = random.Random(1), 4000, 60
    lengths = [next((n for n in range(1, most) if draw.random() < chance), most) for _ in range(count)]
    work, waiting, running = WorkDone(left=count * most), list(enumerate(lengths)), dict[int, list[int]]()
    steps = half = 0
    estimate = 0.0
    while waiting or running:
        while waiting and len(running) < 16:
            number, length = waiting.pop()
            running[number] = [0, length]
        steps += 1
        for number, state in list(running.items()):
            state[0] += 1
            work.tokens, work.left = work.tokens + 1, work.left - 1
            if state[0] == state[1]:
                work.stopped += state[1] < most
                work.left, work.ended = work.left - (most - state[1]), work.ended + 1
                del running[number]
        if not half and work.ended >= count / 2:
            half, estimate = steps, left_time_s(work, count, float(steps)) or 0.0
    assert work.left == 0 and estimate == pytest.approx(steps - half, rel=1 / 8)


def test_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(job_progress.time, "monotonic", lambda: now)
    with JobProgress(10) as progress:
        for second in range(1, 100):
            now = float(second)
            progress.show(WorkDone(tokens=second, ended=second // 10, left=200 - second))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and said[0] == "3/10 answers, 1.00 tokens/s, about 2:50 left"
