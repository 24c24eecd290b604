"""Seconds from the start of a process to the first token, from a checkpoint and from a bundle of it, in turn:
`python -m benchmarks.exported [MODEL]`. `--json FILE` writes all figures.

What reads take is beside it, and `import torch` alone: all weights are resident under the budget, so each start reads
them all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import forebay
from forebay.rewriter.checkpoints.packed import open_quantized
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.runtime.disk.page_cache import drop_file

PROMPT = "The capital of France is"


def start(model: Path, budget: str) -> tuple[float, float]:
    """Seconds until the first token of an answer is on stdout, by the clock and of the processor, files not cached."""
    for path in model.glob("*.safetensors"):
        drop_file(str(path))
    before, began = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "forebay", "run", str(model), PROMPT, "--new-tokens", "1", "--budget", budget]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        taken = time.perf_counter() - began
        if process.wait() or not first:
            raise SystemExit(f"forebay run {model} failed; run it by hand")
    after = os.times()
    return taken, after.children_user + after.children_system - before.children_user - before.children_system


def read_s(model: Path) -> float:
    """Seconds to read the weights once, plainly, not cached."""
    began = time.perf_counter()
    for path in model.glob("*.safetensors"):
        drop_file(str(path))
        with open(path, "rb", buffering=0) as file:
            while file.read(4 << 20):
                pass
        drop_file(str(path))
    return time.perf_counter() - began


def import_s() -> float:
    """Seconds of a process that imports torch and does nothing else."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--budget", default="2GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    asked = parser.parse_args()
    checkpoint = resolve_model(asked.model)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        bundle = forebay.export(checkpoint, Path(folder) / "bundle", budget=asked.budget)
        print(f"{sum(r.nbytes for r in open_quantized(bundle).tensors.values()) / 1e6:.0f} MB of weights")
        found: dict[str, list[tuple[float, float]]] = {"checkpoint": [], "bundle": []}
        reads, imports = [], []
        for _ in range(asked.rounds):
            for name, model in (("checkpoint", checkpoint), ("bundle", bundle)):
                found[name].append(start(model, asked.budget))
            reads.append(read_s(bundle))
            imports.append(import_s())
    for name, times in found.items():
        clock, processor = ([t[i] for t in times] for i in (0, 1))
        print(f"{name:<11} {median(clock):6.2f} s to the first token ({min(clock):.2f} .. {max(clock):.2f}), "
              f"{median(processor):.2f} s of the processor")
    ratio = median(b[0] / c[0] for b, c in zip(found["bundle"], found["checkpoint"], strict=True))
    print(f"plain reads {median(reads):6.2f} s; import torch {median(imports):.2f} s; a bundle takes {ratio:.2f} of "
          "what its checkpoint takes")
    if asked.json:
        asked.json.write_text(json.dumps({"clock_and_processor_s": found, "read_s": reads, "import_torch_s": imports},
                                         indent=1) + "\n")


if __name__ == "__main__":
    main()
