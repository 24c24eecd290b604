"""What the kernels' tests share: outputs that start as NaN, and relative errors against float64."""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of NaN."""
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    """The relative error over all elements, and that of the worst element over the largest magnitude, are below the
    limit of got's dtype, and NaN and infinities are the same."""
    assert got.shape == want.shape
    wide, exact = got.double(), want.double()
    torch.testing.assert_close(wide.isnan(), exact.isnan())
    infinite = exact.isinf()
    torch.testing.assert_close(wide[infinite], exact[infinite])
    finite = exact.isfinite()
    assert wide[finite].isfinite().all()
    away = wide[finite] - exact[finite]
    error = away.norm() / exact[finite].norm().clamp_min(1e-30)
    assert error <= LIMITS[got.dtype], f"relative error {error:.2e}"
    if away.numel():
        worst = away.abs().max() / exact[finite].abs().max().clamp_min(1e-30)
        assert worst <= LIMITS[got.dtype], f"an element is off by {worst:.2e} of the largest"
