"""The verifier accepts sound programs and refuses each kind of unsound one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.rewriter.program import (
    COMPUTE,
    DISK,
    Copy,
    FileSlice,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Span,
    Wait,
)
from forebay.rewriter.verify import ProgramError, verify_program


def span(offset: int, nbytes: int, buffer: str) -> Span:
    return Span("device", offset, nbytes, buffer)


def launch(label: str, reads: tuple[Span, ...] = (), writes: tuple[Span, ...] = ()) -> Launch:
    return Launch(COMPUTE, "op", (), {}, (), reads, writes, label)


def fetch(label: str, dst: Span) -> Copy:
    return Copy(DISK, FileSlice("f", 0, dst.nbytes), dst, label)


X, Y = span(0, 64, "x"), span(64, 64, "y")
SLOT = span(128, 64, "slot0:0")


def streaming(layers: int = 3, slots: int = 2) -> Program:
    """`layers` weights through `slots` slots, the first `slots` issued by the step before."""
    slot = [span(128 + 64 * (j % slots), 64, f"slot{j % slots}:{j}") for j in range(layers)]
    landed, freed = (lambda j: j), (lambda j: 100 + j)
    prologue = [i for j in range(min(slots, layers)) for i in (fetch(f"w{j}", slot[j]), Record(DISK, landed(j)))]
    step: list[Item] = []
    tail = {max(k for k in range(layers) if k % slots == j): j for j in range(min(slots, layers))}
    waiting: list[int] = []
    for j in range(layers):
        step += [Wait(COMPUTE, landed(j)), launch(f"layer{j}", (X, slot[j]), (X,)), Release(COMPUTE, slot[j]),
                 Record(COMPUTE, freed(j))]
        following = j + slots
        if following < layers:
            step += [Wait(DISK, freed(j)), fetch(f"w{following}", slot[following]), Record(DISK, landed(following))]
        if j in tail:
            waiting.append(j)
    for j in sorted(waiting, key=lambda k: tail[k]):
        step += [Wait(DISK, freed(j)), fetch(f"w{tail[j]}", slot[tail[j]]), Record(DISK, landed(tail[j]))]
    return Program("stream", tuple(step), tuple(prologue), {"device": 128 + 64 * slots}, {"x": X, "y": Y})


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_sound_stream_is_accepted(layers: int, slots: int) -> None:
    verify_program(streaming(layers, slots), {"device": 128 + 64 * slots})


def without(program: Program, kind: type, nth: int = 0) -> Program:
    """The program with the nth step item of a kind left out."""
    places = [i for i, item in enumerate(program.step) if isinstance(item, kind)]
    return replace(program, step=tuple(item for i, item in enumerate(program.step) if i != places[nth]))


@pytest.mark.parametrize("nth", range(8))
def test_every_wait_is_needed(nth: int) -> None:
    program = streaming(4, 2)
    assert sum(isinstance(i, Wait) for i in program.step) == 8
    with pytest.raises(ProgramError, match=r"without waiting|may still read"):
        verify_program(without(program, Wait, nth))


@pytest.mark.parametrize("kind", [Release, Record, Copy])
def test_every_release_record_and_copy_is_needed(kind: type) -> None:
    program = streaming(4, 2)
    for nth in range(sum(isinstance(i, kind) for i in program.step)):
        with pytest.raises(ProgramError):
            verify_program(without(program, kind, nth))


def test_disk_reads_finish_out_of_order() -> None:
    """Two reads of one slot without a wait between them race, although they are on one stream."""
    step = (fetch("a", SLOT), Release(COMPUTE, SLOT), fetch("b", SLOT))
    with pytest.raises(ProgramError, match=r"loaded and"):
        verify_program(Program("p", step, (), {"device": 256}, {}))
    step = (fetch("a", SLOT), fetch("b", replace(SLOT, buffer="slot0:0")))
    with pytest.raises(ProgramError, match=r"loaded and never read|may still write"):
        verify_program(Program("p", step, (), {"device": 256}, {}))


@pytest.mark.parametrize(("step", "message"), [
    ((launch("r", (SLOT,)),), "holds nothing"),
    ((launch("w", (), (span(32, 64, "z"),)),), "still lives"),
    ((launch("w", (), (span(250, 64, "z"),)),), "leaves the arena"),
    ((launch("w", (), (Span("gpu2", 0, 8, "z"),)),), "unknown arena"),
    ((Wait(COMPUTE, 9),), "nothing recorded"),
    ((launch("w", (), (SLOT,)), Release(COMPUTE, SLOT), Release(COMPUTE, SLOT)), "released before"),
    ((launch("w", (), (SLOT,)),), "as the next step expects"),
    ((launch("w", (), (SLOT,)), Release(COMPUTE, SLOT), launch("r", (SLOT,))), "holds nothing"),
])
def test_faults_are_named(step: tuple[Item, ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify_program(Program("p", step, (), {"device": 256}, {"x": X, "y": Y}))


def test_budget_and_workspace() -> None:
    program = streaming(2, 1)
    with pytest.raises(ProgramError, match="budget"):
        verify_program(program, {"device": 191})
    big = replace(launch("op", (X,), (X,)), workspace_nbytes=100)
    with pytest.raises(ProgramError, match="workspace"):
        verify_program(Program("p", (big,), (), {"device": 128}, {"x": X, "y": Y}), {"device": 200})


def test_a_program_that_runs_once_may_leave_the_memory_otherwise() -> None:
    """Moved from x up to z: refused as a step, but not as something done once, unless it is unsound in itself."""
    move = launch("move", (X,), (span(32, 64, "x"),))
    program = Program("p", (move, Release(COMPUTE, span(0, 32, "x"))), (), {"device": 128}, {"x": X})
    with pytest.raises(ProgramError, match="as the next step expects"):
        verify_program(program)
    verify_program(replace(program, once=True))
    with pytest.raises(ProgramError, match="still lives"):
        verify_program(replace(program, once=True, resident={"x": X, "y": Y}))


def test_two_kept_buffers_may_not_overlap() -> None:
    with pytest.raises(ProgramError, match="both kept"):
        verify_program(Program("p", (), (), {"device": 128}, {"x": X, "z": span(32, 64, "z")}))
