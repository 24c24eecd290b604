"""quantize: the paper's formula, the error bound on awkward inputs, C++ against torch bit for bit, and refusals."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from allocated import peak_allocated
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples
from torch import Tensor

from forebay.kernels.build import compile
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.quantization.quantize.cpu import quantize_rows
from forebay.kernels.quantization.quantize.operator import DEQUANTIZE, QUANTIZE, dequantize, quantize
from forebay.kernels.quantization.quantize.reference import reference

SCALE_DTYPES = (torch.float16, torch.bfloat16)
needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


def per_element(part: Tensor, x: Tensor, group: int, dim: int) -> Tensor:
    """A scale or low for every element of x, in float64."""
    return part.double().repeat_interleave(group, dim).narrow(dim, 0, x.shape[dim])


def assert_half_step(x: Tensor, bits: int, group: int, dim: int, scale_dtype: torch.dtype) -> None:
    packed, scale, low = quantize(x, bits, group, dim, scale_dtype)
    step, base = per_element(scale, x, group, dim), per_element(low, x, group, dim)
    size, one, zero = x.shape[dim], torch.ones_like(scale), torch.zeros_like(low)
    codes = dequantize(packed, one, zero, bits, group, dim, size, torch.float32)
    top = (1 << bits) - 1
    assert (codes >= 0).all() and (codes <= top).all()
    value = codes.double() * step + base
    # Codes are chosen in fp32, within 2^-22 of the range.
    slack = step * top * 2.0**-22
    assert ((value - x.double()).abs() <= step / 2 + slack).all()
    # Every x lies in the stored range.
    assert (base <= x.double()).all() and (x.double() <= base + top * step * (1 + 2.0**-22)).all()
    made = dequantize(packed, scale, low, bits, group, dim, x.shape[dim], torch.float32)
    assert torch.equal(made, value.float())  # one rounding


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("group", (32, 64, 128))
def test_codes_are_the_papers_where_minimum_and_scale_are_stored_exactly(path: str, bits: int, group: int) -> None:
    """x_quant = round((x - min) / (max - min) * (2^b - 1)), FlexGen section 5, evaluated in rational numbers."""
    torch.manual_seed(bits + group)
    top, rows = (1 << bits) - 1, 12
    low = torch.randn(rows, 1).half().float()
    step = torch.rand(rows, 1).add(0.01).half().float()
    x = low + torch.rand(rows, group) * step * top
    x[:, :1], x[:, 1:2] = low, low + step * top
    x[:, 2:4] = low + step * (torch.tensor([2.5, 3.5]))  # ties, which round to even
    exact = (low.double() + step.double() * top == x[:, 1:2].double()).flatten()  # high must be an fp32 number
    assert exact.sum() > 3
    x = x[exact]
    packed, scale, lows = quantize(x, bits, group, 1, torch.float16)
    assert torch.equal(lows.float(), low[exact]) and torch.equal(scale.float(), step[exact])
    codes = packing.unpack_codes(packed, bits)
    for row, got in zip(x.tolist(), codes.tolist(), strict=True):
        least, most = Fraction(min(row)), Fraction(max(row))
        assert got == [round((Fraction(v) - least) / (most - least) * top) for v in row]


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_codes_are_the_papers_on_the_stored_range(path: str, scale_dtype: torch.dtype) -> None:
    """For any x the formula holds with the stored minimum and maximum in place of the true ones."""
    torch.manual_seed(3)
    x = torch.randn(9, 300)
    for bits in (4, 8):
        packed, scale, low = quantize(x, bits, 64, 1, scale_dtype)
        codes = packing.unpack_codes(packed, bits)
        top = (1 << bits) - 1
        for r in range(9):
            for i, v in enumerate(x[r].tolist()):
                least, step = Fraction(low[r, i // 64].item()), Fraction(scale[r, i // 64].item())
                assert codes[r, i] == round((Fraction(v) - least) / (step * top) * top)


BITS = st.sampled_from((4, 8))
ordinary = st.floats(-100, 100, width=32)
awkward = st.sampled_from(
    (0.0, -0.0, 1.0, 1.0 + 2.0**-23, 6.1e-5, 5.9e-8, -1e-10, 1e-38, 1.4e-45, -1.4e-45, 65000.0, -65000.0, 0.1)
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """[rows, size] of ordinary and awkward numbers, with constant rows, and rows scaled to the smallest numbers."""
    rows, size = draw(st.integers(1, 3)), draw(st.integers(1, 150))
    values = draw(st.lists(st.one_of(ordinary, awkward), min_size=1, max_size=rows * size))
    x = torch.from_numpy(np.resize(np.array(values, np.float32), (rows, size)))
    kind = draw(st.sampled_from(("plain", "constant", "tiny", "denormal", "offset")))
    if kind == "constant":
        x[0] = x[0, 0].clone()
    elif kind in ("tiny", "denormal"):
        x = x * (1e-9 if kind == "tiny" else 1e-41)
    elif kind == "offset":
        x = x * 1e-4 + 1000
    return x


@settings(max_examples=examples(120), deadline=None)
@given(tensors(), BITS, st.sampled_from((2, 32, 64, 128)), st.integers(0, 1), st.sampled_from(SCALE_DTYPES))
def test_round_trip_error_is_half_a_step(x: Tensor, bits: int, group: int, dim: int, scale_dtype: torch.dtype) -> None:
    assert_half_step(x, bits, group, dim, scale_dtype)


@settings(max_examples=examples(60), deadline=None)
@given(tensors(), BITS, st.sampled_from((2, 32, 34)), st.integers(0, 1), st.sampled_from(SCALE_DTYPES))
@needs_compiler
def test_cpp_and_torch_give_the_same_bits(x: Tensor, bits: int, group: int, dim: int, scale_dtype: torch.dtype) -> None:
    for one in (x, x.bfloat16()):
        made = quantize(one, bits, group, dim, scale_dtype)
        want = reference(one, bits, group, dim, scale_dtype)
        for part, other in zip(made, want, strict=True):
            kind = torch.int16 if part.dtype != torch.uint8 else torch.uint8
            assert torch.equal(part.view(kind), other.view(kind))


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_constant_groups_are_exact_where_the_value_is_stored(path: str, scale_dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1.5, -2.0, 1024.0])[:, None].expand(5, 70).contiguous()
    packed, scale, low = quantize(x, 4, 32, 1, scale_dtype)
    assert (scale == 0).all() and (packed == 0).all()
    assert torch.equal(dequantize(packed, scale, low, 4, 32, 1, 70, torch.float32), x)
    assert not low[:2].signbit().any()
    assert_half_step(torch.full((2, 70), 0.1), 4, 32, 1, scale_dtype)  # not stored exactly, so scale > 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_partial_groups_are_padded_with_zero_codes(path: str, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 45) + 7).to(dtype)
    packed, _, _ = quantize(x, 4, 32, 1, torch.float16)
    assert packed.shape == (3, 32)
    codes = packing.unpack_codes(packed, 4)
    assert (codes[:, 45:] == 0).all()
    # The padding takes no part in the range of the last group.
    assert (codes[:, 32:45].amax(1) == 15).all() and (codes[:, 32:45].amin(1) == 0).all()


@pytest.mark.parametrize("dim", (0, 1, 2, -2))
def test_any_dimension(path: str, dim: int) -> None:
    x = torch.randn(3, 37, 5)[:, :, ::2]
    packed, scale, low = quantize(x, 4, 4, dim, torch.bfloat16)
    assert packed.is_contiguous() and scale.shape == low.shape
    back = dequantize(packed, scale, low, 4, 4, dim, x.shape[dim], torch.float32)
    last = quantize(x.movedim(dim, -1), 4, 4, -1, torch.bfloat16)
    assert torch.equal(packed.movedim(dim, -1), last[0])
    assert torch.equal(back.movedim(dim, -1), dequantize(*last, 4, 4, 2, x.shape[dim], torch.float32))


def test_largest_numbers_stay_finite(path: str) -> None:
    x = torch.zeros(1, 32, dtype=torch.float16)
    x[0, 3] = 65504
    assert torch.equal(dequantize(*quantize(x, 4, 32, 1, torch.float16), 4, 32, 1, 32, torch.float16), x)
    assert_half_step(torch.tensor([[1e30, -1e37, 3e37, 0.0]]), 8, 32, 1, torch.bfloat16)


@pytest.mark.parametrize("rounding", ("minmax", "mse", "symmetric"))
def test_refuses_what_it_cannot_hold(path: str, rounding: str) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(5, 70)
        x[3, 66] = bad
        for dim in (0, 1):
            with pytest.raises(ValueError, match="quantize: x holds NaN or infinity"):
                quantize(x, 4, 32, dim, torch.bfloat16, rounding)
    for bad in (-1e6, 2e6):
        x[3, 66] = bad
        with pytest.raises(ValueError, match=r"float16 cannot hold; scale_dtype=torch\.bfloat16"):
            quantize(x, 4, 32, 1, torch.float16, rounding)
        quantize(x, 4, 32, 1, torch.bfloat16, rounding)
    x[3, 65], x[3, 66] = -3e38, 3e38
    with pytest.raises(ValueError, match="bfloat16 cannot hold"):
        quantize(x, 4, 32, 1, torch.bfloat16, rounding)


def test_groups_that_cannot_be_held_are_nan_in_the_reference() -> None:
    x = torch.randn(2, 64)
    x[0, 3], x[1, 40] = torch.inf, torch.nan
    parts = reference(x, 4, 32, 1, torch.float16)
    lost = dequantize(*parts, 4, 32, 1, 64, torch.float32).isnan()
    assert lost.view(2, 2, 32).all(-1).tolist() == [[True, False], [False, True]] and lost.sum() == 64


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_the_middle_code_of_symmetric_ranges_stands_for_zero(bits: int, scale_dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x = torch.randn(40, 96) * torch.logspace(-6, 3, 40)[:, None]
    x[0], x[1], x[2], x[3] = 0.0, x[1].abs(), -x[2].abs(), 3.0
    x[:, ::7] = 0.0
    codes, scale, low = quantize(x, bits, 32, 1, scale_dtype, "symmetric")
    assert torch.equal(low.float(), scale.float() * -(1 << (bits - 1)))
    found = dequantize(codes, scale, low, bits, 32, 1, 96, torch.float32)
    assert (found[:, ::7] == 0).all()
    step = scale.float().repeat_interleave(32, 1)
    assert ((found - x).abs() <= step * (0.5 + 1e-6)).all()
    plain = quantize(x, bits, 32, 1, scale_dtype)[1].float()
    assert (scale.float() <= 2.3 * plain + 1e-7)[4:].all() and not scale[0].any()


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_mse_has_less_squared_error(bits: int, scale_dtype: torch.dtype) -> None:
    """Never more in any group than minmax, and well below it where there are outliers."""
    torch.manual_seed(4)
    x = torch.randn(40, 200)
    x[:, ::50] *= 4
    x[0] = 1.5

    def squared_error(rounding: str) -> Tensor:
        parts = quantize(x, bits, 64, 1, scale_dtype, rounding)
        error = (dequantize(*parts, bits, 64, 1, 200, torch.float32) - x).square()
        return torch.nn.functional.pad(error, (0, 56)).view(40, 4, 64).sum(-1)

    plain, searched = squared_error("minmax"), squared_error("mse")
    assert (searched <= plain * (1 + 1e-5)).all()
    assert searched.sum() < (0.9 if bits == 4 else 1.0) * plain.sum()


@pytest.mark.parametrize("rounding", ("minmax", "mse", "symmetric"))
def test_quantize_rows_is_quantize_and_pack(path: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.kernels.quantization.quantize.cpu.PIECE_ELEMENTS", 700)  # several pieces
    weight = torch.randn(11, 150).bfloat16()
    want = packing.pack_rows(*reference(weight, 4, 64, 1, torch.float16, rounding))
    assert torch.equal(quantize_rows(weight, 4, 64, torch.float16, rounding), want)
    wide = torch.full((11, want.shape[1] + 6), 0xFF, dtype=torch.uint8)
    quantize_rows(weight.t().contiguous().t(), 4, 64, torch.float16, rounding, out=wide[:, 2:-4])
    assert torch.equal(wide[:, 2:-4], want) and (wide[:, :2] == 0xFF).all() and (wide[:, -4:] == 0xFF).all()


def test_torch_path_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held beside input and result does not grow with the weight."""
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr("forebay.kernels.quantization.quantize.cpu.PIECE_ELEMENTS", 1 << 13)
    peaks = []
    for rows in (64, 256):
        weight = torch.randn(rows, 256)
        peak = peak_allocated(partial(quantize_rows, weight, 4, 64))
        peaks.append(peak - rows * row_sizes.row_nbytes(256, 4, 64))
    assert 0 < peaks[1] <= peaks[0] * 1.1


def test_empty_sizes(path: str) -> None:
    for shape in ((0, 64), (3, 0), (0, 0)):
        parts = quantize(torch.empty(shape), 4, 32, 1, torch.float16)
        assert dequantize(*parts, 4, 32, 1, shape[1], torch.bfloat16).shape == shape


@pytest.mark.parametrize(
    ("argument", "change"),
    (
        ("x", {"x": torch.zeros(2, 64, dtype=torch.float64)}),
        ("bits", {"bits": 5}),
        ("group_size", {"group_size": 33}),
        ("dim", {"dim": 2}),
        ("scale_dtype", {"scale_dtype": torch.float32}),
        ("rounding", {"rounding": "best"}),
    ),
)
def test_quantize_refuses_by_name(argument: str, change: dict) -> None:
    given_args = {"x": torch.zeros(2, 64), "bits": 4, "group_size": 32, "dim": 1, "scale_dtype": torch.float16} | change
    with pytest.raises(ValueError, match=f"quantize: {argument} "):
        quantize(**given_args)


@pytest.mark.parametrize(
    ("argument", "change"),
    (
        ("packed", {"packed": torch.zeros(2, 31, dtype=torch.uint8)}),
        ("packed", {"packed": torch.zeros(2, 32)}),
        ("scale", {"scale": torch.zeros(2, 3).half()}),
        ("low", {"low": torch.zeros(2, 2).bfloat16()}),
        ("size", {"size": -1}),
        ("dtype", {"dtype": torch.float64}),
    ),
)
def test_dequantize_refuses_by_name(argument: str, change: dict) -> None:
    half = torch.zeros(2, 2).half()
    given_args = {"packed": torch.zeros(2, 32, dtype=torch.uint8), "scale": half, "low": half, "bits": 4,
                  "group_size": 32, "dim": 1, "size": 64, "dtype": torch.float32} | change  # fmt: skip
    with pytest.raises(ValueError, match="dequantize: "):
        dequantize(**given_args)


@pytest.mark.parametrize("dim", (0, 1))
def test_opcheck(dim: int) -> None:
    x = torch.randn(37, 45)
    torch.library.opcheck(QUANTIZE.overload, (x, 4, 32, dim, torch.float16))
    parts = quantize(x, 4, 32, dim, torch.float16)
    torch.library.opcheck(DEQUANTIZE.overload, (*parts, 4, 32, dim, x.shape[dim], torch.bfloat16))
