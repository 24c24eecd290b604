"""A bound launch is found once: what Python does for it afterwards, counted on Triton's real path up to the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.all
def test_later_launches_enter_few_functions_and_compile_nothing() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "benchmarks.launch_overhead", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {row["name"]: row for row in json.loads(done.stdout)}
    assert {"rms_norm", "layer_norm", "dequantize_rows", "linear_split", "decode_attention"} <= found.keys()
    for name, row in found.items():
        # the launch itself and the driver's launcher, and one function around the launches that share a scratch
        assert row["frames"] <= 2 * row["launches"] + 1, name
        assert row["kernels"] == row["launches"] == 1, name
