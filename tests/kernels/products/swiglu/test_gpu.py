"""swiglu in Triton against float64, every setting, activation and odd shapes."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import assert_near, poisoned
from torch import Tensor
from torch.nn import functional

from forebay.kernels.products.swiglu.gpu import ACTIVATIONS, swiglu

FUNCTIONS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def exact(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return FUNCTIONS[activation](x.double() @ gate.double().T) * (x.double() @ up.double().T)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("m", (1, 2, 3, 17, 70))
def test_near_float64(m: int, dtype: torch.dtype) -> None:
    torch.manual_seed(m)
    x, gate, up = (torch.randn(rows, 203).to(dtype) / 8 for rows in (m, 37, 37))
    for activation in ACTIVATIONS:
        out = poisoned(m, 37, dtype=dtype)
        swiglu(x, gate, up, activation, out)
        assert_near(out, exact(x, gate, up, activation))


def test_halves_of_one_weight_and_a_slice_of_the_output() -> None:
    torch.manual_seed(0)
    both, x = torch.randn(2 * 24, 40).half() / 4, torch.randn(1, 2, 40).half()
    wide = poisoned(2, 64, dtype=torch.float16)
    swiglu(x[0], both[:24], both[24:], "silu", wide[:, :24])
    assert_near(wide[:, :24], exact(x[0], both[:24], both[24:], "silu"))
    assert wide[:, 24:].isnan().all()


@pytest.mark.parametrize("m", (1, 4))
def test_special_values_as_torch(m: int) -> None:
    x, gate, up = torch.ones(m, 16).half(), torch.ones(3, 16).half(), torch.ones(3, 16).half()
    gate[0, 1], gate[1, 2], up[2, 3] = torch.nan, torch.inf, -torch.inf
    out = poisoned(m, 3, dtype=torch.float16)
    swiglu(x, gate, up, "silu", out)
    assert_near(out, exact(x, gate, up, "silu"))


def test_bad_arguments_are_named() -> None:
    x, weight, out = torch.ones(2, 8).half(), torch.ones(3, 8).half(), poisoned(2, 3, dtype=torch.float16)
    bad = {
        "activation must be one of": (x, weight, weight, "tanh", out),
        "x must be of": (x.double(), weight, weight, "silu", out),
        "gate must be \\[N, K\\]": (x, weight[0], weight, "silu", out),
        "up must have shape": (x, weight, weight[:2], "silu", out),
        "out must have shape": (x, weight, weight, "silu", out[:1]),
        "gate must have a contiguous": (x, torch.ones(8, 3).half().T, weight, "silu", out),
        "up must be on": (x, weight, weight.to("meta"), "silu", out),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"swiglu: {message}"):
            swiglu(*arguments)
    assert out.isnan().all()
