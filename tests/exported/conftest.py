"""Captures shared by the tests of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.rewriter.capture import trace
from forebay.rewriter.ir.graph import CapturedModel

_TRACED: dict[tuple[Any, ...], CapturedModel] = {}


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """A model of one class, config and dtype is traced once for what its steps give: exports from memory, from its
    checkpoint and of its packed weights, and runs of that, which read the graphs and edit copies. What is captured
    from memory and from a folder is traced for each."""
    traced = trace.trace_model

    def known(model: Any, gives: str = "last", embeds: bool = False) -> CapturedModel:
        described = json.loads(model.config.to_json_string(use_diff=False))
        from_folder = bool(described.pop("_name_or_path"))  # which one is all the same
        key = (type(model), json.dumps(described), from_folder, model.dtype, gives, embeds)
        if key not in _TRACED:
            _TRACED[key] = traced(model, gives, embeds)  # type: ignore[arg-type]
        return _TRACED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "trace_model", known)
        yield
