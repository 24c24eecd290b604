"""Shared by the tests of CPU kernels."""

from __future__ import annotations

import os
import platform

import pytest

from forebay.kernels.build import compile
from forebay.kernels.cpu_support import native
from tests.kernels import emulated

# Another kind of processor that the kernels are compiled for (test_processors.py), and run as if on one.
OTHER = os.environ.get("FOREBAY_TEST_PROCESSOR")
if OTHER in emulated.PROCESSORS and platform.machine() == "x86_64":
    emulated.take_over(OTHER)
elif OTHER:
    native.FLAGS = emulated.flags_for(OTHER)

needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


@pytest.fixture(params=(pytest.param("native", marks=needs_compiler), *([] if OTHER else ["torch"])))
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel does the work: C++, or torch as where there is no compiler, which knows no other processor."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    else:
        assert native.load() is not None
    return request.param
