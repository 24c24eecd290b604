"""What the chips that kernels are compiled for can do: how fast they issue a hot turn, how much they keep in flight.

`measure` compares what `sass` found in a kernel with a chip: the bandwidth that the schedulers' issue slots and pipes
allow, and the bytes that the programs of a multiprocessor keep in flight beside what its share of the bandwidth asks
for by Little's law. Rates are those of the table "Throughput of Native Arithmetic Instructions" of NVIDIA's CUDA C++
guides, columns 8.0 and 9.0: results a cycle of a multiprocessor, whose four schedulers issue an instruction of 32 lanes
a cycle each. Which pipe takes an opcode is from the Nsight Compute guide (section Pipelines). Where these leave a
choice the faster rate is taken. Bank conflicts, barriers and the latency of arithmetic are left out, so `issue` is a
bound from above. Of branches the longer is taken, loads are taken to come from device memory but for those that a case
names, and a multiprocessor to hold all the programs that it has room for, however small the grid is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tests.kernels.audit.sass import WARP, Instruction, Turn, exposed_loads, turn_time

SCHEDULERS = 4


@dataclass(frozen=True)
class Chip:
    """A chip: limits of a multiprocessor (CUDA C++ programming guide, table of compute capabilities), and rates.

    The clock is what the chip holds under load, which is less than its maximum: fewer issue slots a second.
    """

    name: str
    processors: int
    clock_hz: float
    bandwidth: float  # bytes a second, data sheet
    shared_nbytes: int  # of a multiprocessor, 1 KiB of it taken by each resident block
    mma_fma: int  # 16-bit fused multiply-adds a cycle of one scheduler's tensor core; TF32 takes twice as long
    warps: int = 64
    blocks: int = 32
    registers: int = 65536
    # Assumed: a load's latency while memory is nearly saturated (unloaded it is about half of that).
    latency_s: float = 1e-6


CHIPS = {
    # 312 TFLOP/s dense over 108 x 4 schedulers at the boost clock of 1.41 GHz.
    "sm_80": Chip("A100 SXM 80 GB", 108, 1.41e9, 2.039e12, 164 << 10, 256),
    # 989 TFLOP/s dense over 132 x 4 schedulers at 1.83 GHz. Boost is 1.98 GHz at most, 1.755 GHz under load.
    "sm_90": Chip("H200 SXM", 132, 1.755e9, 4.8e12, 228 << 10, 512),
}

# kind -> opcodes. What a kind costs is in COSTS; memory and tensor instructions are costed by their widths.
KINDS = {
    "fp32": "FFMA FMUL FADD",
    "imad": "IMAD",
    "half": "HFMA2 HADD2 HMUL2",
    # 64 results a cycle; conversions between fp32 and packed 16-bit values run here since compute capability 8.0.
    "logic": "LOP3 SHF IADD3 PRMT SEL ISETP LEA IMNMX VIMNMX VIMNMX3 PLOP3 FSETP FMNMX IABS FSEL SGXT BMSK LOP VIADD "
    "VIADDMNMX HMNMX2 HSETP2 P2R R2P I2FP F2FP MOV VOTE",
    # 16 results a cycle: reciprocals, exponentials, bit counts, other conversions.
    "slow": "MUFU I2F F2I F2F POPC FLO BREV",
    "reduce": "REDUX",
    # Counted as an issue slot alone: control, constants, the uniform pipe, and what has no published rate.
    "issue": "BRA BRX EXIT CALL RET BSSY BSYNC BREAK WARPSYNC NOP BAR DEPBAR LDGDEPBAR MEMBAR ERRBAR CGAERRBAR CCTL "
    "FENCE WARPGROUP YIELD LDC ULDC S2R S2UR CS2R R2UR VOTEU FCHK UIADD3 USHF UMOV ULEA UISETP UIMAD USEL ULOP3 UPLOP3 "
    "USGXT UFLO UPOPC UPRMT UBREV UP2UR UR2UP LDG STG LDL STL RED ATOM ATOMG ATOMS UTMALDG UTMASTG UBLKCP SYNCS ELECT",
    "shared": "LDS STS LDSM STSM LDGSTS SHFL",
    "tensor": "HMMA HGMMA",
}  # fmt: skip
KIND_OF = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes.split()}

# target -> kind -> pipe -> cycles of one scheduler. Compute capability 9.0 has 32 lanes of fp32, of which 16 also
# multiply integers and all together take packed halves; 8.0 has 16 lanes for fp32 and integers, others for halves.
COMMON: dict[str, dict[str, float]] = {"logic": {"alu": 2}, "slow": {"xu": 8}, "reduce": {"redux": 8}, "issue": {}}
COSTS: dict[str, dict[str, dict[str, float]]] = {
    "sm_80": COMMON | {"fp32": {"fma": 2}, "imad": {"fma": 2}, "half": {"half": 1}},
    "sm_90": COMMON | {"fp32": {"fma": 1}, "imad": {"fma": 1, "integer": 2}, "half": {"fma": 1, "integer": 1}},
}
# Shared memory serves 32 banks of 4 bytes a cycle (CUDA C++ programming guide), so a scheduler 128 bytes in four.
SHARED_NBYTES_A_CYCLE = 128
MMA = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "1684": 16 * 8 * 4}


def _cost(instruction: Instruction, arch: str) -> Mapping[str, float] | None:
    """Cycles of a scheduler on each pipe that the instruction takes; None where no rate is known."""
    kind = KIND_OF.get(instruction.opcode)
    if kind == "shared":
        if instruction.opcode in ("LDSM", "STSM"):
            matrices = re.search(r"88\.(\d)", instruction.modifiers)
            nbytes = 128 * int(matrices[1] if matrices else 1)
        else:
            nbytes = WARP * max(4, instruction.nbytes)
        return {"shared": SCHEDULERS * nbytes / SHARED_NBYTES_A_CYCLE}
    if kind == "tensor":
        shape = re.match(r"\.(?:(16816|1688|1684)|(\d+)x(\d+)x(\d+))\b", instruction.modifiers)
        if shape is None or not instruction.modifiers.endswith(("F32", "F16", "BF16", "TF32")):
            return None
        # Four warps share the product of an HGMMA.
        products = MMA[shape[1]] if shape[1] else int(shape[2]) * int(shape[3]) * int(shape[4]) // 4
        return {"tensor": (2 if "TF32" in instruction.modifiers else 1) * products / CHIPS[arch].mma_fma}
    if arch == "sm_80" and kind == "half" and "BF16" in instruction.modifiers:
        return {"half": 2}  # half of fp16's rate on compute capability 8.0
    return COSTS[arch].get(kind or "")


def cycles_of(turn: Turn, arch: str) -> tuple[dict[str, float], tuple[str, ...]]:
    """(cycles of a scheduler for one warp's turn on each pipe, and for the issue; opcodes that have no known rate).

    The largest of the cycles is what the turn takes at least.
    """
    pipes: Counter[str] = Counter({"issue": len(turn.body)})
    unknown = set()
    for instruction in turn.body:
        cost = _cost(instruction, arch)
        if cost is None:
            unknown.add(instruction.opcode + (instruction.modifiers if instruction.opcode in KIND_OF else ""))
        else:
            pipes.update(cost)
    return dict(pipes), tuple(sorted(unknown))


@dataclass(frozen=True)
class Hot:
    """The hot turn of one configuration on one chip; a turn is a whole program where no loop loads."""

    looped: bool
    nested: bool  # a loop inside is counted as if it ran once
    instructions: int
    cycles: float  # of a scheduler, for one warp's turn
    pipe: str  # that takes these cycles
    loaded_nbytes: int  # into registers, by a thread
    async_nbytes: int  # straight into shared memory, by a thread
    bulk_copies: int  # whose bytes the code does not say
    exposed_loads: int  # into registers, read in the turn that issued them
    warps: int  # of a program
    turn_nbytes: int  # that a program's turn moves from and to device memory, as the case has it
    programs: int  # that one multiprocessor holds at once
    issue: float  # bandwidth that issuing allows over the chip's; 0: the bytes of a turn are not known
    in_flight_nbytes: float  # of a multiprocessor on average, while nothing but memory is waited for
    asked_nbytes: float  # that must be in flight for the chip's bandwidth
    unknown_opcodes: tuple[str, ...]  # without a rate, counted as issue slots


def measure(turn: Turn, arch: str, registers: int, shared_nbytes: int, warps: int, turn_nbytes: int) -> Hot:
    """A turn of a kernel whose programs have so many warps, registers a thread and bytes of shared memory.

    turn_nbytes is what a program's turn moves from and to device memory. Every load is taken to come from there.
    """
    chip = CHIPS[arch]
    pipes, unknown = cycles_of(turn, arch)
    pipe = max(pipes, key=lambda name: pipes[name])
    cycles = pipes[pipe]
    programs = resident_programs(chip, registers, shared_nbytes, warps)
    busy = min(SCHEDULERS, programs * warps)
    latency = chip.latency_s * chip.clock_hz
    time = turn_time(turn, latency)
    return Hot(
        looped=turn.looped,
        nested=turn.nested,
        instructions=len(turn.body),
        cycles=cycles,
        pipe=pipe,
        loaded_nbytes=turn.nbytes("LDG"),
        async_nbytes=turn.nbytes("LDGSTS"),
        bulk_copies=turn.count("UTMALDG"),
        exposed_loads=len(exposed_loads(turn)),
        warps=warps,
        turn_nbytes=turn_nbytes,
        programs=programs,
        issue=turn_nbytes * busy / (warps * cycles) * chip.processors * chip.clock_hz / chip.bandwidth,
        in_flight_nbytes=programs * turn_nbytes * latency / time,
        asked_nbytes=chip.bandwidth / chip.processors * chip.latency_s,
        unknown_opcodes=unknown,
    )


def resident_programs(chip: Chip, registers: int, shared_nbytes: int, warps: int) -> int:
    """Blocks of so many warps that one multiprocessor holds at once.

    Registers are given out in 256s to a warp and to four warps at a time, as NVIDIA's occupancy calculator has it.
    """
    a_warp = math.ceil(max(1, registers) * WARP / 256) * 256
    by_registers = chip.registers // a_warp // SCHEDULERS * SCHEDULERS // warps
    by_shared = chip.shared_nbytes // (shared_nbytes + 1024)
    return min(by_registers, by_shared, chip.warps // warps, chip.blocks)
