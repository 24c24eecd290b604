"""A server's metrics, as text for Prometheus (its text-based exposition format, version 0.0.4)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts of times up to each of `BOUNDS_S`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def note(self, time_s: float) -> None:
        with self._lock:
            self._counts[next((i for i, bound in enumerate(BOUNDS_S) if time_s <= bound), len(BOUNDS_S))] += 1
            self._sum_s += time_s

    def lines(self, name: str) -> list[str]:
        with self._lock:
            counts, sum_s = list(self._counts), self._sum_s
        found, total = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {sum_s:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counters and times of a server; noted from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: Counter[tuple[str, int]] = Counter()
        self._ends: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        self._drafted: Counter[str] = Counter()
        self._step_s: Counter[str] = Counter()
        self.queued_s, self.first_s, self.token_s = Histogram(), Histogram(), Histogram()

    def responded(self, path: str, status: int) -> None:
        with self._lock:
            self._responses[path, status] += 1

    def ended(self, how: str, prompt_tokens: int, new_tokens: int, cached_tokens: int = 0) -> None:
        with self._lock:
            self._ends[how] += 1
            self._tokens["prompt"] += prompt_tokens
            self._tokens["cached"] += cached_tokens
            self._tokens["generated"] += new_tokens

    def steps(self, prefills: int, decodes: int, time_s: float) -> None:
        """A step that took `time_s`; one that computes prompts and decodes as well is a prefill."""
        kind = "prefill" if prefills else "decode"
        with self._lock:
            self._steps[kind] += prefills or decodes
            self._step_s[kind] += time_s  # type: ignore[assignment]

    def drafts(self, accepted: int, refused: int) -> None:
        with self._lock:
            self._drafted["accepted"] += accepted
            self._drafted["refused"] += refused

    def text(self, gauges: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
        """All of it, with `gauges`: by name their help and values by labels ("" or `tier="device"`)."""
        with self._lock:
            counters: dict[str, tuple[str, Mapping[str, float]]] = {
                "http_responses_total": ("Responses by path and status.", {
                    f'path="{path}",status="{status}"': n for (path, status), n in self._responses.items()}),
                "requests_ended_total": ("Requests by how they ended.",
                                         {f'how="{how}"': n for how, n in self._ends.items()}),
                "tokens_total": ("Tokens of prompts that entered, those of them that were known before, and tokens "
                                 "made.",
                                 {f'kind="{kind}"': n for kind, n in self._tokens.items()}),
                "steps_total": ("Steps of the model; those that compute prompts and decode as well are prefills.",
                                {f'kind="{kind}"': n for kind, n in self._steps.items()}),
                "drafted_tokens_total": ("Tokens that steps checked beside those that they computed anyway.",
                                         {f'kind="{kind}"': n for kind, n in self._drafted.items()}),
                "step_seconds_total": ("Time from one step's end, or from the end of idleness, to the next one's end.",
                                       {f'kind="{kind}"': n for kind, n in self._step_s.items()})}
        lines = []
        for kind, group in (("counter", counters), ("gauge", gauges)):
            for name, (what, values) in group.items():
                lines += [f"# HELP forebay_{name} {what}", f"# TYPE forebay_{name} {kind}"]
                lines += [f"forebay_{name}{{{labels}}} {value}" if labels else f"forebay_{name} {value}"
                          for labels, value in values.items()]
        for name, what, times in (
                ("queue_seconds", "Time until a request enters a place.", self.queued_s),
                ("time_to_first_token_seconds", "Time from arrival to the first token.", self.first_s),
                ("time_per_output_token_seconds", "Mean time between the tokens of an answer.", self.token_s)):
            lines += [f"# HELP forebay_{name} {what}", f"# TYPE forebay_{name} histogram",
                      *times.lines(f"forebay_{name}")]
        return "\n".join(lines) + "\n"
