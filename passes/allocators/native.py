"""The compiled allocators: built on first use, kept in a cache, absent where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.kernels.build.compile import BuildError, load_library
from forebay.passes.allocators.problem import Buffer
from forebay.passes.allocators.sources import LIBRARY

NO_MEMORY = -2  # what any of its functions returns where the system gives none
FOREVER_S = 1e6  # what C++ is told where there is no limit
log = logging.getLogger("forebay")


class BufferColumns(ctypes.Structure):
    """Mirror of `Problem` in improve.cpp: buffers by columns, whose memory it keeps."""

    _fields_ = (("count", ctypes.c_int32), *((name, ctypes.c_void_p) for name in ("lower", "upper", "size")))

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        columns = np.array([(b.lower, b.upper, b.size) for b in buffers], dtype=np.int64).reshape(-1, 3).T.copy()
        super().__init__(len(buffers), *(column.ctypes.data for column in columns))
        self.columns = columns


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled allocators, or None (said once in the log) where they cannot be built; the answer is kept. OSError
    as `load_library`."""
    try:
        library = load_library(LIBRARY)
    except BuildError as error:
        log.warning("the allocator's compiled search is not available, the slower one in Python is used: %s", error)
        return None
    problem = ctypes.POINTER(BufferColumns)
    int32s, int64s = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int64)
    seconds, seed, height = ctypes.c_double, ctypes.c_uint64, ctypes.c_int64
    library.forebay_search.restype = library.forebay_first_fit.restype = ctypes.c_int
    library.forebay_search.argtypes = [ctypes.c_int, ctypes.c_int, int32s, int32s, int64s, height, seconds, seed,
                                       int64s, int64s]
    library.forebay_first_fit.argtypes = [problem, int32s, seconds, int64s]
    library.forebay_best_fit.restype = library.forebay_improve.restype = ctypes.c_int
    library.forebay_best_fit.argtypes = [problem, int32s, int64s]
    library.forebay_improve.argtypes = [problem, height, seconds, seed, int64s]
    for function in (library.forebay_search, library.forebay_first_fit, library.forebay_best_fit,
                     library.forebay_improve):
        function.errcheck = _refuse_shortage
    return library


def _refuse_shortage(found: Any, function: object, given: tuple[object, ...]) -> Any:
    """Return a function's result; MemoryError if it reports a lack of memory."""
    if found == NO_MEMORY:
        raise MemoryError("to place buffers")
    return found


def pointer(numbers: np.ndarray) -> ctypes._Pointer:
    """To the numbers of a contiguous array of int32 or int64."""
    return numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_int32 if numbers.itemsize == 4 else ctypes.c_int64))
