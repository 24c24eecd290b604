"""Functions of a GPU's driver that torch does not hand on."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch


def driver_function(cuda: str, hip: str) -> Any:
    """Return a function of the runtime library that torch uses itself, by its name in CUDA or in HIP.

    Raises:
        OSError: This torch is for neither, or the library cannot be loaded.
        AttributeError: The library has no such function.
    """
    folder = Path(torch.__file__).parent / "lib"
    for library, name in (("libc10_cuda.so", cuda), ("libc10_hip.so", hip)):
        if (folder / library).exists():
            return getattr(ctypes.CDLL(str(folder / library)), name)
    raise OSError("this torch is for no GPU")
