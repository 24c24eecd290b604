"""Let the host compute with what lies in its memory, caches and tables of experts: only operands and results cross."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from forebay.kernels.operator import HOST_KERNELS
from forebay.kernels.operators import EXPERTS, find
from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.ir.cache_layout import OPERANDS
from forebay.rewriter.ir.draft import Arrive, Draft, Evict, Fetch, Lookup, Mark, Move, Outgoing, Store
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import ATTEND, HOST, Item, Launch, Release, Span, TensorRef, span_of
from forebay.rewriter.ir.schedule.routed_fetch import OPERANDS as EXPERT_OPERANDS


def delegate_launches(draft: Draft, plan: Plan) -> None:
    """Move every launch that touches host memory to the host's own stream, over copies of its operands: a
    Store before it, and an Evict where the operand's memory is wanted back; a result comes back by a Fetch, issued one
    result ahead of its reader, so that the device computes for other micro-batches meanwhile. A draft without such
    launches is left as it is. ValueError where the plan's host memory is too small for a turn's operands."""
    if any(_touches_host(item, plan.in_place) for item in draft.items):
        _Delegating(draft, plan).run()


def _touches_host(item: Item | Mark, in_place: Collection[str]) -> bool:
    """Return whether a launch touches host memory that the device does not reach."""
    return type(item) is Launch and any(
        s.arena == HOST and s.buffer not in in_place for s in (*item.reads, *item.writes))


@dataclass
class _Delegating:
    draft: Draft
    plan: Plan
    items: list[Item | Mark] = field(default_factory=list)
    leaving: list[tuple[Span, int, list[Release]]] = field(default_factory=list)  # operands on their way down
    results: list[tuple[int, str]] = field(default_factory=list)  # moves, and the buffers that they fill, in order
    arrived: int = 0  # results that have been read
    fetched: int = 0  # results on their way up
    used: dict[str, int] = field(default_factory=dict)  # bytes of the host memory of the turn under way

    def run(self) -> None:
        in_place = self.plan.in_place
        for item in self.draft.items:
            if _touches_host(item, in_place):
                assert type(item) is Launch
                self._move(item)
            elif type(item) is Release and self._ends_leaving(item):
                pass
            else:
                if type(item) is Launch:
                    self._let_go(*item.writes)
                    self._arrive({s.buffer for s in item.reads})
                elif type(item) is Lookup:
                    self._let_go(item.span)
                self.items.append(item)
        self._let_go(*(span for span, _, _ in self.leaving))
        self.draft.items = self.items

    def _move(self, launch: Launch) -> None:
        """The launch on the host's stream."""
        operator = find(launch.op)
        turn = EXPERT_OPERANDS if operator is EXPERTS else (
            f"{OPERANDS}{launch.label.rpartition('@')[2] if '@' in launch.label else 0}")
        written = {(s.offset, s.buffer) for s in launch.writes}
        here: dict[TensorRef, TensorRef] = {}
        spans: dict[tuple[int, str], Span] = {}
        results = []
        for ref in dict.fromkeys(_refs((*launch.args, *launch.kwargs.values(), *launch.out))):
            if ref.arena == HOST:
                continue
            span = span_of(ref)
            home = spans[span.offset, span.buffer] = self._room(turn, launch.layer, span)
            here[ref] = TensorRef(HOST, home.offset, ref.dtype, ref.shape, ref.stride, home.buffer)
            if (span.offset, span.buffer) in written:
                results.append((home, span))
                continue
            number = len(self.draft.stores)
            self.draft.stores.append(Outgoing(f"operand of {launch.label}: {span.buffer}", span, home, keeps=True,
                                              layer=launch.layer))
            self.leaving.append((span, number, []))
            self.items.append(Store(number))

        def moved(given: tuple[Span, ...]) -> tuple[Span, ...]:
            return tuple(s if s.arena == HOST else spans[s.offset, s.buffer] for s in given)

        workspace = launch.workspace_nbytes if operator is None else operator.workspace_nbytes(launch, HOST_KERNELS)
        self.items.append(Launch(
            ATTEND, launch.op, _moved(launch.args, here), {k: _moved(v, here) for k, v in launch.kwargs.items()},
            _moved(launch.out, here), moved(launch.reads), moved(launch.writes), launch.label, launch.layer,
            launch.flops, workspace, launch.impl))
        for home, span in results:
            self.results.append((len(self.draft.moves), span.buffer))
            self.draft.moves.append(Move(f"result of {launch.label}", home, len(self.results) - 1, span, (0, 0),
                                         OPERANDS, launch.layer))
            self.used[turn] = 0  # the turn's last launch: the next one begins anew

    def _room(self, turn: str, layer: int, span: Span) -> Span:
        """Return the place of an operand or result in its turn's host memory."""
        b = next(b for b in self.plan.buffers if b.name == turn)
        at = self.used.get(turn, 0)
        self.used[turn] = at + aligned(span.nbytes)
        if self.used[turn] > b.nbytes:
            raise ValueError(f"delegate_launches: the operands of layer {layer} take more than {b.name} of {b.nbytes} "
                             "bytes")
        return Span(b.arena, b.offset + at, span.nbytes, f"{turn}:{layer}:{at}")

    def _ends_leaving(self, release: Release) -> bool:
        """Return whether contents end that are on their way down: they do once they have been read."""
        for span, _, releases in reversed(self.leaving):  # of what leaves twice, the later copy
            if span.buffer == release.span.buffer and span.arena == release.span.arena:
                releases.append(release)
                return True
        return False

    def _let_go(self, *written: Span) -> None:
        """Wait for what is on its way down from memory that is about to be written."""
        gone: list[tuple[Span, int, list[Release]]] = []
        staying: list[tuple[Span, int, list[Release]]] = []
        for entry in self.leaving:
            wide = [entry[0], *(release.span for release in entry[2])]
            (gone if any(_overlap(a, b) for a in wide for b in written) else staying).append(entry)
        self.leaving = staying
        self.items += [Evict(number) for _, number, _ in reversed(gone)]  # the last was copied behind the rest
        self.items += [release for _, _, releases in gone for release in releases]

    def _arrive(self, read: set[str]) -> None:
        """Bring the results up to the one that is read now, and the one behind it."""
        while self.arrived < len(self.results) and self.results[self.arrived][1] in read:
            self._fetch(self.arrived + 2)
            self.items.append(Arrive(self.results[self.arrived][0]))
            self.arrived += 1

    def _fetch(self, count: int) -> None:
        while self.fetched < min(count, len(self.results)):
            index = self.results[self.fetched][0]
            self._let_go(self.draft.moves[index].span)
            self.items.append(Fetch(index))
            self.fetched += 1


def _refs(values: tuple) -> list[TensorRef]:
    return [ref for v in values for ref in (
        [v] if isinstance(v, TensorRef) else _refs(tuple(v)) if isinstance(v, tuple | list) else [])]


def _moved(value: Any, here: dict[TensorRef, TensorRef]) -> Any:
    if isinstance(value, TensorRef):
        return here.get(value, value)
    return tuple(_moved(v, here) for v in value) if isinstance(value, tuple | list) else value


def _overlap(a: Span, b: Span) -> bool:
    return a.arena == b.arena and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
