"""sparse_values in Triton against float64, over odd shapes; rows that are not kept are never loaded."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import LIMITS, assert_near, poisoned

from forebay.kernels.attention.sparse_values.gpu import sparse_values
from forebay.kernels.attention.sparse_values.reference import reference


@pytest.mark.parametrize("dtype", tuple(LIMITS))
@pytest.mark.parametrize(("keep", "queries", "dim"), ((1, 1, 40), (70, 3, 64), (150, 1, 33)))
def test_near_reference(keep: int, queries: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = torch.rand(2, 6, queries, 150).softmax(-1)
    v = torch.randn(2, 160, 2, dim).to(dtype).transpose(1, 2)
    out = poisoned(2, queries, 6, dim, dtype=dtype)
    sparse_values(weights, v, keep, out)
    assert_near(out, reference(weights, v, keep))


def test_dropped_rows_do_not_count() -> None:
    v, out = poisoned(1, 1, 5, 8, dtype=torch.float32), poisoned(1, 1, 1, 8, dtype=torch.float32)
    v[0, 0, 1], v[0, 0, 3] = 1.0, torch.inf
    sparse_values(torch.tensor([0.1, 0.4, 0.1, 0.3, 0.1]).view(1, 1, 1, 5), v, 1, out)
    torch.testing.assert_close(out, torch.full_like(out, 0.4))
    sparse_values(torch.tensor([0.1, 0.4, 0.1, 0.3, 0.1]).view(1, 1, 1, 5), v, 2, out)
    assert out.isposinf().all()


def test_bad_arguments_are_named() -> None:
    weights, v, out = torch.ones(1, 4, 1, 6), torch.ones(1, 2, 6, 8), poisoned(1, 1, 4, 8, dtype=torch.float32)
    bad = {
        "weights must be \\[": (weights[0], v, 2, out),
        "weights must be of": (weights.int(), v, 2, out),
        "v must be \\[1, a divisor": (weights, torch.ones(1, 3, 6, 8), 2, out),
        "v must be \\[1, a divisor of 4, at least 6": (weights, v[:, :, :5], 2, out),
        "keep must be in": (weights, v, 7, out),
        "out must be of": (weights, v, 2, out.half()),
        "weights must be on": (weights.to("meta"), v, 2, out),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"sparse_values: {message}"):
            sparse_values(*arguments)
    assert out.isnan().all()
