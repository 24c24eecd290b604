"""Hot loops, exposed loads, and what issue slots allow, on small listings whose answers can be worked out by hand."""

from __future__ import annotations

import pytest

from tests.kernels.audit.chips import CHIPS, cycles_of, measure, resident_programs
from tests.kernels.audit.sass import Instruction, Turn, exposed_loads, hot_turn, parse, turn_time


def listing(text: str) -> str:
    """Lines as nvdisasm prints them; those that end with a colon are labels."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(f"{s}" if s.endswith(":") else f"        /*{16 * n:04x}*/                   {s} ;"
                     for n, s in enumerate(lines))  # fmt: skip


def turn(text: str, looped: bool = True) -> Turn:
    return Turn(parse(listing(text)).instructions, looped, nested=False)


def opcodes(found: Turn) -> list[str]:
    return [i.opcode for i in found.body]


def test_parsing() -> None:
    parsed = parse(listing(".L_x_0:\n@!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64]\n@P0 BRA `(.L_x_0)"))
    load, jump = parsed.instructions
    assert load == Instruction("LDG", ".E.128.CONSTANT", "R4, desc[UR4][R2.64]", "!P0")
    assert (load.nbytes, jump.guard, parsed.labels) == (16, "P0", {".L_x_0": 0})
    sizes = [i.nbytes for i in parse(listing("LDG.E R1, [R2]\nLDG.E.64 R1, [R2]\nLDG.E.U16 R1, [R2]")).instructions]
    assert sizes == [4, 8, 2]
    with pytest.raises(ValueError, match="no instruction"):
        parse("nothing")


def test_of_two_loops_the_one_with_more_bytes_per_instruction_is_hot() -> None:
    found = hot_turn(parse(listing("""
        MOV R1, R2
        .L_x_0:
        LDG.E.128 R4, desc[UR4][R2.64]
        FADD R8, R4, R8
        @P0 BRA `(.L_x_0)
        .L_x_1:
        LDG.E.128 R4, desc[UR4][R2.64]
        FMUL R8, R4, R8
        FADD R8, R4, R8
        @P1 BRA `(.L_x_1)
        EXIT
        .L_x_2:
        BRA `(.L_x_2)
    """)))
    assert opcodes(found) == ["LDG", "FADD", "BRA"] and found.looped and not found.nested


def test_a_block_out_of_line_is_no_loop_and_of_branches_the_longer_counts() -> None:
    """The last block jumps back to the main line; a kernel whose loops load nothing is one turn."""
    found = hot_turn(parse(listing("""
        LDG.E R4, desc[UR4][R2.64]
        @P0 BRA `(.L_x_1)
        FADD R8, R4, R8
        .L_x_0:
        STG.E desc[UR4][R6.64], R8
        EXIT
        .L_x_1:
        FMUL R8, R4, R8
        FMUL R8, R8, R8
        BRA `(.L_x_0)
    """)))
    assert opcodes(found) == ["LDG", "BRA", "FMUL", "FMUL", "BRA", "STG", "EXIT"]
    assert not found.looped and not found.nested


def test_nested_loops() -> None:
    """The inner loop loads nothing, so its turns in the hot loop are not known; one that loads is hot itself."""
    text = """
        .L_x_0:
        LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]
        .L_x_1:
        {}
        @P0 BRA `(.L_x_1)
        @P1 BRA `(.L_x_0)
        EXIT
    """
    outer = hot_turn(parse(listing(text.format("FADD R8, R8, R8"))))
    assert opcodes(outer) == ["LDGSTS", "FADD", "BRA", "BRA"] and outer.nested
    inner = hot_turn(parse(listing(text.format("LDG.E.128 R8, desc[UR4][R2.64]"))))
    assert opcodes(inner) == ["LDG", "BRA"] and inner.looped and not inner.nested


@pytest.mark.parametrize(
    "mark", ("UTMALDG.2D [UR8], [UR4]", "HMMA.16816.F32 R4, R8, R10, R4\nLDG.E R12, desc[UR4][R2.64]")
)
def test_bulk_copies_and_tensor_cores_mark_the_hot_loop(mark: str) -> None:
    found = hot_turn(parse(listing(f"""
        .L_x_0:
        {mark}
        FADD R8, R8, R8
        @P0 BRA `(.L_x_0)
        .L_x_1:
        LDG.E.128 R4, desc[UR4][R2.64]
        @P1 BRA `(.L_x_1)
        EXIT
    """)))
    assert opcodes(found) == [*(line.split(".")[0] for line in mark.split("\n")), "FADD", "BRA"]


LOAD = "LDG.E.128 R4, desc[UR4][R2.64]"


@pytest.mark.parametrize(
    ("text", "distances", "time"),
    (
        # Read in its own turn: the latency of 100 is paid each time, from the load on.
        (f"{LOAD}\nFADD R1, R1, R1\nFADD R8, R7, R8\nBRA `(.L_x_0)", (2,), 102),
        # Read in the next turn, three instructions on: what is left of the latency is paid.
        (f"FADD R8, R7, R8\n{LOAD}\nFADD R1, R1, R1\nBRA `(.L_x_0)", (), 101),
        # Written over before it is read.
        (f"{LOAD}\nMOV R7, R1\nFADD R8, R7, R8\nBRA `(.L_x_0)", (), 4),
        # An address in two registers, a store of four, and a matrix operand of four.
        (f"{LOAD}\nLDG.E R9, desc[UR4][R6.64]\nBRA `(.L_x_0)", (1,), 102),
        (f"{LOAD}\nSTS.128 [R1], R4\nBRA `(.L_x_0)", (1,), 102),
        (f"{LOAD}\nHMMA.16816.F32.BF16 R20, R4, R16, R20\nBRA `(.L_x_0)", (1,), 102),
        (f"{LOAD}\nISETP.GE.AND P0, PT, R5, R9, PT\nBRA `(.L_x_0)", (1,), 102),
    ),
)  # fmt: skip
def test_exposed_loads(text: str, distances: tuple[int, ...], time: float) -> None:
    found = turn(text)
    assert exposed_loads(found) == distances
    assert turn_time(found, 100) == pytest.approx(time, abs=0.5)


@pytest.mark.parametrize(("left", "time"), ((0, 102), (1, 51), (3, 25.5), (60, 4)))
def test_asynchronous_copies_in_flight(left: int, time: float) -> None:
    """With `left` groups still to come when the wait ends, left + 1 turns share one latency."""
    found = turn(f"DEPBAR.LE SB0, {left:#x}\nLDGSTS.E.128 [R9], desc[UR4][R2.64]\nLDGDEPBAR\nBRA `(.L_x_0)")
    assert exposed_loads(found) == ()
    assert turn_time(found, 100) == pytest.approx(time, rel=0.02)


def test_a_program_without_a_loop_waits_for_each_load_in_a_chain() -> None:
    chain = turn("LDG.E.64 R4, desc[UR4][R2.64]\nLDG.E R6, desc[UR4][R4.64]\nSTG.E desc[UR4][R8.64], R6\nEXIT", False)
    assert turn_time(chain, 100) == 202


@pytest.mark.parametrize(
    ("instruction", "sm_80", "sm_90"),
    (
        ("FFMA R1, R2, R3, R4", {"fma": 2}, {"fma": 1}),
        ("IMAD R1, R2, R3, R4", {"fma": 2}, {"fma": 1, "integer": 2}),
        ("HFMA2 R1, R2, R3, R4", {"half": 1}, {"fma": 1, "integer": 1}),
        ("HFMA2.BF16_V2 R1, R2, R3, R4", {"half": 2}, {"fma": 1, "integer": 1}),
        ("LOP3.LUT R1, R2, R3, R4, 0xea, !PT", {"alu": 2}, {"alu": 2}),
        ("I2F.U16 R1, R2", {"xu": 8}, {"xu": 8}),
        ("LDS.128 R4, [R1]", {"shared": 16}, {"shared": 16}),
        ("LDSM.16.MT88.4 R4, [R1]", {"shared": 16}, {"shared": 16}),
        ("LDGSTS.E.64 [R1], desc[UR4][R2.64]", {"shared": 8}, {"shared": 8}),
        ("HMMA.16816.F32.BF16 R4, R8, R10, R4", {"tensor": 8}, {"tensor": 4}),
        ("HMMA.1688.F32.TF32 R4, R8, R10, R4", {"tensor": 8}, {"tensor": 4}),
        ("HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24", {"tensor": 128}, {"tensor": 64}),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", {}, {}),
    ),
)
def test_costs(instruction: str, sm_80: dict[str, float], sm_90: dict[str, float]) -> None:
    for arch, cost in (("sm_80", sm_80), ("sm_90", sm_90)):
        assert cycles_of(turn(instruction), arch) == ({"issue": 1} | cost, ())


def test_an_opcode_without_a_rate_is_named_and_counted_as_an_issue_slot() -> None:
    found = turn("NEWOP.X R1, R2\nHMMA.16832.F32.E4M3 R4, R8, R10, R4")
    assert cycles_of(found, "sm_90") == ({"issue": 2}, ("HMMA.16832.F32.E4M3", "NEWOP"))


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    ((128, 0, 4, 4), (129, 0, 4, 3), (32, 70 << 10, 4, 3), (32, 0, 8, 8), (16, 0, 1, 32), (255, 0, 1, 8)),
)
def test_programs_of_a_multiprocessor(registers: int, shared: int, warps: int, programs: int) -> None:
    assert resident_programs(CHIPS["sm_90"], registers, shared, warps) == programs


def test_measure() -> None:
    """Of 10 instructions 6 are logic: 12 cycles of a scheduler for a warp, 4 warps on 4 schedulers."""
    found = turn("\n".join(["DEPBAR.LE SB0, 0x0", "LDGSTS.E.64 [R9], desc[UR4][R2.64]", "LDGDEPBAR",
                            *["LOP3.LUT R1, R2, R3, R4, 0xea, !PT"] * 6, "BRA `(.L_x_0)"]))  # fmt: skip
    hot = measure(found, "sm_90", registers=128, shared_nbytes=0, warps=4, turn_nbytes=1024)
    assert (hot.instructions, hot.cycles, hot.pipe, hot.programs) == (10, 12, "alu", 4)
    assert (hot.loaded_nbytes, hot.async_nbytes, hot.exposed_loads, hot.bulk_copies) == (0, 8, 0, 0)
    assert hot.issue == pytest.approx(1024 / 12 * 132 * 1.755e9 / 4.8e12)
    # One group of each of 4 programs is on its way, but for the 8 cycles before it is issued.
    assert hot.in_flight_nbytes == pytest.approx(4 * 1024 * 1755 / 1763, rel=0.01)
    assert hot.asked_nbytes == pytest.approx(4.8e12 / 132 * 1e-6)
