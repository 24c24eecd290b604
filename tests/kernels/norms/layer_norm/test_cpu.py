"""layer_norm on the CPU: native and torch paths against float64, over dtypes, odd sizes, strides and special values."""

from __future__ import annotations

import pytest
import torch
from closeness import LIMITS, assert_near
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm

from forebay.kernels.build import compile
from forebay.kernels.norms.layer_norm.cpu import bind_layer_norm
from forebay.kernels.norms.layer_norm.operator import LAYER_NORM
from forebay.kernels.norms.layer_norm.reference import reference

layer_norm = LAYER_NORM.overload
DTYPES = tuple(LIMITS)
needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


def make(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return (torch.randn(shape) * 3 + 1).to(dtype), torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((2,), (1, 5), (3, 17), (2, 5, 576), (1, 1, 64), (40, 1000), (7, 131)))
@pytest.mark.parametrize("affine", ("both", "weight", "bias", "none"))
def test_near_float64(path: str, shape: tuple[int, ...], dtype: torch.dtype, affine: str) -> None:
    x, weight, bias = make(shape, dtype)
    parameters = (weight if affine in ("both", "weight") else None, bias if affine in ("both", "bias") else None)
    got = layer_norm(x, *parameters, 1e-5)
    assert got.dtype == dtype and got.shape == x.shape and got.is_contiguous()
    assert_near(got, reference(x, *parameters, 1e-5))


def test_a_mean_that_is_large_beside_what_varies(path: str) -> None:
    """The variance is of what is left without the mean: E[x^2] - E[x]^2 would leave nothing of it in fp32."""
    torch.manual_seed(2)
    x = torch.randn(3, 577) + 4096
    torch.testing.assert_close(layer_norm(x, None, None, 0.0).double(), reference(x, None, None, 0.0), rtol=0,
                               atol=5e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_written_in_place_and_alone(path: str, dtype: torch.dtype) -> None:
    x, weight, bias = make((6, 40), dtype)
    view, before = x[::2, 3:36], x.clone()
    wide = torch.full((3, 50), 7.0, dtype=dtype)
    bind_layer_norm(view, weight[:33], bias[:33], 1e-6, wide[:, 5:38])()
    assert_near(wide[:, 5:38], reference(view, weight[:33], bias[:33], 1e-6))
    assert (wide[:, :5] == 7).all() and (wide[:, 38:] == 7).all() and torch.equal(x, before)
    bind_layer_norm(view, weight[:33], bias[:33], 1e-6, view)()
    assert torch.equal(view, wide[:, 5:38])
    view.copy_(before[::2, 3:36])
    assert torch.equal(x, before)


def test_strides_without_rows_fall_back() -> None:
    x, weight, bias = make((4, 5, 24), torch.float32)
    for view in (x.transpose(0, 1), x[:, 1:, :], x.transpose(1, 2)[..., :4], x[..., ::2]):
        part = weight[: view.shape[-1]], bias[: view.shape[-1]]
        got = layer_norm(view, *part, 1e-6)
        assert got.is_contiguous()
        assert_near(got, reference(view, *part, 1e-6))
    spread = torch.randn(48)[::2]
    assert_near(layer_norm(x, spread, spread, 1e-6), reference(x, spread, spread, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_torchs(path: str, dtype: torch.dtype) -> None:
    x, weight, bias = make((6, 35), dtype)
    x[0, 3], x[1, 34], x[2, 0] = torch.nan, torch.inf, -torch.inf
    weight[7], bias[9] = torch.inf, -torch.inf
    got, want = layer_norm(x, weight, bias, 1e-6), torch_layer_norm(x, (35,), weight, bias, 1e-6)
    assert got[:3].isnan().all() and torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, rtol=2 * LIMITS[dtype], atol=2 * LIMITS[dtype], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@needs_compiler
def test_rows_of_one_number_are_the_bias(dtype: torch.dtype) -> None:
    """Their mean is exact; torch leaves some 1e-4 in half precision."""
    x, weight, bias = make((3, 35), dtype)
    x[:] = 5
    assert torch.equal(layer_norm(x, weight, bias, 1e-6), bias.expand(3, 35))
    assert torch.equal(layer_norm(x[:, :1].contiguous(), weight[:1], None, 1e-6), torch.zeros(3, 1, dtype=dtype))


def test_binding_reads_present_contents(path: str) -> None:
    x, weight, bias = make((2, 20), torch.float32)
    out = torch.empty(2, 20)
    call = bind_layer_norm(x, weight, bias, 1e-6, out)
    x.copy_(torch.randn(2, 20))
    weight.mul_(2)
    bias.add_(1)
    call()
    assert_near(out, reference(x, weight, bias, 1e-6))


def test_empty() -> None:
    assert layer_norm(torch.ones(0, 8), torch.ones(8), None, 1e-6).shape == (0, 8)
    assert layer_norm(torch.ones(3, 0), torch.ones(0), None, 1e-6).shape == (3, 0)


def test_an_output_of_another_shape_or_dtype_is_refused() -> None:
    x = torch.ones(2, 4)
    for out, match in ((torch.ones(4, 2), "out must have shape"), (torch.ones(2, 4).half(), "out must be fp32")):
        with pytest.raises(ValueError, match=f"layer_norm: {match}"):
            bind_layer_norm(x, None, None, 1e-6, out)
