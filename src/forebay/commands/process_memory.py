"""The measured memory and reads of the process: anonymous memory, pages in the page cache, bytes fetched from disk.

The promise of a budget is one inequality, in which a GPU's memory has no part:

    anonymous memory + pages of the model's files in the page cache  <=  budget + constant
    constant = what the process holds before the budget is touched, measured there once,
               + THREADS_NBYTES + CALL_NBYTES per call of the plan's Programs
               + PROMPT_NBYTES per prompt + TOKEN_NBYTES per token of them, for a job
               + LOGIT_NBYTES per word of the vocabulary, where tokens are drawn
               + TRACE_NBYTES for a job that is traced
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from forebay.runtime.disk.page_cache import resident_nbytes

if TYPE_CHECKING:
    from forebay.rewriter.ir.plan import Plan
    from forebay.rewriter.pipeline.step_pipeline import Pipeline

THREADS_NBYTES = 8 << 20  # stacks and heaps of the threads that read, write and compute, edges of reads, Python's slack
CALL_NBYTES = 3 << 10  # a launch, copy or wait made ready: Python objects, tensors over the arena; 1.2 KiB were seen
PROMPT_NBYTES, TOKEN_NBYTES = 1 << 10, 8  # a prompt as a tensor, and its place among the answered
LOGIT_NBYTES = 120  # of one row at a time: float64, sorted and summed; 88 were seen


def beside_nbytes(calls: int, prompts: int = 0, tokens: int = 0, drawn_from: int = 0, *, traced: bool = False) -> int:
    """The part of the promise's constant that is known beforehand: of a plan whose Programs have so many `calls`, a job
    of so many prompts and tokens, and draws from a vocabulary of `drawn_from` (0: none are made); `traced` or not."""
    from forebay.runtime.run.trace import TRACE_NBYTES

    return (THREADS_NBYTES + CALL_NBYTES * calls + PROMPT_NBYTES * prompts + TOKEN_NBYTES * tokens
            + LOGIT_NBYTES * drawn_from + TRACE_NBYTES * traced)


def calls_of(pipeline: Pipeline, plan: Plan) -> int:
    """About how many launches, copies and waits all Programs of `plan` have: those of a chunk of the prompts as many as
    of the largest, and those of steps that check drafts as many as of a decode step."""
    s, growth = plan.schedule, pipeline.growth(plan)
    prefill, decode = pipeline.program(plan, s.prefill_chunk), pipeline.program(plan, 1)
    programs = [*[decode] * (1 + len(s.speculative_steps)), *[prefill] * len(s.prefill_chunks),
                *filter(None, [growth])]
    return sum(len(program.prologue) + len(program.step) for program in programs)


class MemoryWatch:
    """Samples this process's anonymous memory, and the pages of `files` in the page cache, from a thread.

    `before` is the anonymous memory at the start; `peak` and `cached_peak` are the most seen, all in bytes. `samples`
    are (seconds since the start, bytes of both together): every other one is dropped when MOST_SAMPLES are there.
    """

    PERIOD_S, MOST_SAMPLES = 0.05, 2048

    def __init__(self, files: Iterable[str]) -> None:
        self.files = tuple(files)
        self.before = self.peak = anonymous_nbytes()
        self.cached_peak = 0
        self.samples: list[tuple[float, int]] = []
        self._began, self._every, self._seen = time.monotonic(), 1, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch", daemon=True)

    def _watch(self) -> None:
        while not self._end.wait(self.PERIOD_S):
            self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(OSError):  # too many open files, say: what cannot be looked at is not counted
            anonymous, cached = anonymous_nbytes(), sum(resident_nbytes(path) for path in self.files)
            self.peak, self.cached_peak = max(self.peak, anonymous), max(self.cached_peak, cached)
            self._keep(anonymous + cached)

    def _keep(self, nbytes: int) -> None:
        if self._seen % self._every == 0:
            self.samples.append((time.monotonic() - self._began, nbytes))
        self._seen += 1
        if len(self.samples) == self.MOST_SAMPLES:
            self.samples, self._every = self.samples[::2], 2 * self._every

    def __enter__(self) -> MemoryWatch:
        with contextlib.suppress(RuntimeError):  # the system gives no more threads: what is seen at the end counts
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._sample()


def anonymous_nbytes() -> int:
    """Anonymous memory of this process that is in RAM: heap and arenas, without mapped files (Linux's RssAnon)."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def disk_read_nbytes() -> int:
    """Bytes this process has fetched from storage so far (not from the page cache); 0 where the system hides it."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("read_bytes:")), 0)
    except OSError:
        return 0
