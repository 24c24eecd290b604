"""The C++ of the allocators as one library. Nothing here needs torch, so that a build of the package can ask."""

from __future__ import annotations

from pathlib import Path

from forebay.kernels.build.library import Library

HERE = Path(__file__).resolve().parent
LIBRARY = Library("allocators", (HERE / "search.cpp", HERE / "improve.cpp"), ("-std=c++17", "-O2", "-pthread", "-fPIC"))
