"""linear in Triton against float64: every implementation, both forms, splits of K, odd shapes."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import assert_near, poisoned
from torch import Tensor
from torch.nn import functional

from forebay.kernels.products.linear.gpu import linear, workspace_nbytes
from forebay.kernels.products.linear.reference import After

FUNCTIONS = {
    "": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def exact(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    multiplier: Tensor | None = None,
) -> Tensor:
    y = x.double() @ weight.double().T
    y = FUNCTIONS[activation](y if bias is None else y + bias.double())
    y = y if multiplier is None else y * multiplier.double()
    return y if residual is None else y + residual.double()


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight [N, K], bias and residual."""
    torch.manual_seed(m + n + k)
    x, bias, residual = torch.randn(m, k), torch.randn(n), torch.randn(m, n)
    return x.to(dtype), (torch.randn(n, k) / max(1, k) ** 0.5).to(dtype), bias.to(dtype), residual.to(dtype)


@pytest.mark.parametrize("form", ("nk", "kn"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(
    ("impl", "m", "n", "k"),
    (
        ("gemv", 1, 21, 203),
        ("gemv_8x512_s2", 2, 13, 1030),
        ("flat", 1, 70, 203),
        ("flat_64x64_s3", 7, 70, 331),
        ("flat_32x128_s2", 16, 33, 259),
        ("large", 131, 37, 70),
        ("large_128x64x64_s2", 17, 130, 150),
        ("", 3, 40, 72),
    ),
)
def test_near_float64(impl: str, m: int, n: int, k: int, dtype: torch.dtype, form: str) -> None:
    x, weight, bias, residual = operands(m, n, k, dtype)
    out = poisoned(m, n, dtype=dtype)
    stored = weight if form == "nk" else weight.T.contiguous()
    assert linear(x, stored, bias, After("silu", None, residual), out, impl, form) is out
    assert_near(out, exact(x, weight, bias, residual, "silu"))


@pytest.mark.parametrize("impl", ("gemv", "flat"))
@pytest.mark.parametrize("activation", tuple(FUNCTIONS))
def test_activations_and_multiplier(activation: str, impl: str) -> None:
    x, weight, bias, other = operands(2, 19, 40, torch.float16)
    got = linear(x, weight, bias, After(activation, other), None, impl)
    assert_near(got, exact(x, weight, bias, None, activation, other))


def test_column_slice_of_a_wider_tensor_and_leading_dimensions() -> None:
    x, weight, bias, _ = operands(4, 24, 40, torch.bfloat16)
    wide = poisoned(2, 2, 64, dtype=torch.bfloat16)
    linear(x.view(2, 2, 40), weight, bias, out=wide[..., 8:32], impl="flat")
    assert_near(wide[..., 8:32], exact(x, weight, bias).view(2, 2, 24))
    assert wide[..., :8].isnan().all() and wide[..., 32:].isnan().all()


@pytest.mark.parametrize("impl", ("gemv_8x512_s1", "flat_64x64_s2"))
def test_row_tiles_of_a_kn_weight_accumulate(impl: str) -> None:
    x, weight, bias, _ = operands(2, 18, 300, torch.float16)
    stored = weight.T.contiguous()
    out = poisoned(2, 18, dtype=torch.float16)
    linear(x[:, :100], stored[:100], bias, out=out, impl=impl, form="kn")
    linear(x[:, 100:], stored[100:], out=out, impl=impl, form="kn", accumulate=True)
    assert_near(out, exact(x, weight, bias))


@pytest.mark.parametrize("impl", ("gemv", "flat_64x64_s2", "large"))
def test_special_values_as_torch(impl: str) -> None:
    x, weight, _, _ = operands(2, 9, 130, torch.float16)
    x[0, 3], weight[4, 7], weight[5, 120], weight[6, 1] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[1, 9] = torch.inf
    assert_near(linear(x, weight, None, After("relu"), None, impl), exact(x, weight, None, None, "relu"))


def test_nothing_to_sum_or_to_write() -> None:
    bias = torch.randn(5).half()
    assert_near(linear(torch.ones(3, 0).half(), torch.ones(5, 0).half(), bias), bias.double().expand(3, 5))
    assert linear(torch.ones(0, 4).half(), torch.ones(5, 4).half()).shape == (0, 5)


def test_workspace_is_as_large_as_said_and_left_as_found() -> None:
    x, weight, _, _ = operands(3, 70, 600, torch.float16)
    impl = "flat_64x64_s4"
    nbytes = workspace_nbytes(3, 70, 600, impl)
    assert nbytes == 16 + 4 * 2 * 4 * 8 * 64  # two counters, padded; two tiles of four parts
    workspace = torch.zeros(nbytes, dtype=torch.uint8)
    first = linear(x, weight, impl=impl, workspace=workspace)
    assert not workspace[:16].any()
    assert torch.equal(first, linear(x, weight, impl=impl, workspace=workspace))
    assert_near(first, exact(x, weight))
    with pytest.raises(ValueError, match=f"linear: workspace must be {nbytes} bytes"):
        linear(x, weight, impl=impl, workspace=workspace[1:])
    assert workspace_nbytes(3, 70, 600, "flat_64x64_s1") == 0


def test_bad_arguments_are_named() -> None:
    x, weight, bias, residual = operands(2, 24, 40, torch.float16)
    out = poisoned(2, 24, dtype=torch.float16)

    def refused(message: str, **changed: object) -> None:
        given: dict = {"x": x, "weight": weight, "bias": bias, "residual": residual, "out": out} | changed
        after = After(given.pop("activation", ""), None, given.pop("residual"))
        with pytest.raises(ValueError, match=f"^linear: {message}"):
            linear(**given, after=after)

    refused("x must be of", x=x.float())
    refused("x must end in 40 columns", x=x[:, :39])
    refused("x must have a contiguous last", x=torch.ones(40, 2).half().T)
    refused("weight must have two dimensions", weight=weight[0])
    refused("weight must be of", weight=weight.bfloat16())
    refused("weight must be on", weight=weight.to("meta"))
    refused("bias must have shape", bias=bias[:3])
    refused("residual must have shape", residual=residual[:1])
    refused("residual must be of", residual=residual.bfloat16())
    refused("out must have shape", out=out[:, :5])
    refused("activation must be one of", activation="tanh")
    refused("form must be one of", form="nn")
    refused("accumulate needs", accumulate=True, activation="silu")
    refused("impl must be one of", impl="best")
    refused("impl must be one of .* takes 20 rows", x=x.repeat(10, 1), residual=None, out=None, impl="gemv")
    refused("impl must name a setting", impl="flat_7x7")
    refused("impl must end in _s1", impl="flat_64x64_s0")
    assert out.isnan().all()
