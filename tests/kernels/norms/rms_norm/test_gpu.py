"""rms_norm in Triton against the reference in float64, over odd shapes, strides and special values."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import LIMITS, assert_near, poisoned

from forebay.kernels.norms.rms_norm.gpu import MAX_COLUMNS, bind_rms_norm
from forebay.kernels.norms.rms_norm.reference import reference

DTYPES = tuple(LIMITS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((1, 1), (3, 5, 77), (7, 576), (2, 3, 5, 16)))
def test_near_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, out = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype), poisoned(*shape, dtype=dtype)
    bind_rms_norm(x, weight, 1e-5, out)()
    assert_near(out, reference(x.double(), weight.double(), 1e-5))


def test_heads_of_a_transposed_slice_and_in_place() -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 3, 6 * 16).half()  # [B, S, heads of q, k and v]
    heads = wide[..., : 4 * 16].view(2, 3, 4, 16).transpose(1, 2)
    weight, rest = torch.randn(16).half(), wide[..., 64:].clone()
    want = reference(heads.double(), weight.double(), 1e-6)
    bind_rms_norm(heads, weight, 1e-6, heads)()
    assert_near(heads, want)
    assert torch.equal(wide[..., 64:], rest)


def test_special_values_as_torch() -> None:
    x = torch.ones(4, 9)
    x[0, 3], x[1, 2], x[2] = torch.nan, torch.inf, 0
    weight, out = torch.ones(9), poisoned(4, 9, dtype=torch.float32)
    bind_rms_norm(x, weight, 0.0, out)()
    torch.testing.assert_close(out, reference(x, weight, 0.0), equal_nan=True)


def test_bad_arguments_are_named() -> None:
    x, weight, out = torch.ones(2, 8), torch.ones(8), poisoned(2, 8, dtype=torch.float32)
    bad = {
        "x must be of": (x.double(), weight, 1e-5, out),
        "weight must have shape": (x, torch.ones(7), 1e-5, out),
        "weight must be of": (x, weight.half(), 1e-5, out),
        "out must have shape": (x, weight, 1e-5, out[:1]),
        "out must be on": (x, weight, 1e-5, out.to("meta")),
        "x must have a contiguous": (torch.ones(8, 2).T, weight, 1e-5, out),
        f"at most {MAX_COLUMNS}": (torch.ones(1, MAX_COLUMNS + 1), weight, 1e-5, out),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"rms_norm: .*{message}"):
            bind_rms_norm(*arguments)()
    assert out.isnan().all()
