"""layer_norm in Triton against the reference in float64, over odd shapes and special values."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import LIMITS, assert_near, poisoned

from forebay.kernels.norms.layer_norm.gpu import bind_layer_norm
from forebay.kernels.norms.layer_norm.operator import LAYER_NORM
from forebay.kernels.norms.layer_norm.reference import reference
from forebay.kernels.operator import Tensors


@pytest.mark.parametrize("dtype", tuple(LIMITS))
@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("shape", ((1, 1), (3, 5, 77), (5, 1600)))
def test_near_reference(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, out = (torch.randn(shape) + 3).to(dtype), poisoned(*shape, dtype=dtype)
    weight, bias = torch.randn(2, shape[-1]).to(dtype).unbind() if affine else (None, None)
    bind_layer_norm(x, weight, bias, 1e-5, out)()
    assert_near(out, reference(x, weight, bias, 1e-5))


def test_special_values_as_torch() -> None:
    x = torch.randn(4, 9)
    x[0, 3], x[1, 2], x[2] = torch.nan, torch.inf, 5
    out = poisoned(4, 9, dtype=torch.float32)
    bind_layer_norm(x, None, None, 1e-5, out)()
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (9,)), equal_nan=True)


def test_bad_arguments_are_named() -> None:
    x, weight, out = torch.ones(2, 8), torch.ones(8), poisoned(2, 8, dtype=torch.float32)
    bad = {
        "layer_norm: x must be of": (x.int(), weight, None, 1e-5, out),
        "layer_norm: bias must have shape": (x, weight, torch.ones(9), 1e-5, out),
        "layer_norm: weight must be on": (x, weight.to("meta"), None, 1e-5, out),
        "layer_norm: out must have a contiguous": (x, weight, None, 1e-5, torch.ones(8, 2).T),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=message):
            bind_layer_norm(*arguments)()
    assert out.isnan().all()


def test_a_bound_launch_follows_what_its_tensors_hold() -> None:
    x, weight, out = torch.randn(3, 40).half(), torch.randn(40).half(), poisoned(3, 40, dtype=torch.float16)
    run = LAYER_NORM.bind["cuda"](Tensors((x, weight, None, 1e-5), {}, (out,)))
    for _ in range(2):
        x.normal_()
        run()
        assert_near(out, reference(x, weight, None, 1e-5))
    assert LAYER_NORM.workspace_nbytes(Tensors((x, weight, None, 1e-5), {}, (out,)), "cuda") == 0
