"""The C++ of all operators as one library. Nothing here needs torch, so that a build of the package can ask."""

from __future__ import annotations

from pathlib import Path

from forebay.kernels.build.library import Library
from forebay.kernels.build.processors import NATIVE

SHARED = Path(__file__).resolve().parent
KERNELS = SHARED.parent  # each operator's folder holds its C++
FLAGS: tuple[str, ...] = ("-std=c++17", "-O3", NATIVE, "-pthread", "-fPIC")


def kernel_library(flags: tuple[str, ...] = FLAGS) -> Library:
    """The C++ kernels and what they share."""
    return Library("cpu", tuple(KERNELS.rglob("*.cpp")), flags, (SHARED,), of_processor=True)
