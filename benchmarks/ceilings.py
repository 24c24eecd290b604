"""What this machine's memory gives."""

from __future__ import annotations

import time

import torch


def memory_bytes_per_s(repeats: int) -> float:
    """The best rate of reading 256 MiB by all threads."""
    values, times = torch.ones(64 << 20), []
    for _ in range(repeats):
        began = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - began)
    return values.nbytes / min(times)
