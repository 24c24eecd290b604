"""Make one launch of several that follow each other, on devices whose kernels can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from forebay.kernels.operator import Operator
from forebay.kernels.operators import LINEAR, LINEAR_Q, ROTARY, find
from forebay.rewriter.ir.draft import Arrive, Draft, Fetch, Free, Mark
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import COMPUTE, DEVICE, Item, Launch, Release, Span, TensorRef, span_of

EPILOGUE = ("activation", "multiplier", "residual")
LONGEST = 3  # launches of a group: no kernel takes more weights


def join_launches(draft: Draft, plan: Plan, joins: bool, counted: Callable[[Launch], Launch]) -> None:
    """Make one launch of products of one operand by several weights, one of a gate and what it multiplies, and one of
    queries and keys that are turned and keys and values that are appended, where they follow each other.

    A product is joined where `plan.gemm` has the shape of all columns together. Copies that come between are issued
    before the launch, memory is given back after it. Of weights that stream, at most half of `plan.schedule.lead` are
    joined: as many others are still on their way then.

    Args:
        draft: The step.
        plan: Its plan.
        joins: Whether kernels of the device take such launches; otherwise the draft is left as it is.
        counted: Adds to a launch what it takes outside the arenas on the device.
    """
    if joins:
        draft.items = list(_Joining(draft, plan, counted).run())


class _LaunchRun(NamedTuple):
    """Launches that follow each other, with the marks among them."""

    launches: tuple[Launch, ...]
    before: tuple[Item | Mark, ...]  # marks that may stand before all of them
    after: tuple[Item | Mark, ...]  # those that may stand after them
    end: int  # of the items that it is made of

    @property
    def released(self) -> tuple[Span, ...]:
        return tuple(mark.span for mark in self.after if type(mark) is Release)


class _Joining:
    def __init__(self, draft: Draft, plan: Plan, counted: Callable[[Launch], Launch]) -> None:
        self.items, self.counted, self.lead = draft.items, counted, plan.schedule.lead
        self.impls = {(c.dtype, c.m, c.n, c.k): c.impl for c in plan.gemm}
        self.resident = draft.resident

    def run(self) -> Iterator[Item | Mark]:
        at = 0
        while at < len(self.items):
            group, joined, gone = self._joined(at)
            if joined is None:
                yield self.items[at]
                at += 1
                continue
            yield from group.before
            yield self.counted(joined)
            yield from (mark for mark in group.after if type(mark) is not Release or mark.span.buffer not in gone)
            at = group.end

    def _joined(self, at: int) -> tuple[_LaunchRun, Launch | None, frozenset[str]]:
        """The longest group from `at` on that one launch can take, that launch, and the buffers whose contents nobody
        writes any more."""
        longest = self._group(at)
        for count in range(len(longest.launches), 1, -1):
            group = self._group(at, count)
            joined = self._apart(group) or self._gated(group) or self._turned(group)
            if joined is None:
                continue
            kept = {ref.buffer for ref in joined.out}
            gone = frozenset(ref.buffer for launch in group.launches for ref in launch.out) - kept
            if gone <= {span.buffer for span in group.released} and _is_sound(group, joined):
                return group, joined, gone
        return longest, None, frozenset()

    def _group(self, at: int, count: int = LONGEST) -> _LaunchRun:
        """The group of at most so many launches from `at` on; memory that is given back after it is part of it."""
        launches: list[Launch] = []
        marks: tuple[list[Item | Mark], list[Item | Mark]] = [], []
        place = at
        for place in range(at, len(self.items)):
            item = self.items[place]
            kind = type(item)
            if kind is Launch:
                if len(launches) == count or not _is_on_device(item):  # type: ignore[arg-type]
                    break
                launches.append(item)  # type: ignore[arg-type]
            elif not launches or kind not in (Release, Free, Fetch, Arrive) or (
                    len(launches) == count and kind in (Fetch, Arrive)):
                break
            else:
                marks[kind in (Release, Free)].append(item)
        else:
            place = len(self.items)
        return _LaunchRun(tuple(launches), tuple(marks[0]), tuple(marks[1]), place)

    # -- products

    def _apart(self, group: _LaunchRun) -> Launch | None:
        """Products of one x, each with a result."""
        if any(len(launch.out) != 1 or any(map(launch.kwargs.get, EPILOGUE)) for launch in group.launches):
            return None
        return self._product(group, group.launches[0].kwargs, tuple(launch.out[0] for launch in group.launches))

    def _gated(self, group: _LaunchRun) -> Launch | None:
        """A product that is activated, and the next one that it multiplies."""
        if len(group.launches) != 2 or any(len(launch.out) != 1 for launch in group.launches):
            return None
        gate, product = group.launches
        after = {name: product.kwargs[name] for name in EPILOGUE if product.kwargs.get(name)}
        if not gate.kwargs.get("activation") or after != {"multiplier": gate.out[0]} or (
                gate.kwargs.get("multiplier") or gate.kwargs.get("residual")):
            return None
        return self._product(group, gate.kwargs, product.out)

    def _product(self, group: _LaunchRun, kwargs: dict[str, Any], out: tuple[TensorRef, ...]) -> Launch | None:
        first, *others = group.launches
        operator = find(first.op)
        if operator not in (LINEAR, LINEAR_Q) or any(find(other.op) is not operator for other in others):
            return None
        weights, biases = (tuple(launch.args[i] for launch in group.launches) for i in (1, 2))
        alike = {(launch.args[0], launch.args[1].dtype, launch.args[1].shape[1], launch.args[1].stride,
                  launch.args[2] is None or launch.args[2].dtype, *_without_epilogue(launch))
                 for launch in group.launches}
        if len(alike) > 1 or kwargs.get("accumulate") or kwargs.get("form", "nk") != "nk" or (
                len(out) == 1 and weights[0].shape != weights[1].shape):
            return None
        streaming = sum(weight.buffer not in self.resident for weight in weights)
        if 2 * streaming > self.lead:
            return None
        return self._with_impl(_one(group, operator, (first.args[0], weights, biases), kwargs, out))

    def _with_impl(self, launch: Launch) -> Launch | None:
        choice = find(launch.op).implementations  # type: ignore[union-attr]
        assert choice is not None
        impl = self.impls.get(choice.shape(launch), "")
        return replace(launch, impl=impl) if impl and choice.joins(impl) else None

    # -- rotary position embedding

    def _turned(self, group: _LaunchRun) -> Launch | None:
        """Queries and keys that are turned, and an append of these keys."""
        *turns, append = group.launches
        operator = find(append.op)
        if len(turns) != 2 or any(find(turn.op) is not ROTARY for turn in turns) or operator is None or (
                not operator.appends or append.kwargs or append.out or turns[0].args[1:] != turns[1].args[1:]):
            return None
        place = operator.arguments.index("k") if "k" in operator.arguments else -1
        keys = [turn for turn in turns if turn.out[0] == append.args[place]]
        if place < 0 or len(keys) != 1:
            return None
        (queries,) = (turn for turn in turns if turn is not keys[0])
        args = (*append.args[:place], keys[0].args[0], *append.args[place + 1 :])
        q, cos, sin = queries.args
        joined = _one(group, operator, args, {"q": q, "cos": cos, "sin": sin}, queries.out)
        return joined if operator.takes_rotary(joined) else None


def _one(
    group: _LaunchRun, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: tuple[TensorRef, ...]
) -> Launch:
    """A launch in the place of a group: what one of them wrote for another is neither read nor written."""
    first, *others = group.launches
    given = {span_of(ref) for launch in group.launches for ref in launch.out} & {s for k in others for s in k.reads}
    reads = tuple(dict.fromkeys(span for k in group.launches for span in k.reads if span not in given))
    results = given - {span_of(ref) for ref in out}
    writes = tuple(dict.fromkeys(span for k in group.launches for span in k.writes if span not in results))
    launch = Launch(COMPUTE, operator.name, args, kwargs, out, reads, writes,
                    "+".join(launch.label for launch in group.launches), first.layer)
    return replace(launch, flops=operator.cost(launch).flops)


def _is_sound(group: _LaunchRun, joined: Launch) -> bool:
    """Return whether the launch writes nothing that it reads, but what one of the group wrote in place, nor memory that
    is given back after it and was given back before it was written."""
    written_in_place = {span for launch in group.launches for span in launch.writes if span in launch.reads}
    fresh = [span for span in joined.writes if span not in written_in_place]
    others = [span for span in joined.reads if span not in written_in_place]
    kept = [span for span in group.released if span.buffer not in {s.buffer for s in fresh}]
    return not any(_meet(a, b) for i, a in enumerate(fresh) for b in (*fresh[i + 1 :], *others, *kept))


def _without_epilogue(launch: Launch) -> tuple[Any, ...]:
    return tuple(sorted((name, value) for name, value in launch.kwargs.items() if name not in EPILOGUE))


def _is_on_device(launch: Launch) -> bool:
    return launch.stream == COMPUTE and all(span.arena == DEVICE for span in (*launch.reads, *launch.writes))


def _meet(a: Span, b: Span) -> bool:
    return a.arena == b.arena and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
