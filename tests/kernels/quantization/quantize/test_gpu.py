"""quantize and dequantize in Triton against the torch reference, bit for bit, and the bound on the round trip."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from torch import Tensor

from forebay.kernels.formats import packing
from forebay.kernels.quantization.quantize import reference as definition
from forebay.kernels.quantization.quantize.gpu import dequantize, quantize

SHAPES = (
    ((5, 130), 1, 64),
    ((70, 5), 0, 32),
    ((2, 131, 3), 1, 128),
    ((3, 50), -1, 12),
    ((7,), 0, 32),
    ((3, 64, 2), -2, 32),
)


def assert_same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scale_dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize(("shape", "dim", "group"), SHAPES)
def test_equals_the_reference(
    shape: tuple[int, ...], dim: int, group: int, bits: int, scale_dtype: torch.dtype
) -> None:
    torch.manual_seed(sum(shape))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(shape).to(dtype)
        got = quantize(x, bits, group, dim, scale_dtype)
        for mine, theirs in zip(got, definition.reference(x, bits, group, dim, scale_dtype), strict=True):
            assert_same(mine, theirs)
        back = dequantize(*got, bits, group, dim, x.shape[dim], torch.float32)
        assert_same(back, definition.dequantize_reference(*got, bits, group, dim, x.shape[dim]))
        step = got[1].movedim(dim, -1).float().repeat_interleave(group, -1)[..., : x.shape[dim]].movedim(-1, dim)
        assert ((back - x.float()).abs() <= step / 2 + 1e-6 * x.float().abs().max()).all()


def test_extremes_as_the_reference() -> None:
    x = torch.randn(9, 64)
    x[0] = 3.5  # constant
    x[1, 5], x[2, 6], x[3, 7] = torch.nan, torch.inf, -torch.inf
    x[4] = torch.linspace(-65504, 65504, 64)
    x[5] *= 1e-8  # subnormal scales
    x[6, 0] = -1e6  # beyond fp16
    x[7] = 0.0
    x[8] = -1e-9
    for bits in (4, 8):
        packed, scale, low = quantize(x, bits, 64, 1, torch.float16)
        want = definition.reference(x, bits, 64, 1, torch.float16)
        assert_same(packed, want[0])
        assert_same(scale, want[1])
        finite = want[1].isfinite()
        assert_same(low[finite], want[2][finite])
        assert scale[1:4].isnan().all() and scale[6].isnan().all()
        back = dequantize(packed, scale, low, bits, 64, 1, 64, torch.float16)
        assert_same(back, definition.dequantize_reference(*want, bits, 64, 1, 64, torch.float16))
        assert (back[0] == 3.5).all() and back[4].isfinite().all() and back[1:4].isnan().all()


@pytest.mark.parametrize(("scale_dtype", "powers"), [(torch.float16, (-18, 3)), (torch.bfloat16, (-120, 100))])
@pytest.mark.parametrize("bits", (4, 8))
def test_codes_are_those_of_an_exact_division(bits: int, scale_dtype: torch.dtype, powers: tuple[int, int]) -> None:
    """At half steps, where ties go to even numbers, at the numbers beside them, and for scales of any size."""
    generator = torch.Generator().manual_seed(bits)
    top, rows, group = (1 << bits) - 1, 64, 128
    step = 1.0 + torch.rand(rows, 1, generator=generator)
    step = (step * torch.logspace(*powers, rows, 2.0)[:, None]).to(scale_dtype).float()
    x = torch.randint(0, 2 * top, (rows, group), generator=generator) / 2 * step
    x[:, ::3] = x[:, ::3].nextafter(torch.tensor(torch.inf))
    x[:, 1::3] = x[:, 1::3].nextafter(torch.tensor(0.0))
    x[:, 0], x[:, 1] = 0.0, top * step[:, 0]
    wanted = definition.reference(x, bits, group, 1, scale_dtype)
    assert torch.equal(wanted[1].float(), step) and wanted[0].unique().numel() > 200
    for mine, theirs in zip(quantize(x, bits, group, 1, scale_dtype), wanted, strict=True):
        assert_same(mine, theirs)


def test_strided_inputs() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 6).T
    parts = quantize(x, 4, 32, 1, torch.float16)
    for mine, theirs in zip(parts, definition.reference(x, 4, 32, 1, torch.float16), strict=True):
        assert_same(mine, theirs)
    rows = packing.pack_rows(*parts)
    views = packing.unpack_rows(rows, 40, 4, 32, torch.float16)
    assert_same(dequantize(*views, 4, 32, 1, 40, torch.bfloat16), dequantize(*parts, 4, 32, 1, 40, torch.bfloat16))


def test_nothing_to_do() -> None:
    parts = quantize(torch.ones(0, 40), 4, 32, 1, torch.float16)
    assert [tuple(p.shape) for p in parts] == [(0, 32), (0, 2), (0, 2)]
    assert dequantize(*parts, 4, 32, 1, 40, torch.float32).shape == (0, 40)


def test_bad_arguments_are_named() -> None:
    x = torch.ones(2, 32)
    bad = {
        "x must be of": (x.long(), 4, 32, 1, torch.float16),
        "bits must be 4 or 8": (x, 3, 32, 1, torch.float16),
        "group_size must be even": (x, 4, 33, 1, torch.float16),
        "dim must be one of": (x, 4, 32, 2, torch.float16),
        "scale_dtype must be one of": (x, 4, 32, 1, torch.float32),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"^quantize: {message}"):
            quantize(*arguments)
    packed, scale, low = quantize(x, 4, 32, 1, torch.float16)
    bad_back = {
        "packed must be of": (packed.int(), scale, low, 4, 32, 1, 32, torch.float16),
        "packed must have 32 bytes": (packed, scale, low, 4, 32, 1, 33, torch.float16),
        "scale must have shape": (packed, scale[:1], low, 4, 32, 1, 32, torch.float16),
        "low must be of": (packed, scale, low.float(), 4, 32, 1, 32, torch.float16),
        "low must be on": (packed, scale, low.to("meta"), 4, 32, 1, 32, torch.float16),
        "dtype must be one of": (packed, scale, low, 4, 32, 1, 32, torch.int8),
    }
    for message, rest in bad_back.items():
        with pytest.raises(ValueError, match=f"^dequantize: {message}"):
            dequantize(*rest)
