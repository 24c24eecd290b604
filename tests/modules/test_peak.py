"""Modules whose layers are streamed keep within their budgets, by torch's own record of what it allocates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding.folders import save as save_embedder
from modules.test_encoder_decoder import inputs, save
from multimodal import save as save_pictured
from torch.utils._python_dispatch import _disable_current_modes

from forebay.images.tower import ImageTower
from forebay.modules import layer_reads, streamed_module
from forebay.modules.open_folder import open_streamed
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
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


class _AtOnce:
    """Reads ahead at once and on the same thread, which is the only one that torch's record is of."""

    def __init__(self, *args: Any) -> None:
        pass

    def submit(self, read: Callable[[int], Any], layer: int) -> Future[Any]:
        done: Future[Any] = Future()
        with _disable_current_modes():
            done.set_result(read(layer))
        AHEAD.append(layer)
        return done

    def shutdown(self) -> None:
        pass


AHEAD: list[int] = []  # layers that were read ahead


@pytest.mark.parametrize(("kind", "dtype"), [(kind, torch.float32) for kind in KINDS] + [("bert", torch.bfloat16)])
def test_peak_is_within_the_budget(kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: Any) -> None:
    """From budgets that break off to those with room for every layer."""
    model = (save_embedder if KINDS[kind] == "AutoModel" else save)(kind, tmp_path)
    model.to(dtype).save_pretrained(tmp_path)
    streamed = open_streamed(tmp_path, KINDS[kind])
    ids = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    given = inputs(kind) if kind == "whisper" else {"input_ids": ids}
    call = streamed.module if KINDS[kind] == "AutoModel" else streamed.module.generate
    more = {} if KINDS[kind] == "AutoModel" else {"max_new_tokens": 3}
    done = []
    AHEAD.clear()
    monkeypatch.setattr(layer_reads, "ThreadPoolExecutor", _AtOnce)
    for room in (0, 8_000, 20_000, 60_000, 100_000, 160_000, 250_000, 800_000):
        budget = streamed.sizes.weight_nbytes + room

        def compute(budget: int = budget) -> None:
            with contextlib.suppress(PlanError), streamed.running(budget, stay=True):
                call(**given, **more)
                done.append(budget)

        peak = allocated_peak(compute)
        assert peak <= budget + SPARE and streamed.peak_nbytes <= budget, (room, peak - budget)
        assert streamed.peak_nbytes >= peak - SPARE
    assert AHEAD and budget in done and streamed.sizes.weight_nbytes not in done


@pytest.mark.parametrize("again", [False, True])
def test_the_next_layer_is_read_while_one_computes(again: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Each layer but the first waits, within its computation, for the next one's first read; numbers are equal."""
    whole = save_embedder("bert", tmp_path).eval()
    streamed = open_streamed(tmp_path, "AutoModel")
    began = [threading.Event() for _ in range(4)]
    readers: list[str] = []

    def read(record: Any) -> torch.Tensor:
        if ".layer." in f".{record.name}":
            number = int(record.name.split("layer.")[1].split(".")[0])
            began[number].set()
            readers.append(threading.current_thread().name)
        return read_tensor(record)

    overlapped = []
    for number, layer in enumerate(streamed.module.encoder.layer):
        def computed(module: Any, args: Any, out: Any, number: int = number) -> None:
            if 1 <= number < 3:
                assert began[number + 1].wait(20), f"layer {number + 1} is not read while {number} computes"
                overlapped.append(number)

        layer.attention.register_forward_hook(computed)
    monkeypatch.setattr(streamed_module, "read_tensor", read)
    ids = torch.arange(5, 37).reshape(2, 16)
    with torch.no_grad():
        expected = whole(ids).last_hidden_state
    with streamed.running(streamed.sizes.weight_nbytes + streamed.sizes.layer_nbytes + 100_000, stay=again):
        for _ in range(1 + again):
            assert torch.equal(streamed.module(ids).last_hidden_state, expected)
    assert overlapped == [1, 2] * (1 + again)
    assert sum(name.startswith("layer reads") for name in readers) >= len(readers) // 2 > 0


def test_towers_keep_within_their_budget(tmp_path: Path, monkeypatch: Any) -> None:
    """From a budget that breaks off over those with room for some images at a time to one with room for all."""
    whole = save_pictured("internvl", tmp_path)
    given = {"pixel_values": torch.randn(6, 3, 28, 28, generator=torch.Generator().manual_seed(0))}
    tower = ImageTower(whole.config, open_checkpoint(tmp_path), torch.float32)
    monkeypatch.setattr(layer_reads, "ThreadPoolExecutor", _AtOnce)
    tower.features(given, 1 << 24)
    most = tower.least_nbytes
    calls: list[int] = []
    tower.base.vision_tower.register_forward_pre_hook(lambda *_: calls.append(1))
    seen = []
    for budget in (tower.plan.weight_nbytes + 1000, most - 10_000, most - 1, most):
        def compute(budget: int = budget) -> None:
            calls.clear()
            with contextlib.suppress(PlanError):
                tower.features(given, budget)
                seen.append(len(calls))

        peak = allocated_peak(compute)
        assert peak <= budget + SPARE and tower.peak_nbytes <= budget, (budget, peak - budget)
        assert tower.peak_nbytes >= peak - SPARE
    assert 2 <= len(seen) < 4 and seen[0] > seen[-1] == 1, seen
