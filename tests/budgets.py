"""What budgets of tests hold beside their share of a model's weights."""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.attention.attention.cpu import NATIVE_NBYTES, workspace_nbytes
from forebay.kernels.cpu_support import native
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.planning.wishes import Wishes


def attention_nbytes(batch: int, heads: int, length: int, head_dim: int) -> int:
    """Bytes that attention over float32 takes here beyond what it takes with our C++ kernel, for prompts of any length.
    """
    taken = workspace_nbytes(batch, heads, heads, length, length, head_dim, torch.float32, 0.0)
    return max(0, taken - NATIVE_NBYTES * torch.get_num_threads())


def operators_nbytes(opened: tuple[Any, ...], workload: Workload, wishes: Wishes | None = None, host: int = 0) -> int:
    """Bytes of workspace that steps take here beyond what they take with our C++ kernels: 0 where a compiler made them.
    `opened` is what `open_model` gave."""
    if native.load() is not None:
        return 0
    from forebay.api import LanguageModel

    with LanguageModel(*opened, Budget(1 << 30, host), workload, wishes or Wishes()) as lm:
        taken = lm._pipeline.needs.workspace(lm.plan.schedule.prefill_chunk)
    return max(0, taken - NATIVE_NBYTES * torch.get_num_threads())
