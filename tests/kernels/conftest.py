"""Shared by the tests of CPU kernels."""

from __future__ import annotations

import pytest

from forebay.kernels.build import compile
from forebay.kernels.cpu_support import native

needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


@pytest.fixture(params=(pytest.param("native", marks=needs_compiler), "torch"))
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel does the work: C++, or torch as where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    else:
        assert native.load() is not None
    return request.param
