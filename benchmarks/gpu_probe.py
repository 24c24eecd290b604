"""What moving and issuing cost on a GPU, as JSON to $OUT: the numbers that slots, copies and launches are chosen by.

    PYTHONPATH=src python -m benchmarks.gpu_probe          under a minute; needs torch with CUDA and Triton
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_cases.timing import ceilings
from forebay.runtime.devices.cuda import measure
from forebay.runtime.devices.cuda.kind import CUDA
from forebay.runtime.devices.cuda.pitched import RunCopier, pitched_copy

MIB = 1 << 20
PIECES = (2 * MIB, 8 * MIB, 32 * MIB)
RUNS, RUN_NBYTES = 32, 2 * MIB  # as a block of a cache has them, by head
LAUNCHES = 14  # of a decoder layer


def wall_s(call: Callable[[], object], rounds: int = 7) -> float:
    """Median seconds of a call and of what it issues."""
    times = []
    for _ in range(1 + rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def piece_rates(host: torch.Tensor, device: torch.Tensor) -> dict[str, float]:
    """Bytes per second from pinned memory by pieces of each size."""

    def copy(piece: int) -> None:
        for at in range(0, host.numel(), piece):
            device[at : at + piece].copy_(host[at : at + piece], non_blocking=True)

    return {f"pieces_of_{piece // MIB}_mib": host.numel() / wall_s(functools.partial(copy, piece)) for piece in PIECES}


def run_rates(host: torch.Tensor, device: torch.Tensor) -> dict[str, float | None]:
    """Bytes per second of equal runs that lie apart in host memory: one by one, and as one copy."""
    moved = tuple((2 * i * RUN_NBYTES, i * RUN_NBYTES, RUN_NBYTES) for i in range(RUNS))
    found: dict[str, float | None] = {"runs_as_one": None}
    for name, copy in (("runs_one_by_one", None), ("runs_as_one", pitched_copy())):
        if copy is not None or name == "runs_one_by_one":
            copier = RunCopier(host, device, copy)
            found[name] = RUNS * RUN_NBYTES / wall_s(functools.partial(copier, moved))
            assert all(torch.equal(device[to : to + n].cpu(), host[at : at + n]) for at, to, n in moved), name
    return found


def launch_rates() -> dict[str, float]:
    """Seconds of a small kernel: issued by Python, and in a graph of as many as a layer has."""
    values = torch.ones(1024, device=CUDA.name)

    def launches() -> None:
        for _ in range(LAUNCHES):
            values.add_(1)

    alone_s, graph = wall_s(launches) / LAUNCHES, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    return {"launch_s": alone_s, "launch_in_graph_s": measure.device_time_s(graph.replay, 7) / LAUNCHES}


def main() -> int:
    if not torch.cuda.is_available():
        print("benchmarks.gpu_probe: no CUDA device")
        return 0
    host = torch.randint(0, 256, (2 * RUNS * RUN_NBYTES,), dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device=CUDA.name)
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **ceilings(), **piece_rates(host, device),
             **run_rates(host, device), **launch_rates(), "dispatch_s": measure.dispatch_s(7),
             "copy_issue_s": measure.copy_issue_s(7)}
    target = Path(os.environ.get("OUT") or "benchmarks/results") / f"{str(found['gpu']).replace(' ', '-')}-probe.json"
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(target.read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
