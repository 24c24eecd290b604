"""layer_norm on the CPU against float64; opcheck; bad arguments."""

from __future__ import annotations

import pytest
import torch
from closeness import LIMITS, assert_near
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.norms.layer_norm.operator import LAYER_NORM
from forebay.kernels.norms.layer_norm.reference import reference

layer_norm = LAYER_NORM.overload


@pytest.mark.parametrize("dtype", tuple(LIMITS))
@pytest.mark.parametrize("affine", (True, False))
def test_near_reference(affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 77, 5).to(dtype).mT
    weight, bias = torch.randn(2, 77).to(dtype).unbind() if affine else (None, None)
    assert_near(layer_norm(x, weight, bias, 1e-5), reference(x, weight, bias, 1e-5))


@pytest.mark.parametrize("affine", (True, False))
def test_opcheck(affine: bool) -> None:
    x, weight, bias = torch.randn(2, 5, 8), torch.randn(8), torch.randn(8)
    parameters = (weight, bias, 1e-5) if affine else (None, None, 1e-5)
    opcheck(operators.LAYER_NORM.overload, (x.mT.contiguous().mT, *parameters))


def test_bad_arguments_are_named() -> None:
    x = torch.ones(2, 8)
    for message, weight, bias in (("weight must have shape", torch.ones(7), None), ("bias must be", None, x[0].half())):
        with pytest.raises(ValueError, match=f"layer_norm: {message}"):
            layer_norm(x, weight, bias, 1e-5)
    with pytest.raises(ValueError, match="layer_norm: x must be fp32"):
        layer_norm(x.long(), None, None, 1e-5)
