"""Gather weights as soon as there is room for them."""

from __future__ import annotations

from typing import Any

from forebay.rewriter.ir.draft import Arrive, Draft, Exchanged, Fetch, Free
from forebay.rewriter.ir.gathers import GATHER_BUFFER
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import COLLECT, Launch, Release, Span


def hoist_gathers(draft: Draft, plan: Plan) -> None:
    """Move every gather of a weight up to where what its memory held before was read last, with what fetches a rank's
    part of it: it runs beside the products between. They keep their order, and the moves of a step theirs. PlanError
    where that memory is too small for what one operator needs at once."""
    if plan.schedule.batching.gathering.buffers:
        draft.items = _Hoisted(draft).items()


class _Hoisted:
    """The items of a draft with gathers where they may begin."""

    def __init__(self, draft: Draft) -> None:
        self.given = list[Any](draft.items)
        self.released = {item.span.buffer: i for i, item in enumerate(self.given)
                         if type(item) is Release and _ahead(item.span)}
        self.first = {item.label: i for i, item in reversed(list(enumerate(self.given))) if type(item) is Exchanged}
        self.moved = {m.span.buffer: index for index, m in enumerate(draft.moves)}
        self.marks: dict[int, list[int]] = {}
        for i, item in enumerate(self.given):
            if type(item) in (Fetch, Arrive, Free):
                self.marks.setdefault(item.index, []).append(i)

    def items(self) -> list[Any]:
        items = self.given
        gathers = [i for i, item in enumerate(items)
                   if type(item) is Launch and item.stream == COLLECT and any(map(_ahead, item.writes))]
        groups = [self._group(i) for i in gathers]
        own = {i for group in groups for i in group}
        moves = [i for i, item in enumerate(items) if type(item) in (Fetch, Free) and i not in own]
        places: dict[int, list[int]] = {}  # behind an item, -1 for none, what is issued there
        held: list[tuple[Span, int]] = []  # what lies in the memory, and where it has been read
        at = -1
        for i, group in zip(gathers, groups, strict=True):
            launch = items[i]
            (span,) = launch.writes
            over = [each for each in held if _meet(each[0], span)]
            at = max([at, *(end for _, end in over)])
            if len(group) > 1:  # moves are issued in order
                at = max([at, *(move for move in moves if move < i)])
            if at > self.first[launch.label]:
                raise PlanError(f"plan.schedule.batching.gathering.buffers: {launch.label} is read while what lies in "
                                "its memory before it is; plan again")
            held = [each for each in held if each not in over] + [(span, self.released[span.buffer])]
            places.setdefault(at, []).extend(group)
        found = [items[i] for i in places.get(-1, ())]
        for i, item in enumerate(items):
            if i not in own:
                found.append(item)
            found += [items[j] for j in places.get(i, ())]
        return found

    def _group(self, i: int) -> list[int]:
        """A gather, and the marks of the move that brings its operand."""
        (read,) = self.given[i].reads
        index = self.moved.get(read.buffer)
        return [i] if index is None else sorted((*self.marks[index], i))


def _ahead(span: Span) -> bool:
    return span.buffer.startswith(f"{GATHER_BUFFER}:")


def _meet(one: Span, other: Span) -> bool:
    return one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes
