"""Prediction of a machine without a GPU: the thread that issues also computes, beside reads and copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    LOAD,
    READS,
    UNORDERED,
    WRITE,
    Copy,
    Item,
    Launch,
    Program,
    Record,
    Wait,
)
from forebay.runtime.devices.virtual import CostOf, TimedSpan


class _Under:
    """A copy under way or queued: seconds it still takes alone, when it began, and if it writes a file, how many times
    as long it and reads take side by side."""

    __slots__ = ("both_ways", "label", "left", "start")

    def __init__(self, label: str, left: float, both_ways: tuple[float, float]) -> None:
        self.label, self.left, self.start, self.both_ways = label, left, -1.0, both_ways


class _QueueMark:
    """A record or, with `gate`, a wait in the queue of a stream: passed once it comes to the front (and `gate` was)."""

    __slots__ = ("gate", "passed")

    def __init__(self, gate: _QueueMark | None = None) -> None:
        self.gate, self.passed = gate, False


_Front = tuple["_Under", str, "_Queue", float]  # a copy under way, its stream, and how many times as long it takes
_Queue = deque["_Under | _QueueMark"]
_LAUNCH, _COPY, _RECORD, _WAIT_HERE, _WAIT_THERE = range(5)


def run_on_threads(
    program: Program, cost: CostOf, steps: int, between_s: float = 0.0, core_share: float = 0.0
) -> tuple[list[float], list[TimedSpan], float]:
    """Return when the first step began and each ended, all spans, and how long the cores alone make each step last,
    where nothing is issued while a launch computes, and what streams do to each other is counted: each launch is slowed
    by copies under way, and slows them, as its cost says. Each step ends with `between_s` seconds in which nothing is
    launched; where copies from or to disk take `core_share` of their time of the cores (0: unknown), what a step then
    lacks of what it asks of these passes at its end. Stops before `steps` once a step would begin as the one before it
    did: it would only take as long again.

    Copies stand in a queue per stream and progress as time passes, which only launches and waits let it do.
    """
    clock = _StreamClock()
    prologue, step = (_prepared(items, cost, clock) for items in (program.prologue, program.step))
    least_s = between_s + _of_cores_s(step, core_share) if core_share else 0.0
    clock.run(prologue)
    ends = [clock.now]
    before: object = None
    while len(ends) <= steps and before != (begins := clock.queued()):
        before = begins
        clock.run(step)
        clock.compute(between_s, 1.0, 1.0)
        clock.now = max(clock.now, ends[-1] + least_s)
        ends.append(clock.now)
    return ends, clock.spans, least_s


def _of_cores_s(step: list[tuple], core_share: float) -> float:
    """Seconds that a step takes of the time of all cores: launches theirs, copies from or to disk `core_share` of
    theirs, alone, and copies what issuing them takes."""
    return sum(item[2] if item[0] == _LAUNCH else item[5] + core_share * item[3] * item[7]
               for item in step if item[0] in (_LAUNCH, _COPY))


def _prepared(items: Iterable[Item], cost: CostOf, clock: _StreamClock) -> list[tuple]:
    """Prepare the effect of each item on the clock, with its cost and its stream's queue looked up: a step runs several
    times."""
    found: list[tuple] = []
    queue_of, add = clock.queue_of, found.append
    for item in items:
        kind = type(item)
        if kind is Launch:
            time_s, slowed, slows = cost(item)[:3]
            if item.stream != COMPUTE:  # type: ignore[union-attr]
                add((_COPY, queue_of(item.stream), item.label, time_s, 0.0, 0.0, (1.0, 1.0), False))  # type: ignore[union-attr]
                continue
            add((_LAUNCH, item.label, time_s, slowed, slows))  # type: ignore[union-attr]
        elif kind is Record:
            add((_RECORD, None if item.stream == COMPUTE else queue_of(item.stream), item.event))  # type: ignore[union-attr]
        elif kind is Wait:
            if item.stream == COMPUTE or item.stream in UNORDERED:  # the issuing thread waits
                add((_WAIT_HERE, item.event))  # type: ignore[union-attr]
            else:
                add((_WAIT_THERE, queue_of(item.stream), item.event))  # type: ignore[union-attr]
        elif kind is Copy:
            time_s, _, _, latency_s, issue_s, both_ways = cost(item)
            stream: str = item.stream  # type: ignore[union-attr]
            add((_COPY, queue_of(stream), item.label, time_s, latency_s, issue_s, both_ways, stream in UNORDERED))  # type: ignore[union-attr]
    return found


class _StreamClock:
    """The time, and what stands in the queues then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[TimedSpan] = []
        self.queues: dict[str, _Queue] = {}
        self.marks: dict[int, _QueueMark] = {}  # of the latest record of each event
        self.fronts: list[_Front] | None = None  # copies under way; None: look

    def queue_of(self, stream: str) -> _Queue:
        return self.queues.setdefault(stream, deque())

    def queued(self) -> list[list[float]]:
        """Return the remaining time of each queue's copies, to a nanosecond; -1 for marks."""
        return [[round(x.left, 9) if type(x) is _Under else -1.0 for x in queue] for queue in self.queues.values()]

    def run(self, items: list[tuple]) -> None:
        marks, note, compute = self.marks, self.spans.append, self.compute
        for item in items:
            kind = item[0]
            if kind == _LAUNCH:
                start = self.now
                compute(item[2], item[3], item[4])
                note((COMPUTE, item[1], start, self.now))
            elif kind == _RECORD:
                mark = marks[item[2]] = _QueueMark()
                if item[1]:
                    item[1].append(mark)
                else:
                    mark.passed, self.fronts = True, None
            elif kind == _WAIT_HERE:
                awaited = marks.get(item[1])
                while awaited is not None and not awaited.passed:
                    self.elapse(float("inf"), 1.0)
            elif kind == _COPY:
                _, queue, label, time_s, latency_s, issue_s, both_ways, _ = item
                if not queue:
                    self.fronts = None
                ahead = sum([type(x) is _Under for x in queue])
                queue.append(_Under(label, time_s + latency_s / (1 + ahead), both_ways))
                compute(issue_s, 1.0, 1.0)
            else:
                awaited = marks.get(item[2])
                if awaited is not None and not awaited.passed:
                    item[1].append(_QueueMark(awaited))

    def compute(self, left: float, slowed: float, slows: float) -> None:
        """The issuing thread is busy for `left` seconds, more where copies are under way."""
        while left > 0:
            span = self.elapse(left * slowed, slows)
            if not span:
                self.now += left
                return
            left -= span / slowed

    def elapse(self, most: float, slows: float) -> float:
        """Let at most `most` seconds pass, until a copy ends; 0 where none is under way."""
        fronts = self.fronts
        if fronts is None:
            fronts = self.fronts = _beside([
                (queue[0], stream, queue, 1.0) for stream, queue in self.queues.items()  # type: ignore[misc]
                if queue and (type(queue[0]) is _Under or _settled(queue))])
        if not fronts:
            return 0.0
        span = most
        for front, _, _, longer in fronts:
            if front.left * slows * longer < span:
                span = front.left * slows * longer
        begin = self.now
        end = self.now = begin + span
        passed = span / slows
        for front, stream, queue, longer in fronts:
            if front.start < 0:
                front.start = begin
            front.left -= passed / longer
            if front.left <= 1e-12:
                self.spans.append((stream, front.label, front.start, end))
                queue.popleft()
                _settled(queue)
                self.fronts = None
        return span if span > 0 else 1e-15


def _beside(fronts: list[_Front]) -> list[_Front]:
    """The copies under way, each as much slower as it is beside the others on the disk: streams that read it share its
    rate, lookups of a few rows aside, and reading and writing slow each other."""
    streams = {stream for _, stream, _, _ in fronts}
    writing = next((front.both_ways for front, stream, _, _ in fronts if stream == WRITE), None)
    if writing is None and not {DISK, LOAD} <= streams:
        return fronts
    sharing = len(streams & {DISK, LOAD})
    found = []
    for front, stream, queue, _ in fronts:
        longer = 1.0
        if stream == WRITE and streams & set(READS):
            longer = front.both_ways[0]
        elif stream in READS:
            longer = (writing[1] if writing else 1.0) * (sharing if stream in (DISK, LOAD) else 1)
        found.append((front, stream, queue, longer))
    return found


def _settled(queue: _Queue) -> bool:
    """Pass the marks at the front; whether a copy is there then."""
    while queue and isinstance(mark := queue[0], _QueueMark):
        if mark.gate is not None and not mark.gate.passed:
            return False
        mark.passed = True
        queue.popleft()
    return bool(queue)
