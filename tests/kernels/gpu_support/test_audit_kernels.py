"""Every kernel compiles ahead of time within its bounds, and the audit sees what breaks them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from selection import ALL

from forebay.kernels.attention.decode_attention.decode_shares import lane_count, product, resident_programs
from forebay.kernels.formats import row_sizes
from tests.kernels.audit import audit_kernels, record
from tests.kernels.audit.audit_case import AuditCase
from tests.kernels.audit.audit_kernels import Audited, Counts, problems_of
from tests.kernels.audit.chips import Hot
from tests.kernels.audit.sass import parse

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]

# The interpreter must not stand in the place of the compiler.
ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "0"}


@pytest.fixture(scope="module")
def audited() -> list[dict]:
    """What the command line prints for the cases of the suite, made in a process of its own. What is as it was when the
    record was made is not compiled again, but for all of it under FOREBAY_TEST_ALL."""
    changed = () if ALL else ("--changed",)
    command = [sys.executable, "-m", "tests.kernels.audit", "--json", "--suite", "--jobs", "2", *changed]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_no_configuration_breaks_a_bound(audited: list[dict]) -> None:
    broken = [f"{r['name']} {r['arch']}: {'; '.join(r['problems'])}" for r in audited if r["problems"]]
    assert not broken, "\n".join(broken)


def test_the_counts_are_of_real_kernels(audited: list[dict]) -> None:
    """Bounds alone would pass on empty output: each target is there, and linear has what it is made of."""
    assert {r["arch"] for r in audited} == set(audit_kernels.ARCHS)
    assert all(r["registers"] > 0 for r in audited)
    for r in audited:
        assert r["spills"] == 0 or r["arch"].startswith("gfx")
        if r["name"].startswith(("linear/", "linear_q/")) and r["arch"] != "gfx942":
            assert r["loads_128"] >= 1
            assert (r["tensor_instructions"] > 0) == ("/gemv/" not in r["name"])
            assert r["minimum_share"] >= 1 / 1.05


def test_hot_loops_are_found_in_real_kernels(audited: list[dict]) -> None:
    seen = set()
    for r in audited:
        hot = r["hot"]
        assert (hot is None) == (r["arch"] == "gfx942")
        if hot is None:
            continue
        assert hot["unknown_opcodes"] == [], f"{r['name']}: audit/chips.py has no rate of these"
        assert hot["programs"] >= 1 and hot["cycles"] >= hot["instructions"] > 0 and not hot["nested"]
        loaded = (hot["loaded_nbytes"] + hot["async_nbytes"]) * 32 * hot["warps"]
        if r["name"].startswith(("linear/flat", "decode_attention/unified/")):
            seen.add(r["name"].split("/")[0])
            # The main loop, which loads the weights or K and V once and little beside them, and waits for no copy.
            assert hot["looped"] and hot["async_nbytes"] > 0
            assert hot["turn_nbytes"] <= loaded <= 1.5 * hot["turn_nbytes"]
        if r["name"].startswith("rms_norm"):
            seen.add("rms_norm")
            assert not hot["looped"] and hot["async_nbytes"] == 0 and hot["exposed_loads"] > 0
    assert seen == {"linear", "decode_attention", "rms_norm"}


def test_decoding_counts_the_programs_that_a_multiprocessor_holds(audited: list[dict]) -> None:
    held: dict[tuple[int, int, int, int], set[int]] = {}
    for r in audited:
        found = re.fullmatch(r"(?:decode_attention/unified|attention_q/decode-kv(\d))/(\d+)x(\d+)/(\d+)-\w+", r["name"])
        if found and r["hot"]:
            group_heads = int(found[3]) // int(found[4])
            shape = int(found[2]), 4 if r["name"].endswith("fp32") else 2, int(found[1] or 0), group_heads
            held.setdefault(shape, set()).add(r["hot"]["programs"])
    assert len(held) >= 6
    for (dim, itemsize, bits, group_heads), programs in held.items():
        group = row_sizes.cache_group_size(dim, bits) if bits else dim
        wide = product(dim, group, bits, itemsize, group_heads, amd=False).wide
        counted = resident_programs(dim, lane_count(dim, group), itemsize, bits, wide)
        assert min(programs) <= counted <= max(programs), (dim, itemsize, bits, group_heads)


SAMPLE = """
import json
from tests.kernels.audit import audit_kernels, record
cases = {c.name: c for c in audit_kernels.discover()}
known = record.load()
pairs = [(cases[f["name"]], f["arch"], f) for key, f in known.items()
         if f["name"] in cases and record.key_of(cases[f["name"]], f["arch"]) == key]
pairs = sorted(pairs, key=lambda pair: (pair[0].name, pair[1]))[%d::97]
audit = audit_kernels.audit_case
print(json.dumps([[audit(c, a) == audit(c, a, f), c.name, a] for c, a, f in pairs]))
"""


@pytest.mark.all
def test_the_record_says_what_the_compiler_makes() -> None:
    """Five or so of its rows, others every day of the month, are compiled again."""
    if not record.record_path().is_file():
        pytest.skip("no record is kept of this Triton's code: all of it was compiled")
    command = [sys.executable, "-c", SAMPLE % time.localtime().tm_mday]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(same for same, *_ in rows), rows


def test_a_changed_kernel_is_not_taken_from_the_record() -> None:
    one = AuditCase("op/a", SimpleNamespace(cache_key="a kernel"), {"x": "*fp16"}, {"N": 8})
    keys = {record.key_of(case, arch) for case, arch in (
        (one, "sm_80"), (one, "sm_90"), (replace(one, fn=SimpleNamespace(cache_key="another")), "sm_80"),
        (replace(one, constants={"N": 9}), "sm_80"), (replace(one, num_warps=8), "sm_80"),
        (replace(one, signature={"x": "*bf16"}), "sm_80"), (replace(one, turn_nbytes=1), "sm_80"))}
    assert len(keys) == 7
    assert record.key_of(replace(one, name="op/b", aim=0.5), "sm_80") in keys  # what only bounds look at


def test_the_record_is_of_the_kernels_as_they_are() -> None:
    """Else every run of the suite compiles again what changed, for minutes, and nobody notices."""
    if not record.record_path().is_file():
        pytest.skip("no record is kept of this Triton's code")
    command = ("import json; from tests.kernels.audit import audit_kernels, record; known = record.load(); "
               "print(json.dumps([c.name for c in audit_kernels.discover() for arch in c.archs "
               "if record.key_of(c, arch) not in known]))")
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not json.loads(done.stdout), "run python -m tests.kernels.audit --changed --record"


def test_every_operator_with_kernels_has_cases() -> None:
    """A gpu.py that defines a kernel to launch is among the cases discovered, and one that launches another's names
    cases of its own."""
    command = (
        "import json; from tests.kernels.audit.audit_kernels import discover; "
        "found = discover(); print(json.dumps([sorted({c.fn.__module__ for c in found}), [c.name for c in found]]))"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = set(json.loads(done.stdout)[0])
    launched = {".".join(("forebay", *path.relative_to(ROOT).with_suffix("").parts))
                for path in (ROOT / "kernels").glob("*/*/gpu*.py")
                if re.search(r"kernel\[|kernel_call\(", path.read_text())}
    others = {name for name in launched if "@triton.jit" not in (ROOT / f"{name[8:].replace('.', '/')}.py").read_text()}
    assert others == {"forebay.kernels.quantization.dequantize_rows.gpu"}
    assert any(name.startswith("dequantize_rows/") for name in json.loads(done.stdout)[1])
    launched -= others
    assert len(launched) > 11 and launched <= seen, launched - seen


CASE = AuditCase("op/a", None, {}, {}, uses_dot=True, main_operands=2, bytes_moved=100, minimum_bytes=100)
GOOD = Counts(registers=64, stack_nbytes=0, spills=0, loads_128=2, loads_64=2, tensor_instructions=8)


@pytest.mark.parametrize(
    ("counts", "shared", "problem"),
    (
        (Counts(64, 8, 0, 2, 2, 8), 0, "8 bytes of stack"),
        (Counts(64, 0, 3, 2, 2, 8), 0, "3 local loads and stores"),
        (Counts(64, 0, 0, 1, 2, 8), 0, "1 128-bit loads for 2 main operands"),
        (Counts(64, 0, 0, 2, 2, 0), 0, "no tensor-core instruction"),
        (GOOD, 200 << 10, "204800 bytes of shared memory, the limit is 166912"),
    ),
)
def test_each_bound_is_held(counts: object, shared: int, problem: str) -> None:
    assert problems_of(CASE, "sm_80", counts, shared) == (problem,)
    assert problems_of(CASE, "sm_90", GOOD, shared) == ()


def test_rows_of_less_alignment_are_held_to_narrower_loads() -> None:
    narrow = AuditCase("op/d", None, {}, {}, main_operands=2, load_nbytes=8)
    assert problems_of(narrow, "sm_90", Counts(64, 0, 0, 0, 2, 0), 0) == ()
    found = problems_of(narrow, "sm_90", Counts(64, 0, 0, 1, 1, 0), 0)
    assert found == ("1 64-bit loads for 2 main operands",)


def test_bytes_moved_are_held_to_the_minimum() -> None:
    wasteful = AuditCase("op/b", None, {}, {}, bytes_moved=106, minimum_bytes=100)
    assert problems_of(wasteful, "sm_90", GOOD, 0) == ("moves 1.060 times the minimum",)
    assert problems_of(AuditCase("op/c", None, {}, {}, bytes_moved=105, minimum_bytes=100), "sm_90", GOOD, 0) == ()


HOT = Hot(
    looped=True, nested=False, instructions=100, cycles=120.0, pipe="alu", loaded_nbytes=0, async_nbytes=16,
    bulk_copies=0, exposed_loads=0, warps=4, turn_nbytes=2048, programs=4, issue=0.91,
    in_flight_nbytes=20480.0, asked_nbytes=36864.0, unknown_opcodes=(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    (
        ({"issue": 0.89}, "issuing allows 0.89 of the memory's bandwidth (120 cycles of alu), 0.90 is asked"),
        ({"exposed_loads": 2}, "waits for 2 loads with 20/36 KiB in flight"),
        ({"nested": True}, "a loop inside the hot loop, whose turns are not known"),
        ({"async_nbytes": 8}, "the hot loop loads 1024 bytes a turn, turn_nbytes is 2048"),
    ),
)
def test_kernels_with_an_aim_are_held_to_their_hot_loop(change: dict, problem: str) -> None:
    case = AuditCase("op/e", None, {}, {}, aim=0.8)
    assert problems_of(case, "sm_90", GOOD, 0, HOT) == ()
    assert problems_of(case, "sm_90", GOOD, 0, replace(HOT, **change)) == (problem,)
    assert problems_of(replace(case, aim=0.0), "sm_90", GOOD, 0, replace(HOT, **change)) == ()


def test_loads_may_be_waited_for_where_others_are_in_flight_and_bytes_of_bulk_copies_are_not_known() -> None:
    case = AuditCase("op/f", None, {}, {}, aim=0.8)
    assert problems_of(case, "sm_90", GOOD, 0, replace(HOT, exposed_loads=2, in_flight_nbytes=0.73 * 36864.0)) == ()
    assert problems_of(case, "sm_90", GOOD, 0, replace(HOT, async_nbytes=0, bulk_copies=1)) == ()
    assert problems_of(case, "sm_90", GOOD, 0, replace(HOT, turn_nbytes=0)) == ("turn_nbytes is not given",)


def test_counting_sass() -> None:
    usage = "Function k:\n REG:40 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:600"
    sass = """
        /*0010*/ LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/ LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR4][R2.64] ;
        /*0030*/ LDGSTS.E.LTC128B [R9], desc[UR4][R2.64] ;
        /*0040*/ HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0050*/ HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24 ;
        /*0060*/ STL [R1], R4 ;
        /*0070*/ LDG.E R4, desc[UR4][R2.64] ;
        /*0080*/ LDGSTS.E.64 [R9], desc[UR4][R2.64] ;
    """
    assert audit_kernels.count_sass(usage, parse(sass).instructions) == Counts(40, 16, 1, 2, 3, 2)


def test_counting_amd_assembly() -> None:
    text = """
        global_load_dwordx4 v[0:3], v4, s[0:1]
        global_load_dwordx2 v[0:1], v4, s[0:1]
        v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
        .private_segment_fixed_size: 0
        .vgpr_count:     88
        .vgpr_spill_count: 0
    """
    assert audit_kernels.count_amdgcn(text) == Counts(88, 0, 0, 1, 2, 1)


def test_the_table_names_every_problem() -> None:
    result = Audited("op/a", "sm_90", 64, 8, 0, 0, 2, 2, 8, 100, 1.0, ("8 bytes of stack",))
    lines = audit_kernels.table([result]).splitlines()
    assert len(lines) == 2 and lines[1].startswith("op/a") and lines[1].endswith("8 bytes of stack")
    hot = replace(HOT, unknown_opcodes=("NEWOP",))
    lines = audit_kernels.table([replace(result, hot=hot)]).splitlines()
    assert lines[1].split()[11:18] == ["100", "120", "alu", "4", "0.91", "20/36", "0"]
    assert lines[1].endswith("8 bytes of stack; no rate known of NEWOP")
