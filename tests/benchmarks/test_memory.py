"""What a lowered step takes, measured, beside the plan and beside eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from budgets import WITH_KERNELS
from selection import beyond

from benchmarks import memory
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.machine.profile import Machine


def test_allocations_are_counted_at_their_peak() -> None:
    def call() -> torch.Tensor:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(5000, dtype=torch.uint8)
        del a
        return b.clone()

    assert memory.allocated(call) == 10_000
    assert memory.allocated(lambda: None) == 0


@WITH_KERNELS
@pytest.mark.parametrize("kind", beyond(memory.SHAPES, ("llama",)))
def test_measured_peak_is_the_planned_one_and_below_eager(kind: str, tmp_path: Path) -> None:
    prefill, decode = memory.compare(kind, memory.random_model(kind, tmp_path), Workload(2, 64, 8), inductor=False,
                                     machine=Machine.default())  # not the profile that lies about, if one does
    assert (prefill.step, decode.step) == ("prefill", "decode")
    for peak in (prefill, decode):
        assert abs(peak.error) <= 0.01
        assert 0 < peak.measured <= peak.planned
    assert prefill.measured >= 0.99 * prefill.planned
    assert prefill.measured <= 0.8 * prefill.eager
    assert decode.measured <= decode.eager
