"""Operators in place that a traced model has: what they leave is made anew where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from forebay.rewriter.capture.merge import _clean

X, HALF = torch.arange(6.0).reshape(2, 3) + 1, torch.ones(2, 3, dtype=torch.bfloat16)
INDEX = torch.tensor([[0, 2], [1, 1]])


def normalized(x: torch.Tensor) -> torch.Tensor:
    picked = x.gather(1, INDEX)
    picked /= picked.sum(-1, keepdim=True)
    return picked * 2


def of_several_results(x: torch.Tensor) -> torch.Tensor:
    best, index = x.topk(2)
    best /= best.sum(-1, keepdim=True)
    return best * index


def marked(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).scatter_(1, INDEX, 1) * x


def a_view_alone(x: torch.Tensor) -> torch.Tensor:
    y = (x @ x.t()).t()
    y += x[:, :2]
    return y * 2


def a_slice(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    first = y[0] * 3
    y[1:] += first
    return y.t() * 1


def an_element(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1] = x[0]
    y[:, 1] *= 3
    return y + x


def a_slice_that_another_view_shows(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    view = y.view(-1)
    y[1:] += 1
    return view * 1


def a_slice_of_an_input(x: torch.Tensor) -> torch.Tensor:
    x[1:] += 1
    return x * 2


def seen_by_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    view = y.view(-1)
    y.add_(1)
    return view * 1


def seen_afterwards(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.mul_(3)
    return y + z  # both are what was left


def of_an_input(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1) * 2


def of_another_dtype(x: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.bfloat16) * 1).div_(x) * 1


@pytest.mark.parametrize(("model", "left"), [
    (normalized, False), (of_several_results, False), (marked, False), (seen_afterwards, False), (seen_by_a_view, True),
    (a_view_alone, False), (a_slice, False), (an_element, False), (a_slice_that_another_view_shows, True),
    (a_slice_of_an_input, True),
    (of_an_input, True), (of_another_dtype, True)])
def test_what_is_left_in_place(model: Callable[[torch.Tensor], torch.Tensor], left: bool) -> None:
    gm = make_fx(model)(X.clone())
    for node in gm.graph.nodes:  # as torch.export gives them
        node.meta.setdefault("val", node.meta.get("tensor_meta"))
    expected, given = model(X.clone()), X.clone()
    _clean(gm.graph)
    gm.recompile()
    schemas = [getattr(node.target, "_schema", None) for node in gm.graph.nodes]
    assert any(schema is not None and schema.is_mutable for schema in schemas) is left
    found = gm(given)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
