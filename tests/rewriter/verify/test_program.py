"""The verifier accepts sound programs and refuses each kind of unsound one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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
    Rows,
    Span,
    TensorRef,
    Wait,
)
from forebay.rewriter.verify.program import ProgramError, verify_program
from tests.tiny import chain, lowered, placements, plan_for


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


@pytest.mark.parametrize("nbytes", [0, 1, 63, 65, 6400])
def test_a_copy_fills_its_target(nbytes: int) -> None:
    program = streaming(3, 2)
    assert isinstance(program.step[5], Copy) and isinstance(program.prologue[0], Copy)
    other = replace(program.step[5], src=FileSlice("f", 0, nbytes))
    with pytest.raises(ProgramError, match=rf"w2 brings {nbytes} bytes into slot0:2 .* has 64"):
        verify_program(replace(program, step=(*program.step[:5], other, *program.step[6:])))
    first = replace(program.prologue[0], src=FileSlice("f", 0, nbytes))
    with pytest.raises(ProgramError, match=f"w0 brings {nbytes} bytes"):
        verify_program(replace(program, prologue=(first, *program.prologue[1:])))


def uploading(nbytes: int) -> Program:
    """One weight by way of the host arena, `nbytes` of it from there to the device."""
    landed, slot = Span("host", 0, 64, "host_slot0:0"), SLOT
    copies = (fetch("w", landed), Record(DISK, 1), Wait(UPLOAD, 1),
              Copy(UPLOAD, replace(landed, nbytes=nbytes), slot, "up"), Release(UPLOAD, landed), Record(UPLOAD, 2))
    step = (Wait(COMPUTE, 2), launch("l", (X, slot), (X,)), Release(COMPUTE, slot), Record(COMPUTE, 3), Wait(DISK, 2),
            Wait(UPLOAD, 3), *copies)
    return Program("up", step, copies, {"device": 192, "host": 64}, {"x": X})


def test_an_upload_fills_its_target() -> None:
    verify_program(uploading(64))
    with pytest.raises(ProgramError, match="up brings 32 bytes into slot0:0"):
        verify_program(uploading(32))


def looking_up(row_nbytes: int, index: TensorRef) -> Program:
    """Rows named by `index`, which holds x, into 64 bytes."""
    rows = Rows(FileSlice("f", 0, 10 * row_nbytes), row_nbytes, index)
    step = (Record(COMPUTE, 1), Wait(LOOKUP, 1), Copy(LOOKUP, rows, SLOT, "gather"),
            Record(LOOKUP, 2), Wait(COMPUTE, 2), launch("l", (SLOT,), (Y,)), Release(COMPUTE, SLOT))
    return Program("rows", step, (), {"device": 192}, {"x": X, "y": Y})


def test_a_lookup_fills_its_target() -> None:
    index = TensorRef("device", 0, "int64", (4, 2), (2, 1), "x")
    verify_program(looking_up(8, index))
    for row_nbytes in (4, 9, 4096):
        with pytest.raises(ProgramError, match=f"gather brings {8 * row_nbytes} bytes"):
            verify_program(looking_up(row_nbytes, index))
    with pytest.raises(ProgramError, match="gather brings 72 bytes"):
        verify_program(looking_up(8, replace(index, shape=(3, 3))))


A = TensorRef("device", 0, "float32", (4, 4), (4, 1), "x")
B = replace(A, offset=64, buffer="y")


def doing(op: str = "op", args: tuple = (), out: tuple[TensorRef, ...] = (), reads: tuple[Span, ...] = (),
          writes: tuple[Span, ...] = (), **kwargs: object) -> Program:
    return Program("p", (Launch(COMPUTE, op, args, kwargs, out, reads, writes, "l"),), (), {"device": 128},
                   {"x": X, "y": Y})


@pytest.mark.parametrize("ref", [
    A, replace(A, offset=32, shape=(2, 4)), replace(A, dtype="float16", shape=(4, 8), stride=(8, 1)),
    replace(A, stride=(0, 1), offset=48), replace(A, shape=(0, 400)),
])
def test_a_launch_may_use_what_it_declares(ref: TensorRef) -> None:
    verify_program(doing(args=(None, ref, 0.5), reads=(Y, X), out=(B,), writes=(Y,)))
    verify_program(doing(tensors=[ref, B], reads=(Y, X), out=(ref,), writes=(X,)))


@pytest.mark.parametrize("ref", [
    B, replace(A, offset=4), replace(A, offset=-4), replace(A, shape=(4, 5)), replace(A, stride=(5, 1)),
    replace(A, dtype="float64"), replace(A, arena="host"), replace(A, buffer="z"), replace(A, offset=1 << 20),
])
def test_a_launch_declares_all_it_touches(ref: TensorRef) -> None:
    for program in (doing(args=(ref,), reads=(X,), writes=(Y,)), doing(args=([A, ref],), reads=(X,)),
                    doing(x=ref, reads=(X,), writes=(Y,)), doing(x=(ref,), reads=(X,))):
        with pytest.raises(ProgramError, match=r"l reads .* not among what it says it reads"):
            verify_program(program)
    with pytest.raises(ProgramError, match=r"l writes .* not among what it says it writes"):
        verify_program(doing(out=(ref,), reads=(X, Y), writes=(X,)))


def test_everything_that_lowered_launches_declare_is_needed(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=2)
    program = lowered(model, plan_for(placements(model, {"w1": 16})))
    verify_program(program)
    removed = 0
    for i, item in enumerate(program.step):
        for part in ("reads", "writes") if isinstance(item, Launch) else ():
            spans = getattr(item, part)
            for j in range(len(spans)):
                less = replace(item, **{part: spans[:j] + spans[j + 1:]})
                with pytest.raises(ProgramError, match=f"{item.label} {part} .* not among what it says it {part}"):
                    verify_program(replace(program, step=(*program.step[:i], less, *program.step[i + 1:])))
                removed += 1
    assert removed >= 12


def test_views_across_two_declared_spans_are_refused() -> None:
    """Two halves of one buffer need not be whole at the same time."""
    halves = (span(0, 32, "x"), span(32, 32, "x"))
    with pytest.raises(ProgramError, match="not among"):
        verify_program(doing(args=(A,), reads=halves))


def test_what_an_operator_writes_in_place_is_declared_as_written() -> None:
    verify_program(doing("call:aten.zero_.default", (A,), writes=(X,)))
    verify_program(doing("call:aten.add_.Tensor", (A, B), reads=(X, Y), writes=(X,)))
    for op, args in (("call:aten.zero_.default", (A,)), ("call:aten.add_.Tensor", (A, B))):
        with pytest.raises(ProgramError, match=r"l writes x at device .* not among"):
            verify_program(doing(op, args, reads=(X, Y), writes=(Y,)))
    with pytest.raises(ProgramError, match=r"l reads y at device .* not among"):
        verify_program(doing("call:aten.add_.Tensor", (A, B), reads=(X,), writes=(X, Y)))
    with pytest.raises(ProgramError, match="l writes x at device"):
        verify_program(doing("call:aten.zero_.default", self=A, reads=(X,)))


def test_a_product_that_adds_to_its_result_reads_it() -> None:
    given = {"args": (B, B, None), "out": (A,), "writes": (X,), "accumulate": True}
    verify_program(doing(**given, reads=(Y, X)))
    with pytest.raises(ProgramError, match="l reads x at device"):
        verify_program(doing(**given, reads=(Y,)))


@pytest.mark.parametrize("ref", [
    replace(A, stride=(-4, 1)), replace(A, shape=(-4, 4)), replace(A, stride=(4,)), replace(A, dtype="float33"),
])
def test_views_that_no_tensor_has_are_refused(ref: TensorRef) -> None:
    with pytest.raises(ProgramError, match="x is no tensor"):
        verify_program(doing(args=(ref,), reads=(X,)))
    for side in ("inputs", "outputs"):
        with pytest.raises(ProgramError, match="caller's a: x is no tensor"):
            verify_program(replace(doing(), **{side: {"a": ref}}))


def test_an_operator_that_torch_does_not_know_is_refused() -> None:
    for op in ("forebay.nothing", "call:aten.add.Nothing", "nowhere.add.out"):
        with pytest.raises(ProgramError, match=f"l runs {op}, which torch"):
            verify_program(doing(op))


def test_streams_that_would_not_keep_the_order_are_refused() -> None:
    """Devices run launches where they are issued, reads of files in any order, and other copies on a worker."""
    for stream in (DISK, UPLOAD):
        with pytest.raises(ProgramError, match=f"l is on the stream {stream}"):
            verify_program(Program("p", (replace(launch("l"), stream=stream),), (), {"device": 0}, {}))
    for stream, src in ((UPLOAD, FileSlice("f", 0, 64)), (COMPUTE, FileSlice("f", 0, 64)), (DISK, X), (COMPUTE, X)):
        step = (Copy(stream, src, SLOT, "w"), Record(stream, 1), Wait(COMPUTE, 1), launch("l", (SLOT,)),
                Release(COMPUTE, SLOT))
        with pytest.raises(ProgramError, match=f"w is on the stream {stream}"):
            verify_program(Program("p", step, (), {"device": 192}, {"x": X}))


@pytest.mark.parametrize("where", [span(0, -8, "z"), span(-8, 16, "z"), span(120, 9, "z")])
def test_spans_lie_in_their_arenas(where: Span) -> None:
    with pytest.raises(ProgramError, match="leaves the arena"):
        verify_program(doing(reads=(where,)))
