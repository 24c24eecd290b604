"""Prediction of ranks that wait for each other: each one's thread as `virtual_threads` has it, and exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forebay.rewriter.ir.program import COLLECT, Launch, Program
from forebay.rewriter.ir.share import ranks_of
from forebay.runtime.devices.virtual import CostOf, TimedSpan
from forebay.runtime.devices.virtual_threads import (
    _COPY,
    _RECORD,
    _WAIT_HERE,
    _WAIT_THERE,
    _prepared,
    _QueueMark,
    _StreamClock,
)


def run_ranks(
    programs: Sequence[Program], costs: Sequence[CostOf], steps: int, between_s: Sequence[float],
    overlap_penalty: float = 0.0,
) -> list[tuple[list[float], list[TimedSpan]]]:
    """Run the Programs of all ranks like `run_on_threads`: when each rank's first step began and each step ended, and
    its spans. An exchange begins once all that take part have posted it and are done with those that they posted
    before, and ends for all at once; who waits for it goes on reading, and who computes meanwhile takes
    `overlap_penalty` of the time longer. ValueError where ranks would wait for each other for ever."""
    board = _Board([_exchanges(program) for program in programs])
    clocks = [_RankClock(rank, board, overlap_penalty) for rank in range(len(programs))]
    running = [clock.all_steps(program, cost, steps, rest)
               for clock, program, cost, rest in zip(clocks, programs, costs, between_s, strict=True)]
    ended = [False] * len(running)
    before = None
    while not all(ended):
        for rank, run in enumerate(running):
            ended[rank] = ended[rank] or next(run, "end") == "end"
        reached = board.reached()
        if before == reached and not all(ended):
            raise ValueError("ranks wait for each other: their Programs do not exchange alike")
        before = reached
    return [(clock.ends, clock.spans) for clock in clocks]


def _exchanges(program: Program) -> list[tuple[int, ...]]:
    return [ranks_of(item.args[-1]) for item in program.step if type(item) is Launch and item.stream == COLLECT]


class _Board:
    """Times at which ranks posted each exchange, and at which exchanges that all ranks posted ended."""

    def __init__(self, groups: Sequence[Sequence[tuple[int, ...]]]) -> None:
        self.groups = groups
        self.posted: list[list[tuple[float, float]]] = [[] for _ in groups]  # when, and what it takes
        self.begun: list[list[float]] = [[] for _ in groups]
        self.ended: list[list[float]] = [[] for _ in groups]

    def end_of(self, rank: int, count: int) -> float | None:
        """Return the time at which the rank's first `count` exchanges have ended; None while another rank has not come
        to one of them."""
        while len(self.ended[rank]) < count:
            if not self.settle():
                return None
        return self.ended[rank][count - 1] if count else 0.0

    def settle(self) -> bool:
        """End what all have posted; whether there was any."""
        found = False
        for rank in range(len(self.groups)):
            while (group := self._next(rank)) and all(self._next(other) == group for other in group):
                posts = [self.posted[other][len(self.ended[other])] for other in group]
                begin = max(max(at, self.ended[other][-1] if self.ended[other] else 0.0)
                            for other, (at, _) in zip(group, posts, strict=True))
                for other in group:
                    self.begun[other].append(begin)
                    self.ended[other].append(begin + max(time_s for _, time_s in posts))
                found = True
        return found

    def reached(self) -> list[tuple[int, int]]:
        """Return how many exchanges each rank has posted, and how many of them have ended."""
        return [(len(posted), len(ended)) for posted, ended in zip(self.posted, self.ended, strict=True)]

    def _next(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's first exchange that has not ended; none while it is not posted."""
        at = len(self.ended[rank])
        return self.groups[rank][at % len(self.groups[rank])] if at < len(self.posted[rank]) else ()


class _RankClock(_StreamClock):
    """The time of a rank. Exchanges stand on the board, not in a queue."""

    def __init__(self, rank: int, board: _Board, overlap_penalty: float) -> None:
        super().__init__()
        self.rank, self.board, self.overlap_penalty, self.ends = rank, board, overlap_penalty, list[float]()
        self.met = 0  # exchanges that were waited for
        self.behind: dict[int, int] = {}  # by events: exchanges that were posted before their latest record

    @property
    def posted(self) -> int:
        return len(self.board.posted[self.rank])

    def all_steps(self, program: Program, cost: CostOf, steps: int, between_s: float) -> Iterator[None]:
        """Run them; stops while another rank has to come first."""
        prologue, step = (_prepared(items, cost, self) for items in (program.prologue, program.step))
        self.run(prologue)
        self.ends.append(self.now)
        collect = self.queue_of(COLLECT)
        for _ in range(steps):
            for item in step:
                kind = item[0]
                if kind == _COPY and item[1] is collect:
                    self.board.posted[self.rank].append((self.now, item[3]))
                elif kind == _RECORD and item[1] is collect:
                    self.behind[item[2]] = self.posted
                    self.marks[item[2]] = _QueueMark()
                elif kind == _WAIT_THERE and item[1] is collect:
                    self.run([(_WAIT_HERE, item[2])])
                elif kind in (_WAIT_HERE, _WAIT_THERE) and item[-1] in self.behind:
                    yield from self._met(item[-1])
                else:
                    if kind == _RECORD:
                        self.behind.pop(item[2], None)
                    self.run([item])
            self.compute(between_s, 1.0, 1.0)
            self.ends.append(self.now)

    def _met(self, event: int) -> Iterator[None]:
        """Let time pass until the exchanges before the event's record have ended."""
        while (end := self.board.end_of(self.rank, self.behind[event])) is None:
            yield
        spans = [board[self.rank][self.met : self.behind[event]] for board in (self.board.begun, self.board.ended)]
        beside_s = sum(max(0.0, min(self.now, ended) - begun) for begun, ended in zip(*spans, strict=True))
        self.met = max(self.met, self.behind[event])
        end = max(self.now, end) + self.overlap_penalty * beside_s
        self.spans.append((COLLECT, f"until event {event}", self.now, end))
        while self.now < end:
            if not self.elapse(end - self.now, 1.0):
                self.now = end
        self.marks[event].passed, self.fronts = True, None
