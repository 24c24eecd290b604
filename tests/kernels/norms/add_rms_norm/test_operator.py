"""add_rms_norm on the CPU against float64; opcheck; bad arguments."""

from __future__ import annotations

import pytest
import torch
from closeness import LIMITS, assert_near
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.norms.add_rms_norm.operator import add_rms_norm
from forebay.kernels.norms.add_rms_norm.reference import reference


@pytest.mark.parametrize("dtype", tuple(LIMITS))
def test_near_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 5, 77).to(dtype), torch.randn(3, 5, 77).to(dtype), torch.randn(77).to(dtype)
    normed, summed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    assert_near(normed, reference(summed.double(), torch.zeros(()).double(), weight.double(), 1e-5)[0])


def test_opcheck() -> None:
    x = torch.randn(2, 5, 8)
    opcheck(operators.ADD_RMS_NORM.overload, (x, x + 1, torch.randn(8), 1e-5))


def test_bad_arguments_are_named() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    for message, arguments in {
        "residual must have x's shape": (x, x[:1], weight, 1e-5),
        "residual must be of": (x, x.half(), weight, 1e-5),
        "weight must have": (x, x, weight[:3], 1e-5),
    }.items():
        with pytest.raises(ValueError, match=f"add_rms_norm: {message}"):
            add_rms_norm(*arguments)
