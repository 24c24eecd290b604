"""The jobs of benchmarks.gpu_offload run, here with the CPU in the GPU's place and small models."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from budgets import WITH_KERNELS
from forked import run_code

ROOT = Path(__file__).parents[2]

CODE = """
import sys, pytest, torch, benchmarks.gpu_offload as bench
from benchmarks.gpu_cases import large_steps, offloaded, resident, whole_steps
from benchmarks.models import RandomShape
from captured_once import share_graphs
from dataclasses import replace
from pathlib import Path
from forebay.rewriter.machine.profile import Machine

share_graphs(pytest.MonkeyPatch())  # budgets are looked for by planning the same models ten times
offloaded.GPU, offloaded.LARGE, offloaded.DEVICE_SHARE = "cpu", bench.SMALL, 0.8
large_steps.BLOCK = {"batch": 6, "prompt": 24, "new_tokens": 5}
offloaded.OPT = RandomShape(64, 4, 4, 4, 192, 512, "opt")
torch.cuda.reset_peak_memory_stats = torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
torch.cuda.max_memory_reserved = torch.cuda.memory_reserved = lambda: 0
torch.cuda.mem_get_info = lambda: (1 << 30, 3 << 30)
resident.SHAPES["135M"], resident.STEPS = replace(bench.SMALL, layers=2), 3
whole_steps.SHAPE, whole_steps.STEPS = bench.SMALL, 3
machine = Machine.default()
Machine.link = lambda self, src, dst, find=Machine.link: find(self, "disk", "device")  # the only one here
jobs = bench.jobs()
assert {job["part"] for job in jobs} == set(bench.PARTS)
formats = [job for job in jobs if job["part"] == "formats"]
ways = [job for job in jobs if job["part"] == "ways" and job["windowed"] and job["way"] in (3, 4, 6, 8)]
few = [jobs[3], *ways, *whole_steps.jobs(), {"part": "shared", "weights": "w8"}, *formats[1:4:2],
       next(j for j in jobs if j.get("cache") == "kv4" != j["weights"] != "native"),
       next(j for j in jobs if j.get("shape") == "opt"),
       *(j for j in jobs if j["part"] == "blocks" and j["attention"] == "planned" and "slot_nbytes" not in j),
       next(j for j in jobs if j["part"] == "throughput" and j["source"] == "disk")]
for job in few:
    row = bench.PARTS[job["part"]](Path(sys.argv[1]), machine, job)
    print(bench.line(job, row), flush=True)
    assert "failed" not in row, row
    assert row["context_nbytes"] == 2 << 30 and row["budget_nbytes"] > 0, row
    assert job not in formats or row["streamed_nbytes"] > row["weights_nbytes"] / 4, row
torch.cuda.max_memory_reserved = lambda: 1 << 40
for job in few[-1:]:
    assert "the budget is" in bench.PARTS[job["part"]](Path(sys.argv[1]), machine, job)["failed"]
for job in resident.jobs()[:4]:
    row = bench.PARTS["resident"](Path(sys.argv[1]), machine, job)
    print(bench.line(job, row), flush=True)
    assert 0 < row["spread_s"][0] <= row["step_s"] <= row["spread_s"][1], row
if not large_steps.installed("flexgen"):
    assert "pip install" in bench.line({"part": "flexgen"}, bench.PARTS["flexgen"](Path(), machine, {"batch": 1}))
"""

RANKS = """
import sys, torch, benchmarks.gpu_offload as bench
from benchmarks.gpu_cases import offloaded, ranked
from pathlib import Path
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.measure import mesh

torch.set_num_threads(1)
offloaded.GPU, offloaded.LARGE, offloaded.DEVICE_SHARE = "cpu", bench.SMALL, 0.8
torch.cuda.reset_peak_memory_stats = torch.cuda.empty_cache = lambda: None
torch.cuda.max_memory_reserved = torch.cuda.memory_reserved = lambda: 0
torch.cuda.mem_get_info = lambda: (1 << 30, 3 << 30)
Machine.link = lambda self, src, dst, find=Machine.link: find(self, "disk", "device")  # the only one here
mesh.NBYTES, mesh.TURNS, mesh.ROUNDS = (256, 1 << 20), 2, 1
machine, jobs = Machine.default(), ranked.jobs()
bench.serve(lambda number: bench.PARTS["ranks"](Path(sys.argv[1]), machine, jobs[number]))
"""


@pytest.mark.all
@WITH_KERNELS
def test_ranks_share_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo, in processes as the benchmark starts them: tokens, and bytes and rates of each rank."""
    spec = importlib.util.spec_from_file_location("isolated", ROOT / "benchmarks" / "isolated.py")
    assert spec is not None and spec.loader is not None
    isolated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(isolated)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "src"))))
    ranks = isolated.IsolatedRanks([sys.executable, "-c", RANKS, str(tmp_path)], 2)
    try:
        rows = [ranks.ask(number, 120.0) for number in (0, 2, 5)]
    finally:
        ranks.close()
    for row in rows:
        assert "failed" not in row, row
        assert len(row["context_nbytes of ranks"]) == 2
    tensor, stages, decode = rows
    assert tensor["same"] and stages["same"] and min(tensor["streamed_nbytes of ranks"]) > 0
    assert len({*tensor["streamed_nbytes of ranks"]}) == 1 and decode["exchanges"] == 2 * 4 + 1
    assert decode["exchanged_nbytes"] == 32 * 4 * (8 * 256 + 2048) // 2
    assert decode["bound_s"] >= decode["exchanges_alone_s"] > 0 < decode["all_reduce_bytes_per_s"]


@pytest.mark.all
@WITH_KERNELS
def test_the_checks_and_measurements_of_every_kind(tmp_path: Path) -> None:
    done = run_code(CODE, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [line.split(",")[0] for line in done.stdout.splitlines()]
    assert parts == ["tokens", *["ways"] * 4, *["whole_steps"] * 2, "shared", *["formats"] * 3, "throughput",
                     *["blocks"] * 2, "throughput", *["resident"] * 4]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run_code("import sys, benchmarks.gpu_offload as bench; sys.argv[1:] = []; bench.main()")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("torch finds no GPU here")
