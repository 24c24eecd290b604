"""Times by CUDA events around CUDA graphs of calls over rotating buffers, and the machine's own ceilings."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import torch

from benchmarks.gpu_cases.case import Call
from forebay.runtime.devices.cuda.graphs import CapturePool, capturing
from forebay.runtime.devices.cuda.kind import CUDA

REPEATS = 30
GRAPH_CALLS = 32


uncaptured: list[str] = []  # why calls were timed without a graph, newest last; who reports them takes them out


def time_s(calls: list[Call], repeats: int = REPEATS) -> float:
    """Median time_s of one call, over `repeats` replays of a graph of GRAPH_CALLS calls or more; where the calls cannot
    be captured, by events around as many of them (`uncaptured` then says why)."""
    try:
        return graph_time_s(calls, repeats)
    except RuntimeError as error:  # what is wrong with the calls themselves, or with the GPU, is raised again below
        found = event_time_s(calls, repeats)
        uncaptured.append(f"timed by events, as it cannot be captured: {error}"[:200])
        return found


def event_time_s(calls: list[Call], repeats: int = REPEATS) -> float:
    """Median time_s of one call between events, launches by Python included."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in calls:
            call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            for call in calls:
                call()
            event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3 / len(calls)


def graph_time_s(calls: list[Call], repeats: int = REPEATS) -> float:
    """As `time_s`; RuntimeError where the calls cannot be captured.

    A graph takes Python's and the driver's launches out of the time. Captured by hand: torch.cuda.graph would collect
    garbage and empty the caches before every one of some 2000 captures.
    """
    order = calls * max(1, -(-GRAPH_CALLS // len(calls)))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        with capturing(graph, CapturePool()):
            for call in order:
                call()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
    torch.cuda.synchronize()
    spans_ms = [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]
    graph.reset()
    return statistics.median(spans_ms) / 1e3 / len(order)


def ceilings() -> dict[str, float]:
    """Measured now: device copy (bytes read and written per second), reads by a sum, bf16 matmul, pinned copies to the
    device. NaN where one cannot be measured, with the reason in `uncaptured`."""
    return {name: _ceiling(name, measure) for name, measure in (
        ("copy_bytes_per_s", _copy_rate), ("read_bytes_per_s", _read_rate), ("matmul_bf16_flop_per_s", _matmul_rate),
        ("host_to_device_bytes_per_s", _upload_rate))}  # fmt: skip


def _ceiling(name: str, measure: Callable[[], float]) -> float:
    try:
        return measure()
    except RuntimeError as error:
        uncaptured.append(f"{name} not measured: {error}"[:200])
        return math.nan


def _copy_rate(nbytes: int = 1 << 30) -> float:
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=CUDA.name) for _ in range(2))
    return 2 * nbytes / time_s([lambda: target.copy_(source)])


def _read_rate(nbytes: int = 1 << 30) -> float:
    values = torch.empty(nbytes // 4, dtype=torch.float32, device=CUDA.name).fill_(1.0)
    return nbytes / time_s([values.sum])


def _upload_rate(nbytes: int = 1 << 28) -> float:
    target = torch.empty(nbytes, dtype=torch.uint8, device=CUDA.name)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return nbytes / time_s([lambda: target.copy_(host, non_blocking=True)], 8)


def _matmul_rate(n: int = 8192) -> float:
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=CUDA.name) for _ in range(2))
    out = torch.empty(n, n, dtype=torch.bfloat16, device=CUDA.name)
    return 2 * n**3 / time_s([lambda: torch.mm(a, b, out=out)])
