"""What budgets of tests hold beside their share of a model's weights."""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.attention.attention.cpu import NATIVE_NBYTES
from forebay.kernels.cpu_support import native
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.planning.wishes import Wishes


def operators_nbytes(opened: tuple[Any, ...], workload: Workload, wishes: Wishes | None = None, host: int = 0) -> int:
    """Bytes of workspace that steps take here beyond what they take with our C++ kernels: 0 where a compiler made them.
    `opened` is what `open_model` gave."""
    if native.load() is not None:
        return 0
    from forebay.api import LanguageModel

    with LanguageModel(*opened, Budget(1 << 30, host), workload, wishes or Wishes()) as lm:
        taken = lm._pipeline.needs.workspace(lm.plan.schedule.prefill_chunk)
    return max(0, taken - NATIVE_NBYTES * torch.get_num_threads())
