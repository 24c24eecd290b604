"""benchmarks.gpu has a case of every operator, its checks pass under the interpreter, and it needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import run_code

ROOT = Path(__file__).parents[2]
FAST = "rms_norm,layer_norm,rotary,kv_append,kv_append_q,activation_append_q,dequantize_rows"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.all
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
    ops = {file.parent.name for file in (ROOT / "kernels").glob("*/*/gpu.py")}
    assert {"linear", "attention_q", "rms_norm"} < ops
    code = "from benchmarks.gpu import all_cases; print(*{c.op for f in all_cases(True, set()).values() for c in f})"
    done = run_code(code)
    cases = {"linear_q" if op in ("linear_w4", "linear_w8") else op for op in done.stdout.split()}
    assert ops <= cases, done.stderr


def test_what_cannot_be_captured_is_timed_by_events_and_a_ceiling_that_fails_costs_itself_alone() -> None:
    code = """
import math, torch
from benchmarks import gpu
from benchmarks.gpu_cases import timing
def refuse(calls, repeats=30):
    raise RuntimeError("operation not permitted when stream is capturing")
timing.graph_time_s, timing.event_time_s = refuse, lambda calls, repeats=30: 0.5
timing._upload_rate = lambda: refuse([])
torch.cuda.is_available = lambda: True
empty = torch.empty
torch.empty = lambda *shape, device=None, pin_memory=False, **kw: empty(*shape, **kw)
torch.randn = lambda *shape, device=None, **kw: empty(*shape, **kw)
found = timing.ceilings()
assert found["copy_bytes_per_s"] == 2 * (1 << 30) / 0.5, found
assert math.isnan(found["host_to_device_bytes_per_s"]) and found["matmul_bf16_flop_per_s"] > 0
assert found["read_bytes_per_s"] == (1 << 30) / 0.5, found
assert len(timing.uncaptured) == 4 and "capturing" in timing.uncaptured[0] and "not measured" in timing.uncaptured[3]
assert abs(gpu.bandwidth_met(4_000_000, 3.5e-6, 4e12) - 1) < 1e-9, "bytes take 1 us, and 2.5 us are anybody's"
assert abs(gpu.bandwidth_met(40_000_000, 20e-6, 4e12) - 0.5) < 1e-9
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr


def test_a_wrong_result_is_a_failure() -> None:
    code = """
import torch
from benchmarks.gpu import run_case
from benchmarks.gpu_cases.case import Case, Place, Work
place = Place(torch.device("cpu"), tiny=True)
for error in (0.5, float("nan")):
    row = run_case(Case("op", lambda place: Work("shape", [], lambda: error, 1e-2, 1)), place, {})
    assert "failed" in row and "time_us" not in row, row
assert "failed" in run_case(Case("op", lambda place: 1 / 0), place, {})
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr


# Read by every Python that starts: a GPU that is the CPU under Triton's interpreter, at tiny shapes.
STAND_IN = """
import types, torch
from benchmarks.gpu_cases import case, timing
real = case.Place
case.Place = lambda device, tiny, l2_nbytes=0: real(torch.device("cpu"), True)
names = ("copy_bytes_per_s", "read_bytes_per_s", "matmul_bf16_flop_per_s", "host_to_device_bytes_per_s")
timing.ceilings = lambda: dict.fromkeys(names, 1e12)
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda *_: "Stand In"
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(L2_cache_size=1)
torch.cuda.empty_cache = lambda: None
"""


@pytest.mark.all
def test_a_run_whose_process_loses_its_gpu_in_every_case_still_writes_all_rows(tmp_path: Path) -> None:
    """Every case is checked; what then touches the GPU fails here, so each is answered by a process of its own."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "src"), str(ROOT))),
                                "TRITON_INTERPRET": "1", "OUT": str(tmp_path)}  # fmt: skip
    code = ("import os, pathlib, sys, benchmarks.gpu as gpu; gpu.RESULTS = pathlib.Path(os.environ['OUT']); "
            "sys.exit(gpu.main())")
    done = subprocess.run([sys.executable, "-c", code, "--ops", "layer_norm"], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (file,) = tmp_path.glob("Stand-In-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["op"] for row in rows} == {"layer_norm"}
    assert all(row["error"] <= row["limit"] and "AssertionError" in row["failed"] for row in rows), rows


def test_the_table_is_written_where_plans_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run adds what it timed; what it did not time stays."""
    code = """
import os, pathlib, torch, benchmarks.gpu as gpu
from forebay.kernels.operator import Product
from forebay.kernels.products.linear import choices, selection
gpu.RESULTS, selection.TABLES = (pathlib.Path(os.environ["HERE"], part) for part in ("results", "tables"))
selection.TABLES.mkdir()
torch.cuda.get_device_name = lambda *_: "Stand In"
def chosen(weight):
    selection.table_of.cache_clear()  # as in another process
    return choices.choose(Product(weight, 16, 4096, 4096), "Stand In")
before = chosen("bfloat16"), chosen("w4g64")
assert before == tuple(choices.choose(Product(w, 16, 4096, 4096), "Another") for w in ("bfloat16", "w4g64"))
row = {"op": "linear", "shape": "", "key": ("linear", 16, 4096, 4096),
       "candidates_us": {"flat_32x128_s2": 5.0, "flat_64x64_s1": 4.0}}
packed = row | {"key": ("linear_w4", 16, 4096, 4096), "candidates_us": {"flat_128x128_s7": 1.0}}
assert len(gpu.write([{"op": "rms_norm", "shape": ""}], {})) == 2 and chosen("bfloat16") == before[0]
assert not list(selection.TABLES.iterdir())
gpu.write([row], {})
assert chosen("bfloat16") == "flat_64x64_s1" and chosen("w4g64") == before[1]
files = gpu.write([packed], {})
assert chosen("bfloat16") == "flat_64x64_s1" and chosen("w4g64") == "flat_128x128_s7"
print(*files)
"""
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    place, copy = tmp_path / "tables" / "selection-Stand-In.json", tmp_path / "out" / "selection-Stand-In.json"
    assert {str(place), str(copy)} < set(done.stdout.split())
    assert place.read_text() == copy.read_text()
