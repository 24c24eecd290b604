"""What budgets of tests hold beside their share of a model's weights."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from forebay.kernels.attention.attention.cpu import NATIVE_NBYTES, workspace_nbytes
from forebay.kernels.build.compile import compiler
from forebay.kernels.cpu_support import native
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.planning.options import Options

WITH_KERNELS = pytest.mark.skipif(
    compiler() is None, reason="the budget has room for our kernels, which need a C++ compiler")
THREADS = 2  # that shares are given for, with our C++ kernels


def attention_nbytes(batch: int, heads: int, length: int, head_dim: int, queries: int | None = None) -> int:
    """Bytes that attention over float32 takes here beyond what our C++ kernel takes with two threads, for prompts of
    any length, or of so many `queries`."""
    taken = workspace_nbytes(batch, heads, heads, queries or length, length, head_dim, torch.float32, 0.0)
    return taken - NATIVE_NBYTES * THREADS


def alone() -> bool:
    """Whether there is one processor: then every file has one thread, not only those whose shares are given for it."""
    return len(os.sched_getaffinity(0)) == 1


def operators_nbytes(opened: tuple[Any, ...], workload: Workload, options: Options | None = None, host: int = 0) -> int:
    """Bytes of workspace that steps take here beyond what they take with our C++ kernels and two threads. `opened` is
    what `open_model` gave."""
    threads, ours = torch.get_num_threads(), native.load() is not None
    if ours and threads <= THREADS and not (threads < THREADS and alone()):  # what one takes less is left free
        return 0
    from forebay.language_model import LanguageModel

    with LanguageModel(*opened, Budget(1 << 30, host), workload, options or Options()) as lm:
        taken = lm.steps.pipeline.needs.workspace(lm.plan.schedule.prefill_chunk)
    if ours:  # a step whose attention is the host's takes none
        return NATIVE_NBYTES * (threads - THREADS) if taken >= NATIVE_NBYTES * threads else 0
    return max(0, taken - NATIVE_NBYTES * THREADS)
