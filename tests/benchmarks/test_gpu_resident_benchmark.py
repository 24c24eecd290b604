"""benchmarks.gpu_resident runs every contestant, here with the CPU in the GPU's place and a small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import run_code

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
CODE = """
import sys, torch, benchmarks.gpu_cases.offloaded as offloaded, benchmarks.gpu_resident as bench
from pathlib import Path
from forebay.rewriter.machine.profile import Machine

bench.GPU = offloaded.GPU = "cpu"
bench.STEPS = 3
for job in bench.jobs("tiny"):
    row = bench.measure(Path(sys.argv[1]), Machine.default(), job)
    assert row["steps"] == 3 and 0 < row["spread_s"][0] <= row["step_s"] <= row["spread_s"][1], row
    print(bench.line(job, row, 1e9))
    assert "FAILED: why" in bench.line(job, {"failed": "why"}, 1e9)
every = bench.jobs(";".join(bench.SHAPES))
assert len(every) == 6 * len(bench.CONTESTANTS) and {j["shape"] for j in every} == set(bench.SHAPES)

class Late:
    def ask(self, number, limit_s, most_s):
        raise AssertionError("no job is begun without time")

kept = []
bench.STARTED -= bench.LIMIT_S
bench.run(Late(), "135M;8B", bench.LIMIT_S, lambda job, row: kept.append(row))
assert len(kept) == len(bench.jobs("135M;8B")) == 16 and all("no time left" in row["skipped"] for row in kept)
"""


@pytest.mark.all
def test_every_contestant_decodes_and_late_jobs_are_named(tmp_path: Path) -> None:
    done = run_code(CODE, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all("tokens/s" in line for line in lines), lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_resident"], cwd=ROOT, env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("--tiny runs without one")
