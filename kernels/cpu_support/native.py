"""The C++ kernels of all operators: compiled once per machine with the system's compiler, loaded through ctypes.

Every kernel is `int kernel(const Args* args, float* scratch, int64_t scratch_floats, int threads)` and returns 0, or
another number where it refuses its arguments, having written nothing. `NativeCall` is one kernel with its arguments;
`chain` makes one call of several, so that Python is not between them.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from forebay.kernels.build.compile import BuildError, load_library
from forebay.kernels.build.library import Library
from forebay.kernels.cpu_support import sources

FLAGS = sources.FLAGS
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CHAIN_MOST = 64  # kernels in one call: Ctrl-C is heard between calls only

_held = threading.local()


class Command(ctypes.Structure):
    """Mirror of `Command` in chain.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p))


def scratch(floats: int) -> torch.Tensor:
    """This thread's scratch, of at least `floats` fp32 numbers; it grows and never shrinks."""
    held: torch.Tensor | None = getattr(_held, "floats", None)
    if held is None or held.numel() < floats:
        with torch.inference_mode(False):  # else torch's operators could not write it outside of that mode
            held = _held.floats = torch.empty(floats, dtype=torch.float32)
    return held


class NativeCall:
    """A kernel with its arguments settled: calling it runs the kernel on as many threads as torch uses, the calling one
    and others that stand ready (team.h).

    `keep` holds what the pointers in `args` point to; `refuse` raises the error for what the kernel refuses. A call
    costs about 1 µs over the kernel.
    """

    __slots__ = ("_launch", "address", "keep", "kernel", "refuse", "scratch_floats")

    def __init__(
        self, kernel: str, args: ctypes.Structure, keep: Sequence[object], scratch_floats: int = 0,
        refuse: Callable[[], None] | None = None,
    ) -> None:
        self._launch = function(kernel)
        self.kernel, self.address = kernel, ctypes.addressof(args)
        self.keep, self.scratch_floats, self.refuse = (args, *keep), scratch_floats, refuse

    def __call__(self) -> None:
        floats = self.scratch_floats
        memory = scratch(floats).data_ptr() if floats else None
        if self._launch(self.address, memory, floats, torch.get_num_threads()):
            self.refused()

    def refused(self) -> None:
        """Raise what the kernel's refusal means."""
        if self.refuse is not None:
            self.refuse()
        raise RuntimeError(f"the kernel {self.kernel} refused its arguments")


def function(kernel: str) -> Any:
    """A kernel of the loaded library: forebay_<kernel>(args, scratch, floats of scratch, threads)."""
    library = load()
    assert library is not None, "kernels are asked for only where they are loaded"
    found = getattr(library, f"forebay_{kernel}")
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), ctypes.c_int
    return found


def rest() -> None:
    """Send the kernels' waiting threads to sleep at once; for callers that are about to use torch's threads.

    A thread looks for work for 50 µs after a kernel. Torch's are woken meanwhile onto the same processors: an fp32
    prefill of SmolLM2, whose products are torch's, took 1.2 times as long.
    """
    library = load()
    if library is not None:
        library.forebay_rest()


def chain(calls: Sequence[NativeCall]) -> Callable[[], None]:
    """One call that runs `calls` in order; a refusal raises the error of the call concerned, and none after it runs."""
    library = load()
    assert library is not None, "a chain is made only where the kernels are loaded"
    commands = (Command * len(calls))()
    for command, call in zip(commands, calls, strict=True):
        command.kernel = ctypes.cast(function(call.kernel), ctypes.c_void_p).value
        command.args = call.address
    launch, address, count = library.forebay_chain, ctypes.addressof(commands), len(calls)
    floats, threads = max(call.scratch_floats for call in calls), torch.get_num_threads

    def run(_keep: tuple[object, ...] = (commands, *calls)) -> None:
        memory = scratch(floats).data_ptr() if floats else None
        ran = launch(address, count, memory, floats, threads())
        if ran != count:
            calls[ran].refused()

    return run


def chained(calls: Iterable[Callable[[], object]]) -> list[Callable[[], object]]:
    """`calls` with each run of up to CHAIN_MOST neighbouring `NativeCall`s made one call."""
    found: list[Callable[[], object]] = []
    run: list[NativeCall] = []

    def flush() -> None:
        if run:
            found.append(run[0] if len(run) == 1 else chain(tuple(run)))
            run.clear()

    for call in calls:
        if isinstance(call, NativeCall):
            run.append(call)
            if len(run) == CHAIN_MOST:
                flush()
        else:
            flush()
            found.append(call)
    flush()
    return found


def library() -> Library:
    """The C++ kernels and what they share."""
    return sources.kernel_library(FLAGS)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None with one warning where they cannot be compiled or loaded.

    The first call on a machine compiles (30 s of CPU, on all cores); later processes only load. OSError as
    `load_library`.
    `load.cache_clear()` tries again.
    """
    try:
        found = load_library(library())
    except BuildError as error:
        warnings.warn(f"CPU kernels fall back to torch, which is slower: {error}", RuntimeWarning, stacklevel=2)
        return None
    pointer = ctypes.c_void_p
    found.forebay_chain.argtypes = (pointer, ctypes.c_int64, pointer, ctypes.c_int64, ctypes.c_int)
    found.forebay_chain.restype = ctypes.c_int64
    found.forebay_attention_max_head_dim.restype = ctypes.c_int64
    found.forebay_linear_recurrence_scratch.argtypes = (ctypes.c_int64,) * 4
    found.forebay_linear_recurrence_scratch.restype = ctypes.c_int64
    return found
