"""swiglu on the CPU: against float64 and the operators apart, and what it must refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels import operators
from forebay.kernels.products.linear.reference import ACTIVATIONS
from forebay.kernels.products.swiglu.operator import swiglu
from forebay.kernels.products.swiglu.reference import reference

APART = {
    "silu": functional.silu, "relu": functional.relu, "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def make(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3, 40), n: int = 27) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    gate, up = torch.randn(2, n, shape[-1]).to(dtype).unbind()
    return torch.randn(shape).to(dtype), gate, up


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", (1, 5, 70))
def test_matches_float64_and_the_operators_apart(activation: str, dtype: torch.dtype, rows: int) -> None:
    x, gate, up = make(dtype, (rows, 40))
    out, want = swiglu(x, gate, up, activation), reference(x, gate, up, activation)
    scale = (x.double().abs() @ gate.double().abs().T + 1) * (x.double().abs() @ up.double().abs().T)
    assert ((out.double() - want).abs() <= TOLERANCE[dtype] * scale).all()
    apart = APART[activation](functional.linear(x, gate)) * functional.linear(x, up)
    assert out.dtype == dtype and torch.allclose(out, apart, rtol=4 * TOLERANCE[dtype], atol=40 * TOLERANCE[dtype])


def test_strided_arguments_and_empty_batches() -> None:
    x, gate, up = make(torch.float32)
    assert torch.equal(swiglu(x.mT.contiguous().mT, gate.T.contiguous().T, up), swiglu(x, gate, up))
    assert swiglu(x[:0], gate, up).shape == (0, 3, 27)


@pytest.mark.parametrize(("argument", "change"), (
    ("gate", {"gate": torch.ones(27, 39)}),
    ("up", {"up": torch.ones(26, 40)}),
    ("up", {"up": torch.ones(27, 40).half()}),
    ("activation", {"activation": "swish"}),
    ("activation", {"activation": ""}),
))
def test_refuses_by_name(argument: str, change: dict[str, object]) -> None:
    given = dict(zip(("x", "gate", "up"), make(torch.float32), strict=True), activation="silu")
    with pytest.raises(ValueError, match=f"swiglu: {argument} "):
        swiglu(**{**given, **change})


def test_opcheck() -> None:
    torch.library.opcheck(operators.SWIGLU.overload, make(torch.bfloat16))
