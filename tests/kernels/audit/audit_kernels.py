"""Compile every Triton kernel configuration ahead of time, without a GPU, and print what the compiler made of it.

    python -m tests.kernels.audit [--json] [--suite] [--changed] [--record] [--arch sm_90 ...] [--only PART ...]

For each configuration that a file of `cases/` names in `audit_cases()` and each target: registers and stack of a
thread, shared memory of a block, 128-bit loads, tensor-core instructions, spills, bytes moved by a call and the share
of them that is the minimum. On NVIDIA these are read from SASS by the disassembler that Triton carries; for gfx942 from
the assembly. `problems` lists what breaks the bounds that the test suite holds. `--record` keeps what was read from
machine code here, by a hash of everything it follows from; `--changed`, which the suite asks for,
takes what it finds there and compiles the rest (`record.py`).

NVIDIA targets also show what the hot loop allows (a whole program, where no loop loads): its instructions (`hot`), the
cycles that a scheduler needs for a warp's turn and the pipe that takes them, programs that a multiprocessor holds at
once, `issue`, the bandwidth that this allows over the memory's, `flight`, KiB that these programs keep in flight beside
what the memory's bandwidth asks for, and `exposed`, loads into registers that the turn itself waits for. `chips` has
the figures of an A100 and an H200 and says what is left out. A kernel for which `benchmarks.gpu` has an aim, a share of
a copy's bandwidth, is held to an `issue` that allows it, with a quarter to spare, and to hiding what is exposed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kernels.audit import record
from tests.kernels.audit.chips import Hot, measure
from tests.kernels.audit.sass import WARP, Instruction, hot_turn, parse

if TYPE_CHECKING:
    from tests.kernels.audit.audit_case import AuditCase

ARCHS = ("sm_80", "sm_90", "gfx942")
# Dynamic shared memory that one block may take (CUDA C++ programming guide, table of compute capabilities; CDNA 3 ISA).
SHARED_NBYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
# Issue slots count no barrier, bank conflict or wait for arithmetic: a fifth of them is left for these.
LEAST_ISSUE = 1.25
# Of the data sheet's bandwidth, what a copy reaches (an H200: 4.3 of 4.8 TB/s); aims are shares of that.
COPY = 0.9


@dataclass(frozen=True)
class Audited:
    """One configuration on one target."""

    name: str
    arch: str
    registers: int
    stack_nbytes: int
    spills: int
    shared_nbytes: int
    loads_128: int
    loads_64: int
    tensor_instructions: int
    bytes_moved: int
    minimum_share: float
    problems: tuple[str, ...]
    hot: Hot | None = None  # on NVIDIA


def discover() -> list[AuditCase]:
    """The cases of all files of `cases/`.

    Raises:
        ValueError: Two cases have one name, or an operator with a `gpu.py` has no file.
    """
    from forebay.kernels.cpu_support.sources import KERNELS

    files = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))
    missing = sorted({path.parent.name for path in KERNELS.glob("*/*/gpu.py")} - set(files))
    if missing:
        raise ValueError(f"audit: there is no file in cases/ for {', '.join(missing)}")
    cases: list[AuditCase] = []
    for name in files:
        cases += importlib.import_module(f"tests.kernels.audit.cases.{name}").audit_cases()
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"audit: these cases share a name: {', '.join(twice)}")
    return cases


def compile_case(case: AuditCase, arch: str) -> Any:
    """triton.compile of a case for a target; nothing but the compiler is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    signature = {name: case.signature.get(name, "constexpr") for name in case.fn.arg_names}
    place = {name: i for i, name in enumerate(case.fn.arg_names)}
    attrs = {(place[name],): [["tt.divisibility", 16]] for name in case.divisible}
    left_out = {name: parameter.default for name, parameter in case.fn.signature.parameters.items()
                if signature[name] == "constexpr" and parameter.default is not parameter.empty}
    source = ASTSource(fn=case.fn, signature=signature, constexprs=left_out | dict(case.constants), attrs=attrs)
    stages = case.amd_stages or case.num_stages if amd else case.num_stages
    options = {"num_warps": case.num_warps, "num_stages": stages}
    if case.max_registers and not amd:
        options["maxnreg"] = case.max_registers
    return triton.compile(source, target=target, options=options)


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Counts:
    """What a target's assembly says."""

    registers: int
    stack_nbytes: int
    spills: int
    loads_128: int
    loads_64: int  # or wider
    tensor_instructions: int


def count_sass(usage: str, instructions: Sequence[Instruction]) -> Counts:
    """Counts from `cuobjdump -res-usage` of a cubin and its instructions."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"audit: no resource usage in {usage!r}")
    opcodes = [i.opcode for i in instructions]
    loads = [i.nbytes for i in instructions if i.opcode in ("LDG", "LDGSTS")]
    bulk = opcodes.count("UTMALDG")  # a bulk tensor copy moves whole lines
    return Counts(
        registers=int(found[1]),
        stack_nbytes=int(found[2]) + int(found[3]),
        spills=opcodes.count("STL") + opcodes.count("LDL"),
        loads_128=bulk + loads.count(16),
        loads_64=bulk + loads.count(16) + loads.count(8),
        tensor_instructions=sum(opcode.endswith("MMA") for opcode in opcodes),
    )


def count_amdgcn(text: str) -> Counts:
    """Counts from the assembly of an AMD kernel and the metadata at its end."""

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return Counts(
        registers=number(r"\.vgpr_count:\s+(\d+)"),
        stack_nbytes=number(r"\.private_segment_fixed_size:\s+(\d+)"),
        spills=number(r"\.vgpr_spill_count:\s+(\d+)") + number(r"\.sgpr_spill_count:\s+(\d+)"),
        loads_128=len(re.findall(r"\b(?:global|buffer|flat)_load_dwordx4\b", text)),
        loads_64=len(re.findall(r"\b(?:global|buffer|flat)_load_dwordx[24]\b", text)),
        tensor_instructions=len(re.findall(r"\bv_mfma_", text)),
    )


def disassemble(compiled: Any) -> tuple[str, str]:
    """(resource usage, SASS) of a kernel compiled for NVIDIA."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        return _run(_tool("cuobjdump"), "-res-usage", str(cubin)), _run(_tool("nvdisasm"), "-c", str(cubin))


def hot_problems_of(hot: Hot, aim: float) -> tuple[str, ...]:
    """What keeps a kernel from the share `aim` of a copy's bandwidth."""
    found = []
    loaded = (hot.loaded_nbytes + hot.async_nbytes) * WARP * hot.warps
    if not hot.turn_nbytes:
        found.append("turn_nbytes is not given")
    elif hot.looped and not hot.bulk_copies and loaded < hot.turn_nbytes:
        found.append(f"the hot loop loads {loaded} bytes a turn, turn_nbytes is {hot.turn_nbytes}")
    if hot.nested:
        found.append("a loop inside the hot loop, whose turns are not known")
    asked = LEAST_ISSUE * aim * COPY
    if hot.issue < asked:
        by = f"{hot.cycles:.0f} cycles of {hot.pipe}"
        found.append(f"issuing allows {hot.issue:.2f} of the memory's bandwidth ({by}), {asked:.2f} is asked")
    if hot.exposed_loads and hot.in_flight_nbytes < aim * COPY * hot.asked_nbytes:
        found.append(f"waits for {hot.exposed_loads} loads with {_flight(hot)} KiB in flight")
    return tuple(found)


def _flight(hot: Hot) -> str:
    return f"{hot.in_flight_nbytes / 1024:.0f}/{hot.asked_nbytes / 1024:.0f}"


def problems_of(
    case: AuditCase, arch: str, counts: Counts, shared_nbytes: int, hot: Hot | None = None
) -> tuple[str, ...]:
    """The bounds that a configuration breaks on a target; compiling and shared memory are all that is asked on AMD."""
    found = []
    if shared_nbytes > SHARED_NBYTES[arch]:
        found.append(f"{shared_nbytes} bytes of shared memory, the limit is {SHARED_NBYTES[arch]}")
    if case.bytes_moved > case.most_moved * case.minimum_bytes:
        found.append(f"moves {case.bytes_moved / max(1, case.minimum_bytes):.3f} times the minimum")
    if arch.startswith("gfx"):
        return tuple(found)
    if counts.spills:
        found.append(f"{counts.spills} local loads and stores")
    if counts.stack_nbytes:
        found.append(f"{counts.stack_nbytes} bytes of stack")
    bits = 8 * case.load_nbytes
    wide = {128: counts.loads_128, 64: counts.loads_64}.get(bits, case.main_operands)
    if wide < case.main_operands:
        found.append(f"{wide} {bits}-bit loads for {case.main_operands} main operands")
    if case.uses_dot and not counts.tensor_instructions:
        found.append("no tensor-core instruction")
    if case.aim and hot is not None:
        found += hot_problems_of(hot, case.aim)
    return tuple(found)


def audit_case(case: AuditCase, arch: str, known: Mapping[str, Any] | None = None) -> Audited:
    """Compile one case for one target, or take its facts from `known`. A compiler's refusal is a problem, no error."""
    share = case.minimum_bytes / max(1, case.bytes_moved)
    if known is not None:
        counts, hot = Counts(**{f.name: known[f.name] for f in fields(Counts)}), record.hot_of(known)
        return _judged(case, arch, counts, known["shared_nbytes"], hot)
    try:
        compiled = compile_case(case, arch)
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        message = f"does not compile: {type(error).__name__}: {reason}"
        return Audited(case.name, arch, 0, 0, 0, 0, 0, 0, 0, case.bytes_moved, share, (message,))
    shared_nbytes = compiled.metadata.shared
    hot = None
    if arch.startswith("gfx"):
        counts = count_amdgcn(compiled.asm["amdgcn"])
    else:
        usage, sass = disassemble(compiled)
        listing = parse(sass)
        counts = count_sass(usage, listing.instructions)
        turn = hot_turn(listing)
        hot = measure(turn, arch, counts.registers, shared_nbytes, case.num_warps, case.turn_nbytes)
    return _judged(case, arch, counts, shared_nbytes, hot)


def _judged(case: AuditCase, arch: str, counts: Counts, shared_nbytes: int, hot: Hot | None) -> Audited:
    return Audited(
        case.name, arch, counts.registers, counts.stack_nbytes, counts.spills, shared_nbytes, counts.loads_128,
        counts.loads_64, counts.tensor_instructions, case.bytes_moved, case.minimum_bytes / max(1, case.bytes_moved),
        problems_of(case, arch, counts, shared_nbytes, hot), hot,
    )  # fmt: skip


def _audit_by_name(name: str, arch: str, known: Mapping[str, Any] | None) -> Audited:
    return audit_case(_cases_by_name()[name], arch, known)


@functools.cache
def _cases_by_name() -> dict[str, AuditCase]:
    return {case.name: case for case in discover()}


def select(
    cases: Iterable[AuditCase], archs: Sequence[str], only: Sequence[str], suite: bool
) -> list[tuple[AuditCase, str]]:
    """(case, target) of every case that has one of `only` in its name, or of all, for the targets it is meant for."""
    return [
        (case, arch)
        for case in cases
        if (case.in_suite or not suite) and (not only or any(part in case.name for part in only))
        for arch in archs
        if arch in case.archs
    ]


def audit(
    archs: Sequence[str] = ARCHS, only: Sequence[str] = (), suite: bool = False, jobs: int = 2,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Audited]:
    """Audit the cases selected, `jobs` at a time; with suite only those that the test suite builds. What stands in
    `known`, by `record.key_of`, is not compiled."""
    chosen = select(_cases_by_name().values(), archs, only, suite)
    facts = [known.get(record.key_of(*pair)) for pair in chosen] if known else [None] * len(chosen)
    if jobs == 1 or None not in facts:
        return [audit_case(case, arch, found) for (case, arch), found in zip(chosen, facts, strict=True)]
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(_audit_by_name, (c.name for c, _ in chosen), (a for _, a in chosen), facts))


def _hot_cells(hot: Hot | None) -> tuple[str, ...]:
    if hot is None:
        return ("-",) * 6
    known = hot.issue > 0.0
    return (
        str(hot.instructions), f"{hot.cycles:.0f} {hot.pipe}", str(hot.programs), f"{hot.issue:.2f}" if known else "-",
        _flight(hot) if known else "-", str(hot.exposed_loads),
    )  # fmt: skip


def table(results: Sequence[Audited]) -> str:
    """The results as aligned text; after the problems, opcodes of the hot loop whose rate is not known."""
    head = ("configuration", "arch", "regs", "stack", "spills", "shared", "ld128", "ld64", "mma", "MB moved",
            "minimum", "hot", "cycles", "progs", "issue", "flight", "exposed", "")
    rows = []
    for r in results:
        unknown = r.hot.unknown_opcodes if r.hot else ()
        notes = (*r.problems, *((f"no rate known of {', '.join(unknown)}",) if unknown else ()))
        rows.append(
            (r.name, r.arch, str(r.registers), str(r.stack_nbytes), str(r.spills), str(r.shared_nbytes),
             str(r.loads_128), str(r.loads_64), str(r.tensor_instructions), f"{r.bytes_moved / 1e6:.2f}",
             f"{r.minimum_share:.1%}", *_hot_cells(r.hot), "; ".join(notes))
        )  # fmt: skip
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
    lines = []
    for row in (head, *rows):
        cells = [row[i].ljust(width) if i < 2 else row[i].rjust(width) for i, width in enumerate(widths)]
        lines.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit, print, and return 1 if any configuration breaks a bound."""
    parser = argparse.ArgumentParser(prog="tests.kernels.audit", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON list in place of the table")
    parser.add_argument("--suite", action="store_true", help="only the cases that the test suite builds")
    parser.add_argument("--changed", action="store_true", help="compile only what the record does not hold")
    parser.add_argument("--record", action="store_true", help="keep the facts, in place of the record")
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="cases with one of these in their names")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    chosen = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler; unset it")
    if chosen.record and (chosen.suite or chosen.only or set(chosen.arch) != set(ARCHS)):
        parser.error("--record keeps all configurations on all targets; leave out --suite, --only and --arch")
    known = record.load() if chosen.changed else None
    results = audit(chosen.arch, chosen.only, chosen.suite, chosen.jobs, known)
    if chosen.record:
        pairs = select(_cases_by_name().values(), chosen.arch, (), False)
        record.save({record.key_of(*pair): found for pair, found in zip(pairs, results, strict=True)})
    print(json.dumps([asdict(r) for r in results], indent=1) if chosen.json else table(results))
    return int(any(r.problems for r in results))

