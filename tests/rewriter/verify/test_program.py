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
    for op in ("aten.put.out", "call:aten.put.default"):  # these add to a copy of their operand
        verify_program(doing(op, **given, reads=(Y,)))
    with pytest.raises(ProgramError, match="l reads x at device"):
        verify_program(doing("call:aten.put_.default", (A,), accumulate=True, writes=(X,)))


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


def test_an_output_is_the_callers_until_the_next_step() -> None:
    """Whoever overwrites it must have waited for more than the launch that wrote it: for the caller, who takes it."""
    out = {"y": B}
    early = (Record(COMPUTE, 9),)  # behind the launch that writes y, before the caller takes it
    compute = (launch("l", (X,), (Y,)), *early)
    bring = (Wait(DISK, 9), fetch("w", replace(Y, buffer="w")), Record(DISK, 1), Wait(COMPUTE, 1),
             launch("use", (replace(Y, buffer="w"),), (X,)), Release(COMPUTE, replace(Y, buffer="w")))
    prologue = (launch("first", (), (Y,)), Release(COMPUTE, Y), *early)
    racy = Program("p", (*bring, *compute), prologue, {"device": 128}, {"x": X}, {}, out)
    with pytest.raises(ProgramError, match=r"w on disk overwrites w at .* while the caller, who takes y, on comp"):
        verify_program(racy)
    late = (Record(COMPUTE, 8), Wait(DISK, 8))  # at the top of the next step: the caller has taken it
    verify_program(replace(racy, step=(*late, *bring, *compute)))


def test_the_caller_waits_for_no_other_stream() -> None:
    """An output that a copy brings is not there for the caller before compute has waited for it."""
    brought = (fetch("w", Y), Record(DISK, 1))
    program = Program("p", brought, (), {"device": 128}, {"x": X}, {}, {"y": B})
    with pytest.raises(ProgramError, match=r"takes y, on compute reads .* without waiting for w on disk"):
        verify_program(program)
    with pytest.raises(ProgramError, match=r"may still read it there"):
        verify_program(replace(program, step=(*brought, Wait(COMPUTE, 1))))
    verify_program(replace(program, step=(Record(COMPUTE, 2), Wait(DISK, 2), *brought, Wait(COMPUTE, 1))))


def test_what_works_in_place_reads_what_it_writes() -> None:
    with pytest.raises(ProgramError, match=r"l reads x at .* not among what it says it reads"):
        verify_program(doing("call:aten.add_.Tensor", (A, B), reads=(Y,), writes=(X,)))
    unwritten = replace(doing("call:aten.add_.Tensor", (A, B), reads=(X, Y), writes=(X,)), resident={"y": Y})
    with pytest.raises(ProgramError, match=r"l reads x at .* which holds nothing"):
        verify_program(unwritten)
    filled = (doing("call:aten.zero_.default", (A,), writes=(X,)).step[0], *unwritten.step, Release(COMPUTE, X))
    verify_program(replace(unwritten, step=filled))


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 2), ("float32", 1), ("int64", 4), ("float16", 1),
                                               ("bfloat16", 3), ("complex64", 4)])
def test_tensors_begin_where_their_type_can(dtype: str, offset: int) -> None:
    ref = TensorRef("device", offset, dtype, (1,), (1,), "x")
    for args in ((ref,), (replace(ref, offset=0), ref), ([ref],)):  # also one whose like was seen before
        with pytest.raises(ProgramError, match=rf"l: x begins at byte {offset} of device, where no {dtype} can"):
            verify_program(doing(args=args, reads=(X,)))
    with pytest.raises(ProgramError, match=r"x begins at byte"):
        verify_program(replace(doing(), outputs={"a": ref}))
    verify_program(doing(args=(replace(ref, offset=0), replace(ref, offset=16)), reads=(X,)))


def test_tensors_in_mappings_are_declared_too() -> None:
    for args, kwargs in ((({"a": B},), {}), ((), {"options": {"a": [B]}}), (([{"b": (A, {"c": B})}],), {})):
        with pytest.raises(ProgramError, match=r"l reads y .* not among"):
            verify_program(doing(args=args, reads=(X,), **kwargs))
        verify_program(doing(args=args, reads=(X, Y), **kwargs))


@pytest.mark.parametrize("change", [
    {"src": FileSlice("f", -4096, 64)}, {"src": FileSlice("f", 0, -64), "dst": replace(SLOT, nbytes=-64)},
    {"room": (-1, 0)}, {"room": (0, -64)},
])
def test_negative_sizes_of_copies_are_refused(change: dict) -> None:
    program = streaming(3, 2)
    with pytest.raises(ProgramError, match=r"w0 has a negative offset, size or room"):
        verify_program(replace(program, prologue=(replace(program.prologue[0], **change), *program.prologue[1:])))


@pytest.mark.parametrize(("change", "message"), [
    ({"table": FileSlice("f", -64, 80)}, "gather has a negative offset, size or room"),
    ({"table": FileSlice("f", 0, -80)}, "gather has a negative offset, size or room"),
    ({"row_nbytes": -8}, "has no rows of -8 bytes"),
])
def test_negative_sizes_of_lookups_are_refused(change: dict, message: str) -> None:
    program = looking_up(8, TensorRef("device", 0, "int64", (4, 2), (2, 1), "x"))
    step = [replace(i, src=replace(i.src, **change)) if isinstance(i, Copy) else i for i in program.step]
    with pytest.raises(ProgramError, match=message):
        verify_program(replace(program, step=tuple(step)))


def test_negative_arenas_and_workspaces_are_refused() -> None:
    with pytest.raises(ProgramError, match=r"the arena host has -64 bytes"):
        verify_program(Program("p", (), (), {"device": 64, "host": -64}, {}))
    for place in ("step", "prologue"):
        items = (replace(launch("op"), workspace_nbytes=-1),)
        with pytest.raises(ProgramError, match=r"op has a workspace of -1 bytes"):
            verify_program(replace(Program("p", (), (), {"device": 64}, {}), **{place: items}))


@pytest.mark.parametrize(("offset", "sound"), [(0, False), (32, False), (63, False), (64, True), (-32, False)])
def test_copies_do_not_overlap_themselves(offset: int, sound: bool) -> None:
    src = span(64, 64, "x")
    dst = span(64 + offset, 64, "x" if abs(offset) < 64 else "z")
    step = (Copy(UPLOAD, src, dst, "move"), Record(UPLOAD, 1), Wait(COMPUTE, 1), launch("l", (dst,)),
            *((Release(COMPUTE, dst), Record(COMPUTE, 2), Wait(UPLOAD, 2)) if sound else ()))
    program = Program("p", step, (), {"device": 256}, {"x": replace(src, offset=min(64, 64 + offset),
                                                                    nbytes=64 + abs(offset) % 64)})
    if sound:
        verify_program(program)
    else:
        with pytest.raises(ProgramError, match=r"move copies x at .* to x at .*, which overlap"):
            verify_program(program)


def test_results_are_not_written_over_part_of_what_is_read() -> None:
    whole = {"reads": (X, Y), "writes": (X,)}
    verify_program(doing(args=(A,), out=(A,), **whole))  # in place, element by element
    half = replace(A, shape=(2, 4))
    verify_program(doing(args=(half,), out=(replace(half, offset=32),), **whole))
    for out in (replace(half, offset=16), replace(A, shape=(4, 4), stride=(1, 4)), replace(A, dtype="int32")):
        with pytest.raises(ProgramError, match=r"l writes x at .* over part of what it reads there"):
            verify_program(doing(args=(A,), out=(out,), **whole))
    with pytest.raises(ProgramError, match=r"l writes x at .* over part of what it reads there"):
        verify_program(doing("call:aten.add_.Tensor", (half, replace(half, offset=16)), reads=(X,), writes=(X,)))


def test_workspace_of_the_prologue_counts() -> None:
    big = replace(launch("op", (X,), (X,)), workspace_nbytes=100)
    program = Program("p", (), (big,), {"device": 128}, {"x": X, "y": Y})
    assert program.workspace_nbytes() == 100
    verify_program(program, {"device": 228})
    with pytest.raises(ProgramError, match=r"workspace 100"):
        verify_program(program, {"device": 227})
