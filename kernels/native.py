"""The C++ kernels of `kernels/cpu`: compiled once per machine with the system's compiler, loaded through ctypes.

Every kernel is `int kernel(const Args* args, float* scratch, int64_t scratch_floats, int threads)` and returns 0, or
another number where it refuses its arguments, having written nothing. `NativeCall` is one kernel with its arguments;
`chain` makes one call of several, so that Python is not between them.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

SOURCE_FOLDER = Path(__file__).resolve().parent / "cpu"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-pthread", "-fPIC")
LINK_FLAGS = ("-shared",)
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
COMPILE_LIMIT_S = 300
KERNELS = (  # exported as forebay_<name>
    "linear", "attention", "rms_norm", "rotary", "kv_append",
    "quantize", "dequantize", "quantized_linear", "kv_append_q", "attention_q",
)  # fmt: skip
CHAIN_MOST = 64  # kernels in one call: Ctrl-C is heard between calls only

_held = threading.local()


class LinearArgs(ctypes.Structure):
    """Mirror of `LinearArgs` in flat_linear.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "multiplier", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "x_stride", "w_stride")),
        *((name, ctypes.c_int64) for name in ("multiplier_stride", "residual_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("x_dtype", "w_dtype", "bias_dtype", "out_dtype")),
        *((name, ctypes.c_int32) for name in ("conv1d", "accumulate", "activation")),
    )


class AttentionArgs(ctypes.Structure):
    """Mirror of `AttentionArgs` in flat_attention.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "start", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "length", "head_dim")),
        *((f"{t}_{d}", ctypes.c_int64) for t in "qkv" for d in ("batch", "head", "row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_row", "out_head", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("dtype", ctypes.c_int32),
    )


class RmsNormArgs(ctypes.Structure):
    """Mirror of `RmsNormArgs` in rows.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_row", "out_row")),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


class RotaryArgs(ctypes.Structure):
    """Mirror of `RotaryArgs` in rows.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "queries", "head_dim")),
        *((name, ctypes.c_int64) for name in ("x_batch", "x_head", "x_row")),
        *((f"{table}_{d}", ctypes.c_int64) for table in ("cos", "sin") for d in ("batch", "row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_head", "out_row")),
        ("dtype", ctypes.c_int32),
    )


class KvAppendArgs(ctypes.Structure):
    """Mirror of `KvAppendArgs` in kv_append.cpp; strides are in bytes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "k", "v", "start")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "rows", "k_nbytes", "v_nbytes")),
        *((f"{t}_{d}", ctypes.c_int64) for t in ("k_cache", "v_cache", "k", "v") for d in ("batch", "head", "row")),
    )


class Command(ctypes.Structure):
    """Mirror of `Command` in chain.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p))


def scratch(floats: int) -> torch.Tensor:
    """This thread's scratch, of at least `floats` fp32 numbers; it grows and never shrinks."""
    held: torch.Tensor | None = getattr(_held, "floats", None)
    if held is None or held.numel() < floats:
        held = _held.floats = torch.empty(floats, dtype=torch.float32)
    return held


class NativeCall:
    """A kernel with its arguments settled: calling it runs the kernel on as many threads as torch uses, the calling one
    and others that stand ready (cpu/team.h).

    `keep` holds what the pointers in `args` point to; `refuse` raises the error for what the kernel refuses. A call
    costs about 1 µs over the kernel.
    """

    __slots__ = ("_launch", "address", "keep", "kernel", "refuse", "scratch_floats")

    def __init__(
        self, kernel: str, args: ctypes.Structure, keep: Sequence[object], scratch_floats: int = 0,
        refuse: Callable[[], None] | None = None,
    ) -> None:
        library = load()
        assert library is not None, "a NativeCall is made only where the kernels are loaded"
        self._launch = getattr(library, f"forebay_{kernel}")
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
    assert library is not None, "a NativeCall is made only where the kernels are loaded"
    commands = (Command * len(calls))()
    for command, call in zip(commands, calls, strict=True):
        command.kernel = ctypes.cast(getattr(library, f"forebay_{call.kernel}"), ctypes.c_void_p).value
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


def compiler() -> str | None:
    """Path of the C++ compiler: `$CXX`, else the first of c++, g++ and clang++; None where there is none."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    return None


def cache_folder() -> Path:
    """`$FOREBAY_CACHE`, else ~/.cache/forebay."""
    chosen = os.environ.get("FOREBAY_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "forebay"


def _cpu_name() -> str:
    """Text that differs between processors for which -march=native gives different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _text_of(source: Path) -> bytes:
    """A source and every header of its folder that it includes, itself or through another."""
    found: dict[Path, bytes] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        if path not in found and path.exists():
            found[path] = path.read_bytes()
            pending += [path.parent / name.decode() for name in re.findall(rb'^#include "([^"]+)"', found[path], re.M)]
    return b"".join(found[path] for path in sorted(found))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def _make(target: Path, command: Sequence[str]) -> None:
    """Run a compiler's command that writes target, unless it is there; a rename puts it in place whole."""
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        subprocess.run([*command, "-o", str(made)], capture_output=True, check=True, timeout=COMPILE_LIMIT_S)
        os.replace(made, target)


def build(cxx: str, folder: Path) -> Path:
    """Compile `kernels/cpu` into folder, several sources at once, and return the library's path.

    Each source becomes an object whose name is a hash of it, the headers it includes, flags, compiler version and
    processor: an edit compiles what it touches, what is there stays, and processes may build at once. Raises OSError
    or subprocess.SubprocessError.
    """
    version = subprocess.run([cxx, "--version"], capture_output=True, check=True, timeout=COMPILE_LIMIT_S).stdout
    common = version, cxx.encode(), " ".join((*FLAGS, *LINK_FLAGS)).encode(), _cpu_name().encode()
    sources = {path: _text_of(path) for path in sorted(SOURCE_FOLDER.glob("*.cpp"))}
    objects = {path: folder / f"{path.stem}-{_digest(text, *common)}.o" for path, text in sources.items()}
    library = folder / f"cpu-{_digest(*(made.name.encode() for made in objects.values()))}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    longest_first = sorted(sources, key=lambda path: -len(sources[path]))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda path: _make(objects[path], [cxx, *FLAGS, "-c", str(path)]), longest_first))
    _make(library, [cxx, *FLAGS, *LINK_FLAGS, *map(str, objects.values())])
    return library


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None with one warning where they cannot be compiled or loaded.

    The first call on a machine compiles (30 s of CPU, on all cores); later processes only load.
    `load.cache_clear()` tries again.
    """
    cxx = compiler()
    reason = "no C++ compiler ($CXX, c++, g++ or clang++) was found"
    if cxx is not None:
        try:
            library = ctypes.CDLL(str(build(cxx, cache_folder())))
        except subprocess.CalledProcessError as error:
            reason = f"{cxx} failed: {error.stderr.decode(errors='replace').strip()[-600:]}"
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
        else:
            pointer = ctypes.c_void_p
            for name in KERNELS:
                kernel = getattr(library, f"forebay_{name}")
                kernel.argtypes = (pointer, pointer, ctypes.c_int64, ctypes.c_int)
                kernel.restype = ctypes.c_int
            library.forebay_chain.argtypes = (pointer, ctypes.c_int64, pointer, ctypes.c_int64, ctypes.c_int)
            library.forebay_chain.restype = ctypes.c_int64
            library.forebay_attention_max_head_dim.restype = ctypes.c_int64
            return library
    warnings.warn(f"CPU kernels fall back to torch, which is slower: {reason}", RuntimeWarning, stacklevel=2)
    return None
