"""benchmarks.gpu has a case of every op of kernels/gpu, its checks pass under the interpreter, and it needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
FAST = "rms_norm,layer_norm,rotary,kv_append,kv_append_q,activation_append_q,swiglu,sparse_values,block_copy"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_checks_pass_under_the_interpreter() -> None:
    done = run("--interpret", "--ops", FAST)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == set(FAST.split(","))
    assert all(" error " in line for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 and "no CUDA device" in done.stdout


def test_every_op_has_a_case() -> None:
    folders = (ROOT / "kernels" / "gpu", ROOT / "kernels")
    ops = set.intersection(*({file.stem for file in folder.glob("*.py")} for folder in folders))
    ops -= {"paged"}  # a layout, not an op
    code = "from benchmarks.gpu import all_cases; print(*{c.op for f in all_cases(True, set()).values() for c in f})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert ops <= set(done.stdout.split()), done.stderr


def test_a_wrong_result_is_a_failure() -> None:
    code = """
import torch
from benchmarks.gpu import run_case
from benchmarks.gpu_cases.case import Case, Place, Work
place = Place(torch.device("cpu"), tiny=True)
for error in (0.5, float("nan")):
    row = run_case(Case("op", lambda place: Work("shape", [], lambda: error, 1e-2, 1)), place, {}, {})
    assert "failed" in row and "time_us" not in row, row
assert "failed" in run_case(Case("op", lambda place: 1 / 0), place, {}, {})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
