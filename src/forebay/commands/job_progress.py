"""How far a job is: answers, tokens a second, and about how long the rest takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from forebay.commands.terminal import progress_bar, say

if TYPE_CHECKING:
    from types import TracebackType

    from forebay.runtime.run.progress import WorkDone

SHOWN_S = 0.1  # between two notes on a terminal
SAID_S = 30.0  # between two lines where stderr is no terminal


class JobProgress:
    """A bar on a terminal, a line every `SAID_S` elsewhere, for a job of `total` answers that begins now."""

    def __init__(self, total: int) -> None:
        self.total, self.bar = total, progress_bar(remaining=False)
        self.task = self.bar.add_task("answering", total=total, note="")
        self.began = self.told = time.monotonic()

    def __enter__(self) -> JobProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def show(self, work: WorkDone) -> None:
        """Tell how far `work` is, if that was not told a moment ago."""
        now = time.monotonic()
        if now - self.told < (SAID_S if self.bar.disable else SHOWN_S):
            return
        self.told = now
        note = progress_note(work, self.total, now - self.began)
        self.bar.update(self.task, completed=work.ended, note=note)
        if self.bar.disable:
            say(note)


def progress_note(work: WorkDone, total: int, elapsed_s: float) -> str:
    """Answers, tokens a second, and the time that the rest takes as far as can be told."""
    left_s = left_time_s(work, total, elapsed_s)
    eta = "" if left_s is None else f", about {_hours(left_s)} left"
    passes = work.prefills + work.decodes
    pace = f", {work.tokens / passes:.2f} tokens per pass" if work.offered and passes else ""
    return f"{work.ended}/{total} answers, {work.tokens / elapsed_s:.2f} tokens/s{pace}{eta}"


def left_time_s(work: WorkDone, total: int, elapsed_s: float) -> float | None:
    """Seconds until all `total` answers have ended, at the tokens per second so far; None before the first token.

    Answers that stop by themselves are taken to do so with equal chance at each token, which is then the number of
    those that did over all tokens: so those that are under way count, though only short ones have ended.
    """
    count = total - work.ended
    if not work.tokens or not count:
        return None if count else 0.0
    chance, most = work.stopped / work.tokens, work.left / count
    each = (1 - (1 - chance) ** most) / chance if chance else most  # mean of a geometric distribution cut at `most`
    return count * each * elapsed_s / work.tokens


def _hours(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
