"""Every kernel compiles ahead of time within its bounds, and the audit sees what breaks them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.kernels.gpu.audit_case import AuditCase

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
# By its path: in this suite the name `benchmarks` is the folder of this test.
spec = importlib.util.spec_from_file_location("kernel_audit", ROOT / "benchmarks" / "kernel_audit.py")
assert spec is not None and spec.loader is not None
kernel_audit = sys.modules["kernel_audit"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel_audit)
Audited, Counts = kernel_audit.Audited, kernel_audit.Counts
problems_of = kernel_audit.problems_of

# The interpreter must not stand in the place of the compiler.
ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "0"}


@pytest.fixture(scope="module")
def audited() -> list[dict]:
    """What the command line prints for the cases of the suite, made in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.kernel_audit", "--json", "--suite", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_no_configuration_breaks_a_bound(audited: list[dict]) -> None:
    broken = [f"{r['name']} {r['arch']}: {'; '.join(r['problems'])}" for r in audited if r["problems"]]
    assert not broken, "\n".join(broken)


def test_the_counts_are_of_real_kernels(audited: list[dict]) -> None:
    """Bounds alone would pass on empty output: each target is there, and linear has what it is made of."""
    assert {r["arch"] for r in audited} == set(kernel_audit.ARCHS)
    assert all(r["registers"] > 0 for r in audited)
    for r in audited:
        assert r["spills"] == 0 or r["arch"].startswith("gfx")
        if "linear" in r["name"] and r["arch"] != "gfx942":
            assert r["loads_128"] >= 1
            assert (r["tensor_instructions"] > 0) == ("/gemv/" not in r["name"])
            assert r["minimum_share"] >= 1 / 1.05


def test_every_file_with_kernels_has_cases() -> None:
    """A file of kernels/gpu that defines a kernel to launch is among the cases discovered."""
    command = (
        "import json; from benchmarks.kernel_audit import discover; "
        "print(json.dumps(sorted({c.fn.__module__.split('.')[-1] for c in discover()})))"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = set(json.loads(done.stdout))
    folder = ROOT / "kernels" / "gpu"
    launched = {path.stem for path in folder.glob("*.py") if "kernel[" in path.read_text()}
    assert launched - {"linear_w4", "linear_w8"} <= seen, launched - seen


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
    assert kernel_audit.count_sass(usage, sass) == Counts(40, 16, 1, 2, 3, 2)


def test_counting_amd_assembly() -> None:
    text = """
        global_load_dwordx4 v[0:3], v4, s[0:1]
        global_load_dwordx2 v[0:1], v4, s[0:1]
        v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
        .private_segment_fixed_size: 0
        .vgpr_count:     88
        .vgpr_spill_count: 0
    """
    assert kernel_audit.count_amdgcn(text) == Counts(88, 0, 0, 1, 2, 1)


def test_the_table_names_every_problem() -> None:
    result = Audited("op/a", "sm_90", 64, 8, 0, 0, 2, 2, 8, 100, 1.0, ("8 bytes of stack",))
    lines = kernel_audit.table([result]).splitlines()
    assert len(lines) == 2 and lines[1].startswith("op/a") and lines[1].endswith("8 bytes of stack")
