"""What is run by `benchmarks.gpu_offload`: random-weight models, budgets, and the memory that a job takes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import RandomShape, make_model
from forebay.runtime.devices.cuda.kind import CUDA

GPU = CUDA.name
# What generating takes on the caller's stream beside what is planned: logits and chosen tokens, one small segment.
CALLER_NBYTES = 2 << 20
LARGE = RandomShape(4096, 8, 32, 8, 14336, 32000)
OPT = RandomShape(4096, 10, 32, 32, 16384, 50272, "opt")
DEVICE_SHARE = 0.375  # of the large model's bytes (4 GB in bf16), for Forebay and the peer
Row = dict[str, Any]


def saved_model(scratch: Path, shape: RandomShape, dtype: torch.dtype, weights: str = "native") -> Path:
    """A random-weight checkpoint of this shape, made once; quantized, where weights say so."""
    name = f"{shape.title}-{shape.window}-{str(dtype)[6:]}"
    folder = make_model(scratch / name, shape, dtype, GPU)
    if weights == "native":
        return folder
    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

    packed = scratch / f"{name}-{weights}"
    quantize_model(folder, packed, Wish(weights))  # goes on, or finds that it is done
    return packed


def model_nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def workspace_nbytes() -> int:
    from forebay.runtime.devices.cuda.memory import least_workspace_nbytes

    return least_workspace_nbytes() if torch.cuda.is_available() else 0


def begin_peak() -> tuple[int, int]:
    """Begin to count what the allocator reserves; returns what else is taken of the GPU (contexts of processes), and
    what this process holds already: torch keeps a workspace of cuBLAS for each stream that ever multiplied."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return context_nbytes(), torch.cuda.memory_reserved()


def context_nbytes() -> int:
    """Bytes of GPU memory in use that torch's allocator did not give out: of other processes, and of the driver."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def peak_within(budget: int, before: tuple[int, int]) -> Row:
    """What was reserved at most since `begin_peak`; a failure where the budget, and what generating takes, is less."""
    context, held = before
    peak = torch.cuda.max_memory_reserved() - held
    row: Row = {"peak_nbytes": peak, "budget_nbytes": budget, "context_nbytes": context}
    over = peak > budget + CALLER_NBYTES
    return row | ({"failed": f"took {peak} bytes of the device, the budget is {budget}"} if over else {})


def token_times(lm: Any, ids: torch.Tensor, new: int) -> list[float]:
    """When each token of an answer was there."""
    times: list[float] = []
    lm.generate(ids, max_new_tokens=new, eos_token_id=None, on_token=lambda _: times.append(time.perf_counter()))
    return times


def step_row(times: Sequence[float], batch: int) -> Row:
    """Median and spread of the steps between tokens, and tokens per second of a batch."""
    steps = [b - a for a, b in itertools.pairwise(times)]
    step_s = statistics.median(steps)
    return {"step_s": step_s, "spread_s": [min(steps), max(steps)], "tokens_per_s": batch / step_s}
