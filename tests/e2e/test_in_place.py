"""Host memory that a GPU reads where it lies: weights as operands there, and a GPU whose memory is the host's, on the
CUDA device over stand-ins for its driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from e2e.block_case import COUNT, Case
from e2e.block_case import DISK as CACHE_ON_DISK
from e2e.test_gpu_blocks import GPU, Pretended, driver

from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import Budget, Plan, Workload
from forebay.rewriter.ir.program import COMPUTE, DISK, HOST, UPWARD, Copy, FileSlice, Launch, Program, Span, place_of
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.runtime.devices.cuda import device as cuda
from forebay.runtime.devices.cuda import pinned
from forebay.runtime.run.arena import Arena

assert driver  # a fixture
OWN = GPU.tiers["device"].bandwidth_bytes_per_s
COHERENT = replace(GPU, host_read_bytes_per_s=OWN)  # with memory of its own, as Grace Hopper
SHARED = replace(COHERENT, one_memory=True)
WORKSPACE = 40 << 20  # of a GPU, and more than a hundred KiB of activations and cache


@pytest.fixture
def seen(driver: None, monkeypatch: pytest.MonkeyPatch) -> list[Arena]:
    """The arenas that were shown to the GPU."""
    shown: list[Arena] = []

    def show(arena: Arena) -> torch.Tensor:
        shown.append(arena)
        return arena.bytes

    monkeypatch.setattr(cuda, "seen_by_gpu", show)
    return shown


def programs(lm: LanguageModel) -> list[Program]:
    return [lm.steps.program(tokens) for tokens in lm.plan.schedule.step_sizes]


def copies(program: Program) -> list[Copy]:
    return [item for item in program.step if isinstance(item, Copy)]


def far_reads(program: Program) -> set[str]:
    """Buffers of host memory that launches of the device read."""
    return {span.buffer for item in program.step if isinstance(item, Launch) and item.stream == COMPUTE
            for span in item.reads if span.arena == HOST}


def in_place(plan: Plan) -> set[str]:
    return {w.name for w in plan.weights if w.in_place}


@pytest.mark.parametrize(("name", "beside"), [("llama", 900 << 10), ("gemma2", 420 << 10)])
def test_weights_in_host_memory_are_operands(tmp_path: Path, seen: list[Arena], name: str, beside: int) -> None:
    """No copy, no slot: with another profile the same budget streams them."""
    case = Case(name, tmp_path)
    with case.language_model(WORKSPACE + beside, COHERENT) as lm:
        assert in_place(lm.plan) == {w.name for w in lm.plan.weights if w.tier == HOST} and lm.plan.schedule.slots == 0
        assert not any(copies(program) for program in programs(lm)) and lm.plan.prediction.streamed_nbytes == 0
        case.check(lm)
        assert isinstance(lm.session.device, Pretended) and seen == [lm.session.device.host]
        assert all(far_reads(program) == in_place(lm.plan) == program.in_place for program in programs(lm))
        fast_s = lm.plan.prediction.decode_time_s
    with case.language_model(WORKSPACE + beside, GPU) as lm:
        assert not in_place(lm.plan) and any(item.stream in UPWARD for item in copies(programs(lm)[0]))
        assert lm.plan.prediction.decode_time_s > fast_s
        case.check(lm)
        assert len(seen) == 1, "nothing is read in place"


def test_others_come_from_disk_where_host_memory_is_small(
    tmp_path: Path, seen: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("e2e.block_case.HOST_NBYTES", 700 << 10)
    case = Case("llama", tmp_path)
    with case.language_model(WORKSPACE + (900 << 10), COHERENT) as lm:
        brought = {item.label.split()[1].split("[")[0] for item in copies(programs(lm)[0]) if item.stream == DISK}
        assert in_place(lm.plan) and brought and not in_place(lm.plan) & brought and lm.plan.schedule.slots
        case.check(lm)


class OneMemory(Pretended):
    """The device whose memory is the host's."""

    def allocate(self, arenas: Mapping[str, int]) -> None:
        assert self.reads_land and "host" not in arenas
        self.near = pinned.pinned_arena(arenas["device"])
        self.device_memory, self.landing = cuda.seen_by_gpu(self.near), pinned.pinned_arena(cuda.LOAD_NBYTES)


@pytest.mark.parametrize("more", [{}, {"micro_batches": 3, **CACHE_ON_DISK}])
def test_a_gpu_in_the_memory_of_the_host(
    tmp_path: Path, seen: list[Arena], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Files are read into its slots, as on a CPU: there is no second arena that would hold as much."""
    monkeypatch.setattr(cuda, "CudaDevice", OneMemory)
    case = Case("llama", tmp_path)
    workload, options = Workload(COUNT, case.prompt, case.new), Options(**{"cache_tier": "device"} | more)
    with LanguageModel(*case.opened, Budget(WORKSPACE + (900 << 10)), workload, options, SHARED) as lm:
        plan = lm.plan
        assert not plan.schedule.host_hop and {*plan.arenas} == {"device"} and not plan.budget.host
        brought = [item for item in copies(programs(lm)[0]) if isinstance(item.src, FileSlice)]
        assert brought and all(isinstance(item.dst, Span) and item.dst.arena == "device" for item in brought)
        case.check(lm)
        case.check(lm)
        assert isinstance(lm.session.device, OneMemory) and seen == [lm.session.device.near]


def test_where_reads_land() -> None:
    """In the memory of the device where it is the host's, and is read there as fast as its own."""
    slow = replace(SHARED, host_read_bytes_per_s=OWN / 3)
    hops: dict[str, tuple[Machine, bool]] = {
        "a GPU": (GPU, True), "coherent": (COHERENT, True), "one memory": (SHARED, False), "uncached": (slow, True),
        "a CPU": (Machine.default(), False)}
    assert {name: machine.host_hop for name, (machine, _) in hops.items()} == {
        name: hop for name, (_, hop) in hops.items()}


@pytest.mark.parametrize(("micro_batches", "more"), [
    (1, {"cache_tier": "host"}), (3, {"cache_tier": "host", "order": "zigzag"}),
    (2, {"cache_tier": "disk", "cache_shares": (0.3, 0.4)}), (3, {"cache_tier": "host", "admitted": 2})])
def test_caches_in_host_memory_are_read_there(
    tmp_path: Path, seen: list[Arena], micro_batches: int, more: dict[str, Any]
) -> None:
    """None is copied, and kernels append to them where they lie; with another profile they come and go."""
    case = Case("llama", tmp_path)
    more = {"cache_tokens": 4, "prefill_chunk": 6, "micro_batches": micro_batches, "cpu_attention": False} | more
    with case.language_model(400.0, COHERENT, **more) as lm:
        plan = lm.plan
        assert plan.schedule.batching.cache.in_place
        kept = {b.name for b in plan.buffers if b.kind == "cache" and b.arena == HOST}
        moved = {place.buffer for program in programs(lm) for item in copies(program)
                 for place in map(place_of, (item.src, item.dst)) if isinstance(place, Span)}
        assert kept and not kept & moved and all(kept <= program.in_place for program in programs(lm))
        case.check(lm)
        case.check(lm)
        assert seen == [lm.session.device.host]  # type: ignore[attr-defined]
    with case.language_model(400.0, GPU, **more) as lm:
        assert not lm.plan.schedule.batching.cache.in_place and copies(programs(lm)[0])
