"""The compiled search: built from search.cpp on first use, kept in a cache, absent where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("search.cpp")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC")
log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$FOREBAY_CACHE`, or `~/.cache/forebay`."""
    root = os.environ.get("FOREBAY_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "forebay"


def compiler() -> str | None:
    """`$CXX`, or the first of c++, g++ and clang++ on the path; None where there is none."""
    named = os.environ.get("CXX")
    return next((path for path in map(shutil.which, (named,) if named else ("c++", "g++", "clang++")) if path), None)


def build() -> Path:
    """Path of the compiled search, compiling it when the cache lacks this source; safe among concurrent processes.

    Raises OSError or subprocess.CalledProcessError when there is no working compiler or no place to write.
    """
    key = hashlib.sha256(SOURCE.read_bytes() + repr((FLAGS, platform.system(), platform.machine())).encode())
    target = cache_dir() / f"allocator-search-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler found; install g++ or clang++, or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        subprocess.run([command, *FLAGS, str(SOURCE), "-o", str(built)], check=True, capture_output=True, text=True)
        os.replace(built, target)  # atomic: another process sees the whole library or none
    return target


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled search, or None (said once in the log) where it cannot be built; the answer is kept."""
    try:
        library = ctypes.CDLL(str(build()))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("the allocator's compiled search is not available, the slower one in Python is used: %s", reason)
        return None
    int32s, int64s = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int64)
    library.forebay_search.restype = ctypes.c_int
    library.forebay_search.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        int32s,
        int32s,
        int64s,
        ctypes.c_int64,
        ctypes.c_double,
        ctypes.c_uint64,
        int64s,
        int64s,
    ]
    library.forebay_first_fit.restype = None
    library.forebay_first_fit.argtypes = [ctypes.c_int, int64s, int64s, int64s, int32s, int64s]
    return library
