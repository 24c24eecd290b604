"""The proof agrees with a second, slow one on random Programs: sound ones, and the same with one to three faults.

FOREBAY_TEST_ALL=1 (`make test-all`) compares 100 000 instead of 2 000; FOREBAY_TEST_SEED begins elsewhere.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from selection import ALL

from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    LOOKUP,
    UPLOAD,
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
)
from forebay.rewriter.verify.program import ProgramError, verify_program
from tests.rewriter.verify import oracle

COUNT = 100_000 if ALL else 2_000
SEED = int(os.environ.get("FOREBAY_TEST_SEED", "0"))
PARTS = 8
SLOT = 64


def sound(rng: random.Random) -> Program:
    """Weights through a ring of slots, some by way of the host, with activations, an input and an output: what
    lowering makes, in small."""
    slots, layers, hop = rng.randint(1, 3), rng.randint(1, 5), rng.random() < 0.4
    stream = UPLOAD if hop else rng.choice((DISK, LOOKUP))
    x, y = Span("device", 0, 32, "x"), Span("device", 32, 32, "y")
    act = Span("device", 64, 32, "act")
    base = 96
    arenas = {"device": base + slots * SLOT, **({"host": 32 * slots} if hop else {})}
    room = rng.choice((0, 16))

    def slot(j: int) -> Span:
        return Span("device", base + SLOT * (j % slots) + room, 32, f"slot{j % slots}:{j}")

    def whole(j: int) -> Span:
        return Span("device", base + SLOT * (j % slots), 32 + 2 * room, f"slot{j % slots}:{j}")

    def bring(j: int) -> list[Item]:
        if not hop:
            return [Copy(stream, FileSlice("f", 0, 32), slot(j), f"w{j}", room=(room, room)), Record(stream, j)]
        landed = Span("host", 32 * (j % slots), 32, f"host{j % slots}:{j}")
        return [Copy(DISK, FileSlice("f", 0, 32), landed, f"w{j}"), Record(DISK, 200 + j), Wait(UPLOAD, 200 + j),
                Copy(UPLOAD, landed, slot(j), f"up{j}", room=(room, room)), Release(UPLOAD, landed),
                Record(UPLOAD, j)]

    def free(j: int) -> list[Item]:
        waits: list[Item] = [Wait(stream, 100 + j)]
        return [*waits, Wait(DISK, j)] if hop else waits  # the host's slot is free once it was uploaded

    first = min(slots, layers)
    prologue = [item for j in range(first) for item in bring(j)]
    step: list[Item] = [Launch(COMPUTE, "op", (), {}, (), (x,), (act,), "begin")]
    late: list[tuple[int, int]] = []
    for j in range(layers):
        step += [Wait(COMPUTE, j), Launch(COMPUTE, "op", (), {}, (), (act, slot(j)), (act,), f"layer{j}"),
                 Release(COMPUTE, whole(j) if room else slot(j)), Record(COMPUTE, 100 + j)]
        if j + slots < layers:
            step += [*free(j), *bring(j + slots)]
        else:
            late.append((j % slots, j))
    for k, j in sorted(late):
        if k < first:
            step += [*free(j), *bring(k)]
    step += [Launch(COMPUTE, "op", (), {}, (), (act,), (y,), "end"), Release(COMPUTE, act)]
    ref = TensorRef("device", 0, "float32", (8,), (1,), "x")
    return Program("random", tuple(step), tuple(prologue), arenas, {"x": x}, {"x": ref},
                   {"y": replace(ref, offset=32, buffer="y")})


def spoiled(program: Program, rng: random.Random) -> Program:
    """One fault: an item gone, twice, elsewhere, on another event, at other bytes, of another buffer."""
    part = "prologue" if program.prologue and rng.random() < 0.25 else "step"
    items = list(getattr(program, part))
    i, j = rng.randrange(len(items)), rng.randrange(len(items))
    item, how = items[i], rng.randrange(8)
    if how == 0:
        del items[i]
    elif how == 1:
        items.insert(j, item)
    elif how == 2:
        items.insert(j, items.pop(i))
    elif how == 3 and isinstance(item, Wait | Record):
        events = [k.event for k in (*program.prologue, *program.step) if isinstance(k, Record)]
        items[i] = replace(item, event=rng.choice(events))
    elif how == 4 and isinstance(item, Copy | Release | Launch):
        items[i] = _moved(item, rng.choice((-16, 16, -32, 32, 64)))
    elif how == 5 and isinstance(item, Copy):
        items[i] = replace(item, room=(rng.choice((0, 16)), rng.choice((0, 16))))
    elif how == 6 and isinstance(item, Release):
        items[i] = replace(item, span=replace(item.span, nbytes=rng.choice((16, 32, 64))))
    elif how == 7 and isinstance(item, Launch) and item.writes:
        span, other = item.writes[0], rng.choice((item.writes[0].buffer, "else"))
        items[i] = replace(item, writes=(replace(span, offset=max(0, span.offset + rng.choice((-32, 0, 32))),
                                                 buffer=other),))
    return replace(program, **{part: tuple(items)})


def _moved(item: Item, by: int) -> Item:
    def move(span: Span) -> Span:
        return replace(span, offset=span.offset + by)

    if isinstance(item, Copy):
        assert isinstance(item.dst, Span)
        return replace(item, dst=move(item.dst))
    if isinstance(item, Release):
        return replace(item, span=move(item.span))
    assert isinstance(item, Launch)
    return replace(item, reads=tuple(map(move, item.reads))) if item.reads else item


@pytest.mark.parametrize("part", range(PARTS))
def test_the_proof_agrees_with_the_oracle(part: int) -> None:
    accepted = faults = 0
    for number in range(part, COUNT, PARTS):
        rng = random.Random(SEED * 1_000_003 + number)
        program = sound(rng)
        wrong = number % 5 != 0
        for _ in range(rng.randint(1, 3) if wrong else 0):
            program = spoiled(program, rng)
        verdicts = []
        for judge, refusal in ((verify_program, ProgramError), (oracle.check, oracle.Refused)):
            try:
                judge(program)
                verdicts.append("")
            except refusal as error:
                verdicts.append(str(error) or "refused")
        assert bool(verdicts[0]) == bool(verdicts[1]), f"program {number}, seed {SEED}: {verdicts}"
        assert wrong or not verdicts[0], f"program {number}, seed {SEED} is sound: {verdicts}"
        accepted += not verdicts[0]
        faults += wrong
    assert accepted > 0.2 * COUNT / PARTS and COUNT / PARTS - accepted > 0.3 * COUNT / PARTS  # neither is the rule
