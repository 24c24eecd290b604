"""Launches of Triton kernels on bound tensors: specialised and compiled by the first call, sent directly by later ones.

Triton looks at every argument of every launch to find the kernel compiled for it: 9.5 us of Python for a norm, 17 to 21
for a product. Bound tensors never change, so what the first call found holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from forebay.kernels.gpu_support.overlap import overlapping, waiting
from forebay.kernels.gpu_support.scratch import Scratch, scratch_of

ALIGN = 16  # a kernel is compiled for addresses that are multiples of it, or for any


class KernelCall(NamedTuple):
    """A kernel, its grid, its arguments by position, and by name its constants and the compiler's options."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]

    def __call__(self) -> Any:
        """Launch it as Triton does; returns the compiled kernel, None in the interpreter. Products are fused with the
        sums that follow them: from 3.10 on Triton does that only where it is asked to, and 3.9 warns of it."""
        return self.kernel[self.grid](*self.args, **self.constants, enable_fp_fusion=True)


def kernel_call(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> KernelCall:
    """A KernelCall, written as the launch is."""
    return KernelCall(kernel, grid, args, constants)


def bound(launch: KernelCall) -> Callable[[], None]:
    """The launch as a call without arguments, on the stream that is current then. The device is that of the first call.

    Hooks that profilers put into Triton are still called: while there are any, every launch is made as Triton does.
    """
    if overlapping():
        launch = launch._replace(kernel=waiting(launch.kernel), constants={**launch.constants, "launch_pdl": True})
    compiled: Any = None
    direct: tuple[Any, ...] | None = None
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    grid = (*launch.grid, 1, 1)[:3]

    def run() -> None:
        nonlocal compiled, direct
        if compiled is None or hooks[0].calls or hooks[1].calls:
            compiled = launch()
            return
        if direct is None:
            direct = _direct(compiled, launch)
        start, stream_of, device, arguments = direct
        start(*grid, stream_of(device), *arguments)

    return run


def _direct(compiled: Any, launch: KernelCall) -> tuple[Any, ...]:
    """(the compiled kernel's launcher, what gives the stream of a device, the device, the launcher's other arguments).

    Addresses stand for tensors: the launcher would ask each tensor for its own, and the driver whose it is."""
    driver = triton.runtime.driver.active
    names = launch.kernel.arg_names
    filled = launch.kernel.signature.bind(*launch.args, **{n: v for n, v in launch.constants.items() if n in names})
    filled.apply_defaults()
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in filled.arguments.values()]
    arguments = (compiled.function, compiled.packed_metadata, None, None, None, *values)
    return compiled.run, driver.get_current_stream, driver.get_current_device(), arguments


def bound_with_scratch(
    device: torch.device, values_nbytes: int, counters: int,
    launches: Callable[[Tensor, Tensor], Sequence[KernelCall | Callable[[], object]]],
) -> Callable[[], None]:
    """launches(values uint8, counters int32) as one call without arguments; both are at least as long as asked for.
    Those that are not of Triton's are called as they are.

    All bound calls of a stream share them, so memory is taken for the largest need and not for the sum."""
    on_gpu = device.type == "cuda"
    index = device.index if device.index is not None else 0
    stream, version, calls = -1, -1, list[Callable[[], object]]()
    scratch: Scratch | None = None

    def run() -> None:
        nonlocal stream, version, scratch
        current = torch._C._cuda_getCurrentRawStream(index) if on_gpu else 0
        if scratch is None or current != stream or scratch.version != version:
            scratch = scratch_of(device, current)
            scratch.hold(values_nbytes, counters)
            made = launches(scratch.values, scratch.counters)
            calls[:] = [bound(launch) if isinstance(launch, KernelCall) else launch for launch in made]
            stream, version = current, scratch.version
        for call in calls:
            call()

    return run
