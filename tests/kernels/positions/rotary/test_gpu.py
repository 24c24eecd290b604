"""rotary in Triton against the reference, over odd shapes and strides."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import LIMITS, assert_near, poisoned

from forebay.kernels.positions.rotary.gpu import bind_rotary
from forebay.kernels.positions.rotary.reference import reference


@pytest.mark.parametrize("dtype", tuple(LIMITS))
@pytest.mark.parametrize("shape", ((1, 1, 1, 2), (2, 5, 7, 80), (3, 33, 1, 64), (1, 3, 5, 128)))
def test_near_reference(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, heads, queries, dim = shape
    x = torch.randn(batch, queries, heads, dim).to(dtype).transpose(1, 2)
    out = poisoned(batch, queries, heads, dim, dtype=dtype).transpose(1, 2)
    for rows in {1, batch}:
        cos, sin = torch.randn(2, rows, queries, dim).to(dtype).unbind()
        bind_rotary(x, cos, sin, out)()
        assert_near(out, reference(x.double(), cos.double(), sin.double()))


def test_in_place() -> None:
    x, cos, sin = torch.randn(2, 3, 4, 16), torch.randn(1, 4, 16), torch.randn(1, 4, 16)
    want = reference(x, cos, sin)
    bind_rotary(x, cos, sin, x)()
    torch.testing.assert_close(x, want)


def test_special_values_as_torch() -> None:
    x, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    x[0, 0, 0, 1], x[0, 1, 2, 7], out = torch.nan, torch.inf, poisoned(1, 2, 3, 8, dtype=torch.float32)
    bind_rotary(x, cos, sin, out)()
    torch.testing.assert_close(out, reference(x, cos, sin), equal_nan=True)


def test_bad_arguments_are_named() -> None:
    x, table, out = torch.ones(2, 3, 4, 8), torch.ones(1, 4, 8), poisoned(2, 3, 4, 8, dtype=torch.float32)
    bad = {
        "x must be \\[B, H, S, D\\]": (x[0], table, table, out),
        "an even D": (torch.ones(2, 3, 4, 7), table, table, out),
        "cos must have shape": (x, torch.ones(3, 4, 8), table, out),
        "sin must be of": (x, table, table.half(), out),
        "out must be on": (x, table, table, out.to("meta")),
        "x must have a contiguous": (torch.ones(2, 3, 8, 4).mT, table, table, out),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"rotary: .*{message}"):
            bind_rotary(*arguments)()
    assert out.isnan().all()
