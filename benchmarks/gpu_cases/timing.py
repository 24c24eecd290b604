"""Times by CUDA events around CUDA graphs of calls over rotating buffers, and the machine's own ceilings."""

from __future__ import annotations

import itertools
import statistics

import torch

from benchmarks.gpu_cases.case import Call

REPEATS = 30
GRAPH_CALLS = 32


def time_s(calls: list[Call], repeats: int = REPEATS) -> float:
    """Median time_s of one call, over `repeats` replays of a graph of GRAPH_CALLS calls or more.

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
        graph.capture_begin()
        try:
            for call in order:
                call()
        finally:
            graph.capture_end()
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
    """Measured now: device copy (bytes read and written per second), bf16 matmul, pinned copies to the device."""
    nbytes = 1 << 30
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_s = time_s([lambda: target.copy_(source)])
    host = torch.empty(nbytes // 4, dtype=torch.uint8, pin_memory=True)
    to_device_s = time_s([lambda: target[: nbytes // 4].copy_(host, non_blocking=True)], 8)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
    matmul_s = time_s([lambda: torch.mm(a, b, out=out)])
    return {
        "copy_bytes_per_s": 2 * nbytes / copy_s,
        "matmul_bf16_flop_per_s": 2 * 8192**3 / matmul_s,
        "host_to_device_bytes_per_s": nbytes / 4 / to_device_s,
    }
