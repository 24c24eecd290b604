"""sparse_values on the CPU against float64; opcheck; bad arguments."""

from __future__ import annotations

import pytest
import torch
from closeness import LIMITS, assert_near
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.attention.sparse_values.operator import sparse_values
from forebay.kernels.attention.sparse_values.reference import reference


@pytest.mark.parametrize("dtype", tuple(LIMITS))
@pytest.mark.parametrize(("keep", "queries"), ((1, 1), (15, 3), (37, 1)))
def test_near_reference(keep: int, queries: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights, v = torch.rand(2, 6, queries, 37).softmax(-1), torch.randn(2, 3, 40, 33).to(dtype)
    assert_near(sparse_values(weights, v, keep), reference(weights, v, keep))


def test_keeping_all_is_attention() -> None:
    weights, v = torch.rand(1, 2, 3, 9).softmax(-1), torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(sparse_values(weights, v, 9), (weights @ v).transpose(1, 2))


def test_opcheck() -> None:
    opcheck(operators.SPARSE_VALUES.overload, (torch.rand(1, 4, 2, 9), torch.randn(1, 2, 10, 8), 3))


def test_bad_arguments_are_named() -> None:
    weights, v = torch.ones(1, 4, 1, 6), torch.ones(1, 2, 6, 8)
    for message, arguments in {
        "weights must be": (weights[0], v, 2),
        "v must be fp32": (weights, v.int(), 2),
        "v must be \\[1": (weights, v[:, :, :5], 2),
        "keep must be": (weights, v, 0),
    }.items():
        with pytest.raises(ValueError, match=f"sparse_values: {message}"):
            sparse_values(*arguments)
