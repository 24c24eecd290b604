"""Modules whose layers are streamed keep within their budgets, by torch's own record of what it allocates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding.folders import save as save_embedder
from modules.test_encoder_decoder import inputs, save

from forebay.modules.open_folder import open_streamed
from forebay.rewriter.ir.plan import PlanError


def allocated_peak(run: Callable[[], Any]) -> int:
    """Most bytes that torch's allocator gave out at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    waiting, found = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(found, key=lambda each: each[0]):
        live += size
        peak = max(peak, live)
    return peak


KINDS = {"bert": "AutoModel", "modernbert": "AutoModel", "qwen3": "AutoModel", "t5": "AutoModelForSeq2SeqLM",
         "whisper": "AutoModelForSpeechSeq2Seq"}
SPARE = 4096  # bytes of sums within operators, and of torch itself


@pytest.mark.parametrize(("kind", "dtype"), [(kind, torch.float32) for kind in KINDS] + [("bert", torch.bfloat16)])
def test_peak_is_within_the_budget(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """From budgets that break off to those with room for every layer."""
    model = (save_embedder if KINDS[kind] == "AutoModel" else save)(kind, tmp_path)
    model.to(dtype).save_pretrained(tmp_path)
    streamed = open_streamed(tmp_path, KINDS[kind])
    ids = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    given = inputs(kind) if kind == "whisper" else {"input_ids": ids}
    call = streamed.module if KINDS[kind] == "AutoModel" else streamed.module.generate
    more = {} if KINDS[kind] == "AutoModel" else {"max_new_tokens": 3}
    done = []
    for room in (0, 8_000, 20_000, 60_000, 100_000, 160_000, 250_000, 800_000):
        budget = streamed.sizes.weight_nbytes + room

        def compute(budget: int = budget) -> None:
            with contextlib.suppress(PlanError), streamed.running(budget, stay=True):
                call(**given, **more)
                done.append(budget)

        peak = allocated_peak(compute)
        assert peak <= budget + SPARE and streamed.peak_nbytes <= budget, (room, peak - budget)
        assert streamed.peak_nbytes >= peak - SPARE
    assert budget in done and streamed.sizes.weight_nbytes not in done
