"""Host memory that a GPU copies from and to by itself, and small tensors that go either way through it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.devices.cuda.driver import driver_function
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.arena import Arena

TOUCH_THREADS = 8
LINE_NBYTES = 64
INPUTS_NBYTES = 64 << 10  # of a step: ids, starts and lengths of 2 048 sequences
STAGED_STEPS = 4  # whose inputs may be on their way at once


def _touch(address: int, nbytes: int) -> None:
    """Write zeros to pages by several threads: each page is found and cleared by the thread that touches it first."""
    share = -(-nbytes // TOUCH_THREADS // PAGE_NBYTES) * PAGE_NBYTES or PAGE_NBYTES
    with ThreadPoolExecutor(TOUCH_THREADS) as pool:
        for done in [pool.submit(ctypes.memset, address + at, 0, min(share, nbytes - at))
                     for at in range(0, nbytes, share)]:
            done.result()


def pinned_arena(nbytes: int) -> Arena:
    """Host memory of so many bytes that a GPU copies from and to by itself. RuntimeFault where it cannot be pinned."""
    arena = Arena(nbytes)
    _touch(arena.address, nbytes)  # pinning untouched memory is slow
    code = torch.cuda.cudart().cudaHostRegister(arena.address, nbytes, 0)
    if int(code) != 0:
        raise RuntimeFault(f"pinning {nbytes} bytes of host memory failed (CUDA error {int(code)}); a smaller host "
                           "budget or a higher `ulimit -l` may help")
    return arena


class _Seen:
    """Pinned memory as `__cuda_array_interface__` describes memory at an address of a GPU."""

    def __init__(self, arena: Arena, address: int) -> None:
        self.arena = arena  # kept as long as a tensor shows it
        self.__cuda_array_interface__ = {
            "shape": (arena.nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def seen_by_gpu(arena: Arena) -> torch.Tensor:
    """Return pinned memory as a uint8 tensor of the GPU, whose kernels read and write it where it lies. RuntimeFault
    where the driver gives it no address."""
    address = ctypes.c_void_p()
    try:
        code = driver_function("cudaHostGetDevicePointer", "hipHostGetDevicePointer")(
            ctypes.byref(address), ctypes.c_void_p(arena.address), 0)
    except (OSError, AttributeError) as error:
        raise RuntimeFault(f"the GPU cannot read host memory in place: {error}") from error
    if code or not address.value:
        raise RuntimeFault(f"the GPU cannot read host memory in place (error {code} of its driver)")
    with torch.inference_mode(False):
        return torch.as_tensor(_Seen(arena, address.value), device="cuda")


class InputStaging:
    """Pinned memory that the inputs of steps pass through, in turns: whoever writes them waits for no kernel."""

    def __init__(self, nbytes: int = INPUTS_NBYTES) -> None:
        self.nbytes = nbytes
        self.memory = pinned_arena(STAGED_STEPS * nbytes)
        self._gone: list[torch.cuda.Event | None] = [None] * STAGED_STEPS  # when the inputs of a turn had been copied
        self._turn = 0

    def write(self, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each value to its target on the current stream; values may change once this returns."""
        at, side = 0, self._turn % STAGED_STEPS
        before = self._gone[side]
        if before is not None:
            before.synchronize()
        for target, value in inputs:
            if not value.is_cpu or at + target.nbytes > self.nbytes:
                target.copy_(value)
                continue
            raw = self.memory.bytes[side * self.nbytes + at :][: target.nbytes]
            staged = raw.view(target.dtype).view(target.shape)
            staged.copy_(value)
            target.copy_(staged, non_blocking=True)
            at += -(-target.nbytes // LINE_NBYTES) * LINE_NBYTES
        gone = self._gone[side] = before or torch.cuda.Event()
        gone.record(torch.cuda.current_stream())
        self._turn += 1

    def close(self) -> None:
        """Give the memory back; the device has been waited for."""
        torch.cuda.cudart().cudaHostUnregister(self.memory.address)


def read_later(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Copy a tensor to host memory behind the current stream's work; the call waits for that copy alone."""
    if value.is_cpu:
        kept = value.clone()
        return lambda: kept
    found = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    found.copy_(value, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream())

    def read() -> torch.Tensor:
        there.synchronize()
        return found

    return read
