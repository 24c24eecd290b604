"""Bound launches: Triton's own the first time, direct ones after; and the temporaries that they share."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton

from forebay.kernels.gpu_support import launches, overlap
from forebay.kernels.gpu_support.launches import bound, bound_with_scratch, kernel_call
from forebay.kernels.gpu_support.scratch import scratch_of

CPU = torch.device("cpu")


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.sent.append(args)


class Kernel:
    """As a JITFunction of kernel(x_ptr, n, BLOCK, EXTRA=3)."""

    arg_names = ("x_ptr", "n", "BLOCK", "EXTRA")
    signature = inspect.signature(lambda x_ptr, n, BLOCK, EXTRA=3: None)

    def __init__(self) -> None:
        self.compiled = Compiled()
        self.own: list[tuple[Any, ...]] = []
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*args: Any, **constants: Any) -> Compiled:
            self.own.append((grid, *args))
            self.options.append(constants)
            return self.compiled

        return launch


class Driver:
    stream = 7

    def get_current_device(self) -> int:
        return 2

    def get_current_stream(self, device: int) -> tuple[int, int]:
        return device, self.stream


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    return made


@pytest.fixture
def hook() -> Iterator[Any]:
    chain = triton.knobs.runtime.launch_enter_hook

    def seen(metadata: Any) -> None:
        """Nothing."""

    yield lambda: chain.add(seen)
    chain.remove(seen)


def test_later_calls_go_to_the_compiled_kernel_on_the_stream_of_then(driver: Driver) -> None:
    kernel, x = Kernel(), torch.zeros(4)
    call = bound(kernel_call(kernel, (5, 6), x, 4, BLOCK=16, num_warps=8))
    call()
    assert kernel.own == [((5, 6), x, 4)] and not kernel.compiled.sent
    call()
    driver.stream = 9
    call()
    rest = ("function", "metadata", None, None, None, x.data_ptr(), 4, 16, 3)
    assert kernel.compiled.sent == [(5, 6, 1, (2, 7), *rest), (5, 6, 1, (2, 9), *rest)]
    assert len(kernel.own) == 1


@pytest.mark.parametrize(("capability", "hip", "overlaps"), [((9, 0), None, True), ((8, 0), None, False),
                                                             ((9, 4), "6.4", False)])
def test_launches_overlap_where_asked_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, capability: tuple[int, int], hip: str | None, overlaps: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    kernel, copy = Kernel(), Kernel()
    monkeypatch.setattr(launches, "waiting", {kernel: copy}.__getitem__)
    plain = bound(kernel_call(kernel, (1,), torch.zeros(4), 4, BLOCK=16))
    try:
        overlap.overlap_launches(True)
        call = bound(kernel_call(kernel, (1,), torch.zeros(4), 4, BLOCK=16))
    finally:
        overlap.overlap_launches(False)
    for each in (plain, call, call):
        each()
    taken = copy if overlaps else kernel
    given = {"BLOCK": 16, "enable_fp_fusion": True}
    assert taken.options[-1] == given | ({"launch_pdl": True} if overlaps else {})
    assert kernel.options[0] == given
    assert len(copy.own) == overlaps and len(taken.compiled.sent) == 1


class Source:
    """As a JITFunction, which the interpreter does not make."""

    def __init__(self, fn: str) -> None:
        self.fn = self.src = fn

    def _unsafe_update_src(self, src: str) -> None:
        self.src = src


@pytest.mark.parametrize("head", ['def k(\n    x,\n):\n    """Two\n    lines."""\n', "def k(x):\n"])
def test_a_copy_of_a_kernel_waits_in_its_first_lines(head: str) -> None:
    kernel = Source(head + "    at = x\n    if at:\n        return\n")
    copy = overlap.waiting(kernel)
    wait = "    tl.extra.cuda.gdc_wait()\n    tl.extra.cuda.gdc_launch_dependents()\n"
    assert copy.src == head + wait + "    at = x\n    if at:\n        return\n"
    assert kernel.src == kernel.fn and overlap.waiting(kernel) is copy


def test_hooks_see_every_launch(driver: Driver, hook: Callable[[], None]) -> None:
    kernel = Kernel()
    call = bound(kernel_call(kernel, (1,), torch.zeros(4), 4, BLOCK=16))
    call()
    call()
    hook()
    call()
    assert len(kernel.own) == 2 and len(kernel.compiled.sent) == 1


def test_what_is_not_compiled_is_launched_as_it_is() -> None:
    kernel = Kernel()
    kernel.compiled = None  # type: ignore[assignment]  # Triton's interpreter
    call = bound(kernel_call(kernel, (1,), torch.zeros(4), 4, BLOCK=16))
    call()
    call()
    assert len(kernel.own) == 2


def test_bound_tensors_stay_alive(driver: Driver) -> None:
    kernel, x = Kernel(), torch.zeros(4)
    call = bound(kernel_call(kernel, (1,), x, 4, BLOCK=16))
    held = weakref.ref(x)
    call()
    call()
    del x
    kernel.own.clear()
    gc.collect()
    assert held() is not None
    del call
    gc.collect()
    assert held() is None


def test_calls_share_one_scratch_and_follow_it_when_it_grows(driver: Driver) -> None:
    small, large = Kernel(), Kernel()

    def bind(kernel: Kernel, nbytes: int) -> Callable[[], None]:
        return bound_with_scratch(
            CPU, nbytes, nbytes // 16, lambda values, zeros: (kernel_call(kernel, (1,), values, zeros, BLOCK=16),))

    first, second = bind(small, 64), bind(large, 4096)
    for call in (first, first, second, first, second, first):
        call()
    held = scratch_of(CPU, 0)
    assert held.values.numel() == 4096 and held.counters.tolist() == [0] * 256
    assert len(small.own) == 2 and len(large.own) == 1  # bound anew once, as the other asked for more
    addresses = held.values.data_ptr(), held.counters.data_ptr()
    assert [sent[9:11] for sent in small.compiled.sent[1:]] == [addresses]
    assert [sent[9:11] for sent in large.compiled.sent] == [addresses]


def test_scratch_is_given_back_with_the_last_call(driver: Driver) -> None:
    kernel = Kernel()
    call = bound_with_scratch(CPU, 64, 0, lambda values, _: (kernel_call(kernel, (1,), values, 4, BLOCK=16),))
    call()
    assert scratch_of(CPU, 0).values.numel() == 64
    del call
    gc.collect()
    assert scratch_of(CPU, 0).values.numel() == 0


def test_counters_survive_a_need_for_more_values(driver: Driver) -> None:
    kernel = Kernel()
    call = bound_with_scratch(CPU, 64, 8, lambda values, zeros: (kernel_call(kernel, (1,), values, zeros, BLOCK=16),))
    call()
    held = scratch_of(CPU, 0)
    counters, version = held.counters, held.version
    held.hold(128, 4)
    assert held.counters is counters and held.version == version + 1
    held.hold(128, 8)
    assert held.version == version + 1
