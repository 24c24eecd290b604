"""The compiled search: built from search.cpp on first use, kept in a cache, absent where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

from forebay.kernels.build.compile import BuildError, Library, load_library

SEARCH = Library("allocator-search", (Path(__file__).with_name("search.cpp"),), ("-std=c++17", "-O2", "-fPIC"))
log = logging.getLogger(__name__)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled search, or None (said once in the log) where it cannot be built; the answer is kept. OSError as
    `load_library`."""
    try:
        library = load_library(SEARCH)
    except BuildError as error:
        log.warning("the allocator's compiled search is not available, the slower one in Python is used: %s", error)
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
