"""The virtual clock, and every order in which the streams of a small Program may run: all of them compute the same.

An item runs when what the list orders before it has run: the item before it on its stream, and for a Wait its Record.
Reads from the disk overtake each other; a Record on the disk stream stands behind all of them. Memory holds symbols:
which launch or which bytes of a file last wrote there, from what. A race shows as two orders with different outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Tiny, aten, chain, lowered, placements, plan_for, planned, tiny
from torch import fx

from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    DOWNLOAD,
    RETURN,
    UPLOAD,
    WRITE,
    Copy,
    FileSlice,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Span,
    TensorRef,
    Wait,
    span_of,
)
from forebay.rewriter.planning.options import Options
from forebay.rewriter.verify.items import copy_spans
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices.virtual import CostOf, ItemCost, VirtualDevice, run_on_streams
from forebay.runtime.devices.virtual_threads import run_on_threads

DEAD = "dead"  # what a Release leaves behind, as FOREBAY_POISON does


def issued(program: Program, steps: int) -> list[Item]:
    """Prologue and steps, with the caller's writes of inputs and reads of outputs as launches on the compute stream."""
    give = [Launch(COMPUTE, "give", (), {}, (), (), tuple(span_of(r) for r in program.inputs.values()), "give")]
    take = [Launch(COMPUTE, "take", (), {}, (), tuple(span_of(r) for r in program.outputs.values()), (), "take")]
    return [*program.prologue, *(item for _ in range(steps) for item in (*give, *program.step, *take))]


def predecessors(items: list[Item]) -> list[int]:
    """For each item, the set of items that must have run before it, as bits."""
    found = []
    last: dict[str, int] = {}
    records: dict[int, int] = {}
    reads = barrier = 0
    for i, item in enumerate(items):
        before = 1 << last[item.stream] if item.stream in last else 0
        if item.stream == DISK:  # behind the last Wait alone; a Record also behind every read so far
            before = barrier | (reads if isinstance(item, Record) else 0)
        if isinstance(item, Wait):
            before |= 1 << records[item.event] if item.event in records else 0
            barrier = 1 << i if item.stream == DISK else barrier
        elif isinstance(item, Record):
            records[item.event] = i
        elif item.stream == DISK:
            reads |= 1 << i
        last[item.stream] = i
        found.append(before)
    return found


class Memory:
    """Symbols per indivisible byte range, as a tuple; `run` gives the tuple after an item."""

    def __init__(self, program: Program, items: list[Item]) -> None:
        spans = [*program.resident.values()]
        for item in items:
            spans += [*effects(item)[0], *effects(item)[1]]
        cuts = sorted({(s.arena, at) for s in spans for at in (s.offset, s.offset + s.nbytes)})
        self.place = {cut: i for i, cut in enumerate(cuts)}
        self.names: dict[object, int] = {}
        start: list[object] = [DEAD] * len(cuts)
        for name, s in program.resident.items():
            start[self.slice(s)] = [f"{name}+{i}" for i in range(len(start[self.slice(s)]))]
        self.start = tuple(map(self.symbol, start))

    def symbol(self, value: object) -> int:
        return self.names.setdefault(value, len(self.names))

    def slice(self, s: Span) -> slice:
        return slice(self.place[s.arena, s.offset], self.place[s.arena, s.offset + s.nbytes])

    def run(self, item: Item, memory: tuple[int, ...], poison: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Memory after the item, and what it read."""
        reads, writes, margins = effects(item)
        seen = tuple(v for s in reads for v in memory[self.slice(s)])
        if (isinstance(item, Release) and not poison) or not (writes or margins):
            return memory, seen
        after = list(memory)
        for s in margins:
            after[self.slice(s)] = [self.symbol("garbage")] * len(after[self.slice(s)])
        for s in writes:
            part = self.slice(s)
            what = DEAD if isinstance(item, Release) else None
            after[part] = [self.symbol(what or (label(item), s.buffer, i, seen)) for i in range(len(after[part]))]
        return tuple(after), seen


def label(item: Item) -> str:
    assert isinstance(item, Launch | Copy)
    if isinstance(item, Copy) and isinstance(item.src, FileSlice):
        return f"{item.label}{item.src.offset}"
    return item.label


def effects(item: Item) -> tuple[tuple[Span, ...], tuple[Span, ...], tuple[Span, ...]]:
    """What an item reads, writes, and fills with anything."""
    if isinstance(item, Launch):
        return item.reads, item.writes, ()
    if isinstance(item, Release):
        return (), (item.span,), ()
    if isinstance(item, Copy):
        reads = copy_spans(item)[0]
        before, after = item.room
        dst = item.dst
        assert isinstance(dst, Span)
        end = dst.offset + dst.nbytes
        margins = (Span(dst.arena, dst.offset - before, before, ""), Span(dst.arena, end, after, ""))
        return reads, (dst,), tuple(m for m in margins if m.nbytes)
    return (), (), ()


def in_list_order(program: Program, steps: int, memory: Memory, items: list[Item]) -> tuple:
    state, taken = memory.start, []
    for item in items:
        state, seen = memory.run(item, state, poison=False)
        if isinstance(item, Launch) and item.op == "take":
            taken.append(seen)
    return tuple(taken)


def outcomes(program: Program, steps: int = 2, poison: bool = True) -> tuple[tuple, set[tuple], int]:
    """What the outputs hold after each step when the list runs in its own order without poison, what they hold in
    every possible order (with it), and how many states there are on the way."""
    items = issued(program, steps)
    memory = Memory(program, items)
    expected = in_list_order(program, steps, memory, items)
    before = predecessors(items)
    everything = (1 << len(items)) - 1
    frontier = {(0, memory.start, ())}
    known = set(frontier)
    found: set[tuple] = set()
    while frontier:
        done, state, taken = frontier.pop()
        if done == everything:
            found.add(taken)
            continue
        for i, item in enumerate(items):
            if done >> i & 1 or before[i] & ~done:
                continue
            after, seen = memory.run(item, state, poison)
            new = (done | 1 << i, after, (*taken, seen) if isinstance(item, Launch) and item.op == "take" else taken)
            if new not in known:
                known.add(new)
                frontier.add(new)
        assert len(known) < 200_000, "too large a program to explore"
    return expected, found, len(known)


def streaming(folder: Path, layers: int, slots: int, lead: int | None = None, tile_rows: int = 0) -> Program:
    model = chain(folder, layers)
    return by_hand(model, {n: tile_rows for n in model.weights if n[0] == "w"}, slots, lead)


def by_hand(model: Tiny, stream: Mapping[str, int | str], slots: int, lead: int | None = None) -> Program:
    return lowered(model, plan_for(placements(model, stream), slots, lead))


def looking_up(folder: Path) -> Program:
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = graph.call_function(aten.embedding.default, (nodes["table"], nodes["ids"]))
        x = graph.call_function(aten.linear.default, (x, nodes["w0"]))
        return (graph.call_function(aten.linear.default, (x, nodes["w1"])),)

    weights = {"table": torch.randn(9, 8), "w0": torch.randn(8, 8), "w1": torch.randn(8, 8)}
    model = tiny(folder, build, {"ids": torch.tensor([[1, 2]])}, weights)
    return by_hand(model, {"table": "gather", "w0": 0, "w1": 0}, slots=1)


def two_hops(folder: Path, slots: int) -> Program:
    options = Options(slots=slots, slot_nbytes=16384)
    return planned(chain(folder, 3, width=64), Budget(slots * 20480 + 10_000), options, host_hop=True)[1]


def sound_programs(folder: Path) -> Iterator[tuple[str, Program]]:
    for layers, slots, lead in ((1, 1, 1), (2, 1, 1), (3, 2, 2), (3, 2, 1), (3, 3, 3), (2, 3, 2)):
        yield f"{layers} layers, {slots} slots, lead {lead}", streaming(folder, layers, slots, lead)
    yield "tiles", streaming(folder, 1, 2, tile_rows=11)
    yield "lookup", looking_up(folder)
    yield "two hops, one slot", two_hops(folder, 1)
    yield "two hops, two slots", two_hops(folder, 2)


def test_every_order_of_a_sound_program_computes_the_same(tmp_path: Path) -> None:
    for name, program in sound_programs(tmp_path):
        verify_program(program)
        expected, found, states = outcomes(program)
        assert found == {expected}, name
        assert states > len(program.step), f"{name}: there was one order only"


def mutations(program: Program) -> Iterator[tuple[str, Program]]:
    """The step with one Wait, Record or Release left out, or with two neighbours exchanged."""
    step = program.step
    for i, item in enumerate(step):
        if isinstance(item, Wait | Record | Release):
            yield f"without {type(item).__name__} {i}", replace(program, step=(*step[:i], *step[i + 1 :]))
    for i in range(len(step) - 1):
        yield f"{i} and {i + 1} exchanged", replace(program, step=(*step[:i], step[i + 1], step[i], *step[i + 2 :]))


@pytest.mark.parametrize("which", ["stream", "odd ring", "lookup", "two hops"])
def test_what_the_verifier_accepts_has_one_outcome_and_what_races_is_refused(tmp_path: Path, which: str) -> None:
    program = {"stream": lambda: streaming(tmp_path, 2, 1), "odd ring": lambda: streaming(tmp_path, 3, 2),
               "lookup": lambda: looking_up(tmp_path), "two hops": lambda: two_hops(tmp_path, 1)}[which]()
    accepted = refused = racing = 0
    for name, changed in mutations(program):
        try:
            verify_program(changed)
            sound = True
        except ProgramError:
            sound = False
        expected, found, _ = outcomes(changed, poison=False)
        if sound:
            accepted += 1
            assert found == {expected}, f"the verifier accepts a race: {which} {name}"
        else:
            refused += 1
        racing += len(found) > 1
    assert refused > 5 and racing > 2 and accepted > 0


def test_memory_freed_while_it_is_read_has_a_bad_order(tmp_path: Path) -> None:
    """The disk does not wait for the slot: some order overwrites the weight before its product has read it."""
    program = streaming(tmp_path, 2, 1)
    place = next(i for i, item in enumerate(program.step) if isinstance(item, Wait) and item.stream == DISK)
    changed = replace(program, step=(*program.step[:place], *program.step[place + 1 :]))
    expected, found, _ = outcomes(changed)
    assert expected in found and len(found) > 1
    with pytest.raises(ProgramError, match="may still read"):
        verify_program(changed)


# -- the clock


def copy(label: str, stream: str = DISK) -> Copy:
    return Copy(stream, FileSlice("f", 0, 8), Span("device", 0, 8, "s"), label)


def work(label: str) -> Launch:
    return Launch(COMPUTE, "op", (), {}, (), (), (), label)


def run(
    *step: Item, inline: bool = True, steps: int = 1, cost: CostOf | None = None
) -> tuple[list[float], dict[str, tuple[float, float]]]:
    program = Program("p", step, (), {"device": 8}, {})
    on = run_on_threads if inline else run_on_streams
    ends, spans = on(program, cost or (lambda i: ItemCost(2.0 if isinstance(i, Copy) else 3.0)), steps)[:2]
    return ends, {label: (start, end) for _, label, start, end in spans}


def test_streams_run_side_by_side_until_a_wait() -> None:
    step = (copy("a"), Record(DISK, 1), work("x"), Wait(COMPUTE, 1), work("y"), copy("b", UPLOAD))
    ends, spans = run(*step, inline=False)
    assert spans == {"a": (0, 2), "x": (0, 3), "y": (3, 6), "b": (0, 2)} and ends == [0, 6]
    _, spans = run(copy("a"), copy("b"), Record(DISK, 1), work("x"), Wait(COMPUTE, 1), work("y"))
    assert spans == {"a": (0, 2), "b": (2, 4), "x": (0, 3), "y": (4, 7)}


def test_a_computing_thread_issues_nothing_meanwhile() -> None:
    step = (work("x"), copy("a"), Record(DISK, 1), Wait(COMPUTE, 1), work("y"))
    assert run(*step, inline=True)[1]["a"] == (3, 5)
    assert run(*step, inline=False)[1]["a"] == (0, 2)


def test_steps_follow_each_other() -> None:
    step = (work("x"), copy("a"), Record(DISK, 1), Wait(COMPUTE, 1))
    assert run(*step, steps=3, inline=False)[0] == [0, 3, 6, 9]
    assert run(*step, steps=3)[0] == [0, 5], "the second step begins as the first did"
    ends, spans = run(work("x"), copy("a"), steps=3, cost=lambda i: ItemCost(4.0 if isinstance(i, Copy) else 3.0))
    assert ends == [0, 3, 6, 9] and spans["a"] == (3, 7), "what was queued when a step began differs"


def test_a_gpu_waits_for_launches_that_take_longer_to_issue_than_to_run() -> None:
    def cost(item: Item) -> ItemCost:
        if isinstance(item, Copy):
            return ItemCost(2.0, issue_s=9.0)
        return ItemCost(6.0 if item.label == "long" else 1.0, issue_s=2.0)  # type: ignore[union-attr]

    ends, spans = run(work("x"), work("long"), work("y"), work("z"), copy("a"), inline=False, cost=cost)
    assert spans == {"x": (0, 3), "long": (3, 10), "y": (10, 11), "z": (11, 12), "a": (0, 2)} and ends == [0, 12]
    ends, spans = run(work("x"), work("y"), steps=2, inline=False, cost=cost)
    assert ends == [0, 5, 10] and spans == {"x": (5, 8), "y": (8, 10)}, "a step is issued when the one before is done"


def test_copies_to_a_gpu_share_its_link() -> None:
    """Of two at once, whatever their streams, the one that is issued later has what the other leaves; neither has it
    while the other's stream only waits."""
    step = (copy("a", UPLOAD), copy("b", RETURN), copy("c", RETURN), copy("d", UPLOAD), copy("e", DOWNLOAD))
    assert run(*step, inline=False)[1] == {"a": (0, 2), "b": (0, 4), "c": (4, 6), "d": (2, 8), "e": (0, 2)}
    step = (work("x"), Record(COMPUTE, 1), Wait(UPLOAD, 1), copy("a", UPLOAD), copy("b", RETURN), copy("c", RETURN))
    assert run(*step, inline=False)[1] == {"x": (0, 3), "a": (3, 5), "b": (0, 2), "c": (2, 6)}


def test_copies_between_host_and_gpu_begin_once_they_are_issued() -> None:
    def cost(item: Item) -> ItemCost:
        return ItemCost(2.0, latency_s=1.0, issue_s=5.0)

    spans = run(copy("a", UPLOAD), copy("b", DOWNLOAD), copy("c"), work("x"), inline=False, cost=cost)[1]
    assert spans == {"a": (0, 8), "b": (0, 13), "c": (0, 3), "x": (0, 18)}, "who reads files does so alone"


def test_copies_and_launches_slow_each_other_while_both_run() -> None:
    """A launch of 3 s that copies slow to half, and that slows copies to half: a copy of 2 s takes 4 beside it, in
    which the launch does 2 s of its work."""
    step = (copy("a"), Record(DISK, 1), work("x"), Wait(COMPUTE, 1), work("y"))
    ends, spans = run(*step, cost=lambda i: ItemCost(2.0) if isinstance(i, Copy) else ItemCost(3.0, 2.0, 2.0))
    assert spans == {"a": (0, 4), "x": (0, 5), "y": (5, 8)} and ends == [0, 8]
    _, spans = run(copy("a"), copy("b"), Record(DISK, 1), Wait(COMPUTE, 1), work("x"),
                   cost=lambda i: ItemCost(2.0, latency_s=0.5) if isinstance(i, Copy) else ItemCost(3.0))
    assert spans == {"a": (0, 2.5), "b": (2.5, 4.75), "x": (4.75, 7.75)}, "one more under way hides half of the latency"
    _, spans = run(copy("a"), copy("b"), work("x"),
                   cost=lambda i: ItemCost(2.0, issue_s=0.5) if isinstance(i, Copy) else ItemCost(3.0))
    assert spans["x"] == (1, 4), "issuing takes the computing thread's time"


def test_between_steps_copies_go_on() -> None:
    program = Program("p", (work("x"), copy("a"), Record(DISK, 1), Wait(COMPUTE, 1)), (), {"device": 8}, {})
    ends, *_ = run_on_threads(program, lambda i: ItemCost(2.0), 2, between_s=1.0)
    assert ends == [0, 5]


def test_cores_bear_a_share_of_copies_from_and_to_disk() -> None:
    """Launches of 3 s beside 8 s of copies, of which two have to do with the disk: at three quarters of these the step
    lasts 3 + 6 s, at a quarter as long as its copies."""
    step = (copy("a"), copy("b", WRITE), copy("c", UPLOAD), work("x"), Record(DISK, 1), Wait(COMPUTE, 1))
    program = Program("p", step, (), {"device": 8}, {})

    def cost(item: Item) -> ItemCost:
        return ItemCost(4.0) if isinstance(item, Copy) else ItemCost(3.0)

    def last(share: float) -> list[float]:
        return run_on_threads(program, cost, 2, core_share=share)[0]

    assert last(0.0) == last(0.125) == [0, 4] and last(0.75) == [0, 9]
    *_, least_s = run_on_threads(program, lambda i: cost(i)._replace(issue_s=1.0), 2, 0.5, 0.75)
    assert least_s == 12.5, "issuing copies takes the thread that computes, and so does what comes between steps"
    asked: list[Item] = []
    run_on_threads(program, lambda i: (asked.append(i), cost(i))[1], 3, core_share=0.75)
    assert len(asked) == 4, "each is asked for its cost once"


def test_it_computes_nothing_and_holds_nothing() -> None:
    device = VirtualDevice(lambda item: ItemCost(1.0))
    device.allocate({"device": 1 << 50})
    tensor = device.tensor(TensorRef("device", 1 << 49, "float32", (2, 1 << 20), (1, 2), "b"))
    assert tensor.device.type == "meta" and tensor.stride() == (1, 2)
    assert device.bind(Release(COMPUTE, Span("device", 0, 8, "b")), None) is None
    device.finish()
    device.close()
