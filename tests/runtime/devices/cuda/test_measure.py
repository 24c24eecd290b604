"""A GPU's profile: device time apart from issuing, products by the launchers that plans name, memory of the device.

The GPU is a clock here, and Triton's kernels run under its interpreter on CPU tensors.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import contextlib
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.kernels.formats.table import TIMED_WEIGHTS
from forebay.kernels.operator import Operator, Product, Tensors
from forebay.kernels.products.linear import choices
from forebay.rewriter.ir.program import Copy, Item, Record, Span, Wait
from forebay.rewriter.machine.both_ways import BothWays
from forebay.rewriter.machine.points import Contention, GemmPoint
from forebay.rewriter.machine.profile import Link, Machine, Tier
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.runtime.devices.cuda import measure as measure_cuda
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.measure import machine as measure
from forebay.runtime.run.arena import Arena

NAME = "NVIDIA H200"


class Clock:
    """A thread that issues, and a GPU that does what was issued in order; seconds of both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.free = 0.0
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = 0.0

            def record(self) -> None:
                self.at = max(clock.free, clock.now)

            def query(self) -> bool:
                return self.at <= clock.now

            def synchronize(self) -> None:
                clock.now = max(clock.now, self.at)

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at - self.at)

        def wait() -> None:
            clock.now = max(clock.now, clock.free)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", wait)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(0.0, cycles / 2e9))

    def launch(self, issue_s: float, time_s: float) -> None:
        self.now += issue_s
        self.free = max(self.free, self.now) + time_s


@pytest.mark.parametrize("issue_s", (0.0, 20e-6, 300e-6, 1e-3))
def test_the_time_of_a_call_is_that_of_the_device_whatever_issuing_takes(
    issue_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    assert measure_cuda.device_time_s(lambda: clock.launch(issue_s, 5e-6), 3) == pytest.approx(5e-6)
    slow = (lambda: clock.launch(issue_s, 1e-3), lambda: clock.launch(issue_s, 3e-3))
    assert measure_cuda.device_burst_s(itertools.cycle(slow), 4) == pytest.approx(2e-3)


def test_calls_that_the_gpu_cannot_be_kept_busy_for_are_timed_as_they_are_issued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    assert measure_cuda.device_time_s(lambda: clock.launch(10e-3, 5e-6), 1) >= 5e-3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes on the CPU, where any call takes 2 s; each is made once, before it is timed."""
    pytest.importorskip("triton")
    monkeypatch.setattr(measure_cuda, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(measure_cuda, "device_burst_s", lambda turn, count: 2.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(L2_cache_size=32 << 10))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name, value in (("STREAM_NBYTES", 1 << 12), ("TOKENS", 64), ("LAUNCHES", 1), ("QUICK_M", (2, 16)),
                        ("GEMM_SHAPES", ((64, 128), (64, 256)))):
        monkeypatch.setattr(measure_cuda, name, value)


@pytest.mark.parametrize(("capability", "half", "other"), (((9, 0), "bfloat16", "float16"),
                                                           ((7, 5), "float16", "bfloat16")))
def test_products_are_measured_as_plans_run_them(
    gpu: None, capability: tuple[int, int], half: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    ran: list[tuple[str, str]] = []
    bound = measure_cuda._bound

    def spied(operator: Operator, use: Tensors) -> Callable[[], object]:
        ran.append((f"{operator.name} {use.kwargs.get('bits', '')}", use.impl))
        return bound(operator, use)

    monkeypatch.setattr(measure_cuda, "_bound", spied)
    done: list[float] = []
    points = measure_cuda.gemm_points(True, lambda stage, share: done.append(share))
    kinds = ("float32", half, *TIMED_WEIGHTS)
    rows, shapes = (2, 16), ((64, 128), (64, 256))
    assert {(p.dtype, p.m, p.n, p.k) for p in points} == {(d, m, n, k) for d in kinds for m in rows for n, k in shapes}
    chosen = {(d, m, k): choices.choose(Product(d, m, 64, k), NAME) for d in kinds for m in rows for k in (128, 256)}
    assert all(p.impl == chosen[p.dtype, p.m, p.k].split("_")[0] and p.time_s == 2.0 for p in points)
    ops = {"float32": "", half: "forebay.linear "} | {w: f"forebay.linear_q {w[1]}" for w in TIMED_WEIGHTS}
    assert set(ran) == {(ops[d], impl) for (d, _, _), impl in chosen.items() if ops[d]}
    assert done == sorted(done)
    machine = replace(Machine.default(), device_kind=NAME, gemm=points)
    for dtype in (other, "w4g48", "w8g64"):
        assert machine.gemm_time_s(machine.best_gemm(dtype, 16, 64, 256), dtype, 16, 64, 256) == pytest.approx(2.0)


def test_weights_take_turns_over_more_than_the_l2(gpu: None) -> None:
    device = torch.device("cpu")
    for kind, weight_nbytes in (("float32", 64 * 128 * 4), ("bfloat16", 64 * 128 * 2), ("w4g64", 64 * 80)):
        calls = next(measure_cuda.products((2,), device, kind, 64, 128))[2]
        assert len(calls) * weight_nbytes >= 4 * (32 << 10)


def test_rates_are_bytes_of_the_device_over_its_time(gpu: None) -> None:
    assert measure_cuda.copy_bytes_per_s(1) == (1 << 12) / 2.0
    assert measure_cuda.read_bytes_per_s(1) == (1 << 12) / 2.0
    assert measure_cuda.attention_bytes_per_s(1) == 2 * 8 * 64 * 128 * 2 / 2.0


def test_dispatch_is_what_a_launch_takes_of_the_issuing_thread(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = 0

    def launch() -> None:
        nonlocal launches
        launches += 1

    monkeypatch.setattr(measure_cuda, "_layer_launches", lambda device: [launch, launch, launch])
    monkeypatch.setattr(measure_cuda, "LAUNCHES", 50)
    monkeypatch.setattr(measure_cuda, "time", SimpleNamespace(perf_counter=lambda: 12e-6 * launches))
    assert measure_cuda.dispatch_s(3) == pytest.approx(12e-6)
    assert launches == 4 * 3 * 50


def test_dispatch_binds_what_the_launchers_take(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of a decoder layer's launches, as often as the layer has it."""
    bound: list[str] = []
    bind = measure_cuda._bound

    def noted(operator: Operator, use: Tensors) -> Callable[[], object]:
        bound.append(operator.name)
        return bind(operator, use)

    monkeypatch.setattr(measure_cuda, "_bound", noted)
    monkeypatch.setattr(measure_cuda, "LAUNCHES", 1)
    assert measure_cuda.dispatch_s(1) > 0
    assert set(bound) == {f"forebay.{name}" for name in ("rms_norm", "linear", "rotary", "kv_append", "attention")}
    assert len(measure_cuda._layer_launches(torch.device("cpu"))) == 17


def test_a_copy_costs_its_thread_what_orders_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy, two records and two waits of each tile; the first round, which makes the events, is left out."""
    spent, closed = [0.0], list[bool]()
    costs = {Copy: 7e-6, Record: 2e-6, Wait: 1e-6}

    class Device:
        def __init__(self, reader: DiskReader, **options: object) -> None:
            self.seen, self.reader = set[Item](), reader

        def allocate(self, arenas: dict[str, int]) -> None:
            self.arenas = arenas

        def bind(self, item: Item, launch: None) -> Callable[[], None]:
            if isinstance(item, Copy):
                assert isinstance(item.src, Span) and isinstance(item.dst, Span)
                assert max(span.offset + span.nbytes for span in (item.src, item.dst)) <= self.arenas["host"]

            def run() -> None:
                spent[0] += costs[type(item)] + (0.0 if item in self.seen else 1.0)
                self.seen.add(item)

            return run

        def issuing(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def finish(self) -> None: ...

        def close(self) -> None:
            self.reader.close()
            closed.append(True)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("forebay.runtime.devices.cuda.device.CudaDevice", Device)
    monkeypatch.setattr(measure_cuda, "time", SimpleNamespace(perf_counter=lambda: spent[0]))
    assert measure_cuda.copy_issue_s(3) == pytest.approx(13e-6) and closed == [True]


@pytest.mark.parametrize(("integrated", "tables", "byte", "rate"), [
    (False, 0, 1, 0.0), (True, None, 1, 2048.0), (False, 1, 1, 2048.0), (False, None, 1, 0.0), (True, 0, 7, None)])
def test_host_memory_is_read_in_place_by_gpus_that_are_coherent_with_it(
    gpu: None, monkeypatch: pytest.MonkeyPatch, integrated: bool, tables: int | None, byte: int, rate: float | None
) -> None:
    """By their attributes; the rate is that of a sum. A GPU that reads other bytes is refused."""
    asked, given_back = [], []

    def attribute(value: Any, number: int, device: int) -> int:
        asked.append(number)
        value._obj.value = tables
        return 0

    def function(cuda: str, hip: str) -> Callable[..., int]:
        if tables is None:
            raise OSError("no such library")
        return attribute

    def seen(arena: Arena) -> torch.Tensor:
        arena.bytes.fill_(byte)
        return arena.bytes

    registered = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda at: given_back.append(at))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(is_integrated=integrated))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registered)
    monkeypatch.setattr(measure_cuda, "driver_function", function)
    monkeypatch.setattr(measure_cuda, "seen_by_gpu", seen)
    if rate is None:
        with pytest.raises(RuntimeFault, match="reads other bytes"):
            measure_cuda.host_read_bytes_per_s(3)
    else:
        assert measure_cuda.host_read_bytes_per_s(3) == rate
    assert asked == ([] if integrated or tables is None else [100]) and len(given_back) == (rate != 0.0)


def test_missing_triton_is_said(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "forebay.kernels.products.linear.gpu", None)
    with pytest.raises(RuntimeFault, match="measuring a GPU needs Triton"):
        measure_cuda.gemm_points(True, lambda stage, share: None)


@pytest.mark.parametrize("shared", [False, True])
def test_the_profile_of_a_gpu_holds_what_was_measured_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    point = GemmPoint("flat", "w4g64", 2, 64, 128, 1e-5)
    for module, name, value in (
        (torch.cuda, "is_available", True), (torch.cuda, "get_device_name", NAME),
        (torch.cuda, "synchronize", None), (torch.cuda, "empty_cache", None),
        (torch.cuda, "mem_get_info", (1 << 37, 1 << 38)),
        (measure, "_disk_links", (Link("disk", "host", 2e9, 1e-4, "direct"), Link("host", "disk", 1e9, 1e-4, "write"),
                                  (Contention(), 0.0), (BothWays(1 << 20, 2.0, 1.5),), 3e-5, (0.0, 0.0))),
        (measure_cuda, "links", [Link("host", "device", 5e10, 1e-5, "pinned")]),
        (measure_cuda, "copy_bytes_per_s", 2e12), (measure_cuda, "read_bytes_per_s", 4e12),
        (measure_cuda, "gemm_points", (point,)), (measure_cuda, "attention_bytes_per_s", 3e12),
        (measure_cuda, "dispatch_s", 12e-6), (measure_cuda, "copy_issue_s", 25e-6),
        (measure_cuda, "host_read_bytes_per_s", 3.9e12),
        (torch.cuda, "get_device_properties", SimpleNamespace(is_integrated=shared)), (torch.cuda, "current_device", 0),
        (measure, "choice_elements_per_s", 1e9),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    machine = measure.measure_machine(tmp_path, quick=True)
    assert (machine.memory_bytes_per_s, machine.attention_bytes_per_s, machine.dispatch_s) == (2e12, 3e12, 12e-6)
    assert machine.copy_issue_s == MachineEstimator(machine).copy_issue_s == 25e-6
    assert MachineEstimator(replace(machine, copy_issue_s=0.0)).copy_issue_s == 2e-5, "of profiles that lack it"
    assert machine.tiers["device"].bandwidth_bytes_per_s == 4e12 and machine.host_read_bytes_per_s == 3.9e12
    assert (machine.one_memory, machine.near_disk) == (shared, "device" if shared else "host")
    room = {tier: held.capacity_nbytes for tier, held in machine.tiers.items()}
    if shared:
        assert room["host"] == 0 < room["device"] < 1 << 37, "the RAM, which is not promised twice"
        assert machine.link("disk", "device") == replace(machine.link("disk", "host"), dst="device")
        assert machine.link("device", "disk").bandwidth_bytes_per_s == 1e9
        slow = measure._counted_once(replace(machine, host_read_bytes_per_s=1e12, tiers=machine.tiers | {
            "host": Tier(1 << 30, 1.0)}))
        assert [slow.tiers[tier].capacity_nbytes for tier in ("device", "host")] == [7 << 27, 1 << 27]
        assert slow.near_disk == "host"
    else:
        assert room["device"] == 1 << 37 and room["host"] > 0
    assert 0 < machine.tiers["host"].bandwidth_bytes_per_s < 1e12, "that of RAM"
    rates, times = machine.host_product_bytes_per_s, MachineEstimator(machine)
    assert all(1e6 < rate < 1e12 for rate in (*rates.values(), machine.host_attention_bytes_per_s)), "of its cores"
    assert times.host_product_s("w4g64", rates["w4g64"], 0.0) == pytest.approx(1.0)
    assert times.host_product_s("bfloat16", 1.0, 3 * machine.host_product_flops) == pytest.approx(3.0)
    assert times.host_product_s("w4g32", rates["w4g64"], 0.0) == pytest.approx(1.0), "of as many bits"
    some = MachineEstimator(replace(machine, host_product_bytes_per_s={"float32": 4.0, "w8g64": 2.0}))
    assert some.host_product_s("w4g64", 4.0, 0.0) == pytest.approx(2.0), "the least of all"
    assert math.isinf(MachineEstimator(Machine.default()).host_product_s("bfloat16", 1.0, 1.0))
    assert (machine.gemm, machine.attention, machine.device_kind) == ((point,), (), NAME)
