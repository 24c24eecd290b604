"""Garbage that is collected while a graph is traced does not write into it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from forebay.rewriter.capture.compiled_module import capture_module
from forebay.rewriter.capture.language_model import capture_model
from tests.families import FAMILIES


@torch.no_grad()
def suspended() -> Iterator[int]:
    yield 1
    yield 2


class Garbage:
    """A cycle that holds a suspended generator, whose end sets whether gradients are recorded."""

    def __init__(self) -> None:
        self.itself, self.generator = self, suspended()
        next(self.generator)


@pytest.fixture(autouse=True)
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A collection that finds such garbage, wherever one may come, each time that torch walks through a graph to write
    it as code."""
    code = fx.Graph.python_code
    held = [Garbage() for _ in range(100)]

    def with_garbage(self: fx.Graph, *args, **kwargs):
        if held:
            held.pop()
        if gc.isenabled():
            gc.collect()
        return code(self, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", with_garbage)
    yield
    assert gc.isenabled() and len(held) < 100


def test_a_compiled_module_is_captured():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (graph.call_function(torch.cos, (x,)), 1)),))
    captured = capture_module(fx.GraphModule({}, graph), [torch.randn(4)], {0: "weight"})
    assert [n.target for n in captured.flat().graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.cos.default, torch.ops.aten.add.Tensor]


def test_a_language_model_is_captured():
    captured = capture_model(FAMILIES["llama"]())
    graphs = [captured.step, *(block for block in captured.step.children() if isinstance(block, fx.GraphModule))]
    assert len(graphs) > 1
    assert not [n for g in graphs for n in g.graph.nodes if n.target is torch._C._set_grad_enabled]
