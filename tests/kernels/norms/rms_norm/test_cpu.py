"""rms_norm: native and torch paths against Llama's module and float64, over dtypes, odd sizes and strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from forebay.kernels.build import compile
from forebay.kernels.norms.rms_norm import reference as module
from forebay.kernels.norms.rms_norm.cpu import bind_rms_norm
from forebay.kernels.norms.rms_norm.operator import RMS_NORM
from forebay.kernels.norms.rms_norm.reference import reference

rms_norm = RMS_NORM.overload
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sums are taken in another order than torch's: y may round to its neighbour, and weight * y once more.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SMALLEST = 2.0**-23  # two units of fp16's subnormals
needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


def make(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)


def eager(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm = LlamaRMSNorm(x.shape[-1], eps)
    norm.weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        made: Tensor = norm(x)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((1,), (1, 1), (3, 17), (2, 5, 576), (1, 1, 64), (40, 1000)))
def test_matches_llama(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = make(shape, dtype)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype and got.shape == x.shape and got.is_contiguous()
    torch.testing.assert_close(got, eager(x, weight, 1e-5), rtol=TOLERANCE[dtype], atol=SMALLEST)
    wide = x.double()
    exact = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(got.double(), exact, rtol=1.5 * TOLERANCE[dtype], atol=SMALLEST)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@needs_compiler
def test_rounds_before_the_weight(dtype: torch.dtype) -> None:
    """x of one magnitude has exact means, so every path must give the same bits; one rounding alone would not."""
    torch.manual_seed(2)
    x = torch.full((7, 576), 1.4140625).to(dtype) * torch.randn(7, 576).sign().to(dtype)
    weight = torch.randn(576).to(dtype)
    got = rms_norm(x, weight, 0.01)
    assert torch.equal(got, eager(x, weight, 0.01))
    wide = x.float()
    once = (weight.float() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.01)).to(dtype)
    assert not torch.equal(got, once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_written_in_place_and_alone(path: str, dtype: torch.dtype) -> None:
    x, weight = make((6, 40), dtype)
    view = x[::2, 3:36]
    want, before = eager(view, weight[:33], 1e-6), x.clone()
    wide = torch.full((3, 50), 7.0, dtype=dtype)
    bind_rms_norm(view, weight[:33], 1e-6, wide[:, 5:38])()
    torch.testing.assert_close(wide[:, 5:38], want, rtol=TOLERANCE[dtype], atol=0)
    assert (wide[:, :5] == 7).all() and (wide[:, 38:] == 7).all() and torch.equal(x, before)
    bind_rms_norm(view, weight[:33], 1e-6, view)()
    assert torch.equal(view, wide[:, 5:38])
    view.copy_(before[::2, 3:36])
    assert torch.equal(x, before)


def test_strides_without_rows_fall_back() -> None:
    x, weight = make((4, 5, 24), torch.float32)
    for view in (x.transpose(0, 1), x[:, 1:, :], x.transpose(1, 2)[..., :4], x[..., ::2]):
        part = weight[: view.shape[-1]]
        got = rms_norm(view, part, 1e-6)
        assert got.is_contiguous()
        torch.testing.assert_close(got, eager(view, part, 1e-6), rtol=1e-6, atol=0)
    spread = torch.randn(48)[::2]
    torch.testing.assert_close(rms_norm(x, spread, 1e-6), eager(x, spread, 1e-6), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_torchs(path: str, dtype: torch.dtype) -> None:
    x, weight = make((6, 35), dtype)
    x[0, 3], x[1, 34], x[2, 0], x[3] = torch.nan, torch.inf, -torch.inf, 0
    x[4] = torch.finfo(dtype).max
    weight[7] = torch.inf
    got, want = rms_norm(x, weight, 1e-6), eager(x, weight, 1e-6)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=0, equal_nan=True)
    assert got[0].isnan().all() and got[3, 7].isnan() and got[5, 7].isinf()


def test_binding_reads_present_contents() -> None:
    x, weight = make((2, 20), torch.float32)
    out = torch.empty(2, 20)
    call = bind_rms_norm(x, weight, 1e-6, out)
    x.copy_(torch.randn(2, 20))
    weight.mul_(2)
    call()
    torch.testing.assert_close(out, reference(x, weight, 1e-6), rtol=1e-6, atol=0)


def test_empty() -> None:
    assert rms_norm(torch.ones(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert rms_norm(torch.ones(3, 0), torch.ones(0), 1e-6).shape == (3, 0)


@pytest.mark.parametrize(
    ("x", "weight", "out", "match"),
    (
        (torch.ones(2, 4).double(), torch.ones(4), None, "rms_norm: x must be fp32"),
        (torch.ones(2, 4), torch.ones(4).bfloat16(), None, "rms_norm: weight must be .* x's dtype"),
        (torch.ones(2, 4), torch.ones(5), None, r"rms_norm: weight must have shape \(4,\)"),
        (torch.tensor(1.0), torch.ones(1), None, "rms_norm: x must have at least one dimension"),
        (torch.ones(2, 4), torch.ones(4), torch.ones(4, 2), r"rms_norm: out must have x's shape \(2, 4\)"),
        (torch.ones(2, 4), torch.ones(4), torch.ones(2, 4, device="meta"), "rms_norm: out must be on the CPU"),
    ),
)
def test_wrong_arguments_are_named(x: Tensor, weight: Tensor, out: Tensor | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        module.check(x, weight, out)


def test_opcheck() -> None:
    for dtype in DTYPES:
        x, weight = make((2, 3, 17), dtype)
        torch.library.opcheck(rms_norm, (x, weight, 1e-6))
    torch.library.opcheck(rms_norm, (x.transpose(0, 1), weight, 1e-6))
