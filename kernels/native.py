"""The C++ kernels of `kernels/cpu`: compiled once per machine with the system's compiler, loaded through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

SOURCE_FOLDER = Path(__file__).resolve().parent / "cpu"
# torch loads an OpenMP runtime named libgomp.so.1; -fopenmp asks for that name, so both share one set of threads.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
COMPILE_LIMIT_S = 300


class LinearArgs(ctypes.Structure):
    """Mirror of `LinearArgs` in flat_linear.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "x_stride", "w_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("x_dtype", "w_dtype", "bias_dtype", "out_dtype")),
        *((name, ctypes.c_int32) for name in ("conv1d", "accumulate")),
    )


class AttentionArgs(ctypes.Structure):
    """Mirror of `AttentionArgs` in flat_attention.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "start", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "head_dim")),
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


def build(cxx: str, folder: Path) -> Path:
    """Compile `kernels/cpu` into folder unless it is there already, and return the library's path.

    The name is a hash of sources, flags, compiler version and processor; a rename puts the file in place whole, so
    that processes may build at once. Raises OSError or subprocess.SubprocessError.
    """
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    version = subprocess.run([cxx, "--version"], capture_output=True, check=True, timeout=COMPILE_LIMIT_S).stdout
    parts = [path.read_bytes() for path in (*sources, *sorted(SOURCE_FOLDER.glob("*.h")))]
    parts += [version, cxx.encode(), " ".join(FLAGS).encode(), _cpu_name().encode()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    library = folder / f"cpu-{digest.hexdigest()[:20]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        command = [cxx, *FLAGS, *map(str, sources), "-o", str(made)]
        subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_LIMIT_S)
        os.replace(made, library)
    return library


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None with one warning where they cannot be compiled or loaded.

    The first call on a machine compiles (about 15 s); later processes only load. `load.cache_clear()` tries again.
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
            library.forebay_linear.argtypes = (pointer, pointer, ctypes.c_int64, ctypes.c_int)
            library.forebay_linear.restype = None
            for launch in (library.forebay_attention, library.forebay_rms_norm, library.forebay_rotary):
                launch.argtypes = (pointer, ctypes.c_int)
                launch.restype = None
            library.forebay_attention_max_head_dim.restype = ctypes.c_int64
            return library
    warnings.warn(f"CPU kernels fall back to torch, which is slower: {reason}", RuntimeWarning, stacklevel=2)
    return None
