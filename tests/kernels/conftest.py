"""Shared by the tests of CPU kernels."""

from __future__ import annotations

import os

import pytest

from forebay.kernels.build import compile
from forebay.kernels.cpu_support import native

# Another kind of processor that the kernels are compiled for (test_processors.py), at -O1: a third of the time.
OTHER = os.environ.get("FOREBAY_TEST_PROCESSOR")
if OTHER:
    native.FLAGS = tuple({"-march=native": f"-march={OTHER}", "-O3": "-O1"}.get(flag, flag) for flag in native.FLAGS)

needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


@pytest.fixture(params=(pytest.param("native", marks=needs_compiler), "torch"))
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel does the work: C++, or torch as where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    else:
        assert native.load() is not None
    return request.param
