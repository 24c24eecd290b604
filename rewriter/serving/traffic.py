"""Requests as they arrive: Poisson, gamma or from a trace, of fixed or spread lengths; a seed gives the same again."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.rewriter.ir.files import read_input_text
from forebay.rewriter.ir.printable import PrintableError

MOST_TOKENS = 1 << 24  # of a prompt or an answer in a trace: beyond every model
LATEST_S = 1e12  # of a trace: beyond clocks that count from 1970


class TrafficError(PrintableError, ValueError):
    """Traffic that cannot be meant; the message names the field or the line, and what would do."""


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, tokens of its prompt, and tokens of its answer, the first from the prefill."""

    at_s: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Traffic:
    """`count` requests at `rate` per second; lengths are means.

    `arrival_cv` is the coefficient of variation of the time between two: 1 is Poisson, others are gamma. `length_cv`
    spreads prompts and answers (gamma, rounded, at least 1); 0 keeps them fixed. With `trace`, its arrivals come in
    its order, repeated until there are `count`, with the gaps scaled to `rate`; what arrives at once comes again as
    such a burst.
    """

    rate: float
    count: int
    prompt: int
    output: int
    arrival_cv: float = 1.0
    length_cv: float = 0.0
    trace: tuple[Arrival, ...] = ()

    def validate(self) -> None:
        for name, value in (("rate", self.rate), ("requests", self.count), ("isl", self.prompt), ("osl", self.output)):
            if not (math.isfinite(value) and value > 0):
                raise TrafficError(f"{name}: {value} is not above 0")
        for name, value in (("arrival_cv", self.arrival_cv), ("length_cv", self.length_cv)):
            if not (math.isfinite(value) and 0 <= value <= 100):
                raise TrafficError(f"{name}: {value} is not between 0 and 100")

    def at_rate(self, rate: float) -> Traffic:
        return replace(self, rate=rate)


def arrivals(traffic: Traffic, seed: int) -> list[Arrival]:
    """The requests of one run, in order of arrival; TrafficError for what cannot be meant.

    The same seed draws the same unit gaps and lengths at every rate, so that rates are compared on like traffic.
    """
    traffic.validate()
    if traffic.trace:
        return _replayed(traffic)
    gaps, lengths = random.Random(f"{seed} gaps"), random.Random(f"{seed} lengths")
    now, found = 0.0, []
    for _ in range(traffic.count):
        now += _gamma(gaps, traffic.arrival_cv) / traffic.rate
        found.append(Arrival(now, max(1, round(traffic.prompt * _gamma(lengths, traffic.length_cv))),
                             max(1, round(traffic.output * _gamma(lengths, traffic.length_cv)))))
    return found


def _gamma(source: random.Random, cv: float) -> float:
    """A positive number of mean 1 and this coefficient of variation."""
    if cv == 0:
        return 1.0
    return source.expovariate(1.0) if cv == 1 else source.gammavariate(cv ** -2, cv ** 2)


def _replayed(traffic: Traffic) -> list[Arrival]:
    trace = traffic.trace
    span = trace[-1].at_s - trace[0].at_s
    around = span * len(trace) / max(1, len(trace) - 1) or 1.0  # as far after the last as others are
    scale = len(trace) / around / traffic.rate
    return [replace(trace[i % len(trace)], at_s=scale * (trace[i % len(trace)].at_s - trace[0].at_s
                                                         + around * (i // len(trace))))
            for i in range(traffic.count)]


def read_trace(path: str | Path) -> tuple[Arrival, ...]:
    """Requests from a JSONL file, each line {"arrival": seconds, "prompt": tokens, "output": tokens}, sorted by time;
    TrafficError names the line and the field."""
    found = []
    for i, line in enumerate(read_input_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrafficError(f"{path}, line {i}: not JSON: {error}") from error
        if not isinstance(item, dict):
            raise TrafficError(f"{path}, line {i}: expected an object with arrival, prompt and output")
        at = _number(item.get("arrival"), 0.0, LATEST_S, f"{path}, line {i}: arrival")
        lengths = [_number(item.get(name), 1, MOST_TOKENS, f"{path}, line {i}: {name}")
                   for name in ("prompt", "output")]
        if any(tokens % 1 for tokens in lengths):
            raise TrafficError(f"{path}, line {i}: prompt and output are whole numbers of tokens, found {lengths}")
        found.append(Arrival(at, int(lengths[0]), int(lengths[1])))
    if not found:
        raise TrafficError(f"{path}: no requests; each line is {{\"arrival\": 0.5, \"prompt\": 512, \"output\": 64}}")
    return tuple(sorted(found, key=lambda a: a.at_s))


def _number(value: object, low: float, high: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise TrafficError(f"{where}: {value!r} is not a number from {low:g} to {high:g}")
    return float(value)


def mean_lengths(trace: Sequence[Arrival]) -> tuple[int, int]:
    """Mean tokens of prompts and answers, rounded, at least 1."""
    count = len(trace)
    return (max(1, round(sum(a.prompt for a in trace) / count)), max(1, round(sum(a.output for a in trace) / count)))
