"""Rows with a codebook: every implementation on the CPU, and Triton's, compared with the definition."""

from __future__ import annotations

import itertools
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from selection import at_length

from forebay.kernels.formats import codebooks, packing
from forebay.kernels.formats.packing import Packing
from forebay.kernels.products.experts.cpu import bind_experts
from forebay.kernels.products.experts.reference import Form, Storage, Stored
from forebay.kernels.products.linear_q import cpu
from forebay.kernels.products.linear_q.reference import reference
from forebay.kernels.quantization.dequantize_rows.cpu import bind_dequantize_rows
from forebay.kernels.quantization.dequantize_rows.reference import reference as dequantized
from tests.kernels.products.experts.test_cpu import ROUNDING, case
from tests.kernels.products.linear_q.test_cpu import tolerance

CASES = [Packing(8, 128, 128, torch.bfloat16, False, "e4m3"), Packing(8, 160, 32, torch.bfloat16, False, "e4m3"),
         Packing(4, 576, 32, torch.bfloat16, True, "e2m1"), Packing(4, 160, 16, torch.bfloat16, False, "e2m1"),
         Packing(4, 160, 64, torch.bfloat16, False, "nf4"), Packing(4, 320, 128, torch.bfloat16, False, "fp4"),
         Packing(4, 160, 16, torch.float16, True, "iq2"), Packing(4, 160, 32, torch.float16, True, "iq3"),
         Packing(4, 192, 96, torch.float16, True, "iq1"), Packing(4, 192, 96, torch.bfloat16, False, "nf4")]

NUMBERS = dict.fromkeys(codebooks.CODEBOOKS, 0.0) | {"nf4": 0.5 / 16383}  # off as integers, of the largest


def random_rows(stored: Packing, n: int) -> torch.Tensor:
    groups = -(-stored.in_features // stored.group_size)
    codes = torch.randint(0, 256, (n, groups * stored.group_size * stored.bits // 8), dtype=torch.uint8)
    if stored.codebook == "e4m3":
        codes[codes & 127 == 127] = 1
    scale = (torch.rand(n, groups) * 0.5 + 0.01) / codebooks.largest(stored.codebook)
    if stored.symmetric:
        return packing.pack_rows(codes, scale.to(stored.scale_dtype), None)
    upper, lower = codebooks.split_scales(scale)
    assert torch.equal(codebooks.joined_scales(upper, lower), scale)
    return packing.pack_rows(codes, upper, lower)


@pytest.mark.parametrize("stored", CASES, ids=lambda stored: f"{stored.format}-{stored.in_features}")
def test_rows_are_multiplied_as_they_are_defined(stored: Packing) -> None:
    rows, k = random_rows(stored, 37), stored.in_features
    how = k, stored.bits, stored.group_size, stored.scale_dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(37, k, dtype=dtype)
        then = dtype, False, stored.symmetric, stored.codebook
        bind_dequantize_rows(rows, *how, *then, out=out)()
        weight = dequantized(rows, *how, torch.float32, *then[1:]).double()
        assert torch.equal(out, dequantized(rows, *how, *then))
        for m in (1, 2, 3, 4, 5, 70):
            x = torch.randn(m, k, dtype=dtype)
            expected = reference(x, rows, None, stored)
            for impl in cpu.implementations(stored.bits, stored.codebook):
                y = torch.empty(m, 37, dtype=dtype)
                cpu.bind_linear_q(impl, x, rows, None, y, stored)()
                bound = tolerance(impl, x, weight, stored.group_size, y, None)
                if impl == "int16" and m <= cpu.CODED_INTEGER_ROWS:
                    off = weight.abs().amax(1) * NUMBERS[stored.codebook]
                    bound += x.double().abs().sum(1, keepdim=True) * off
                assert ((y.double() - expected).abs() <= bound).all(), (m, dtype, impl)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_fp8_rows_give_the_same_bits_in_any_company(group: int) -> None:
    """Rows of weights are taken several at a time, as many as rows of x leave room for."""
    stored = Packing(8, 320, group, torch.bfloat16, False, "e4m3")
    rows, x = random_rows(stored, 11), torch.randn(4, 320)
    whole = torch.empty(4, 11)
    cpu.bind_linear_q("flat", x, rows, None, whole, stored)()
    for m, (first, end) in itertools.product((1, 2, 3), ((0, 11), (2, 8), (10, 11))):
        part = torch.empty(m, end - first)
        cpu.bind_linear_q("flat", x[:m], rows[first:end], None, part, stored)()
        assert torch.equal(part, whole[:m, first:end]), (m, first)


@pytest.mark.parametrize("stored", [c for c in CASES if c.bits == 4], ids=lambda stored: stored.format)
def test_few_rows_that_are_no_numbers_take_floats(stored: Packing) -> None:
    """Infinity and NaN stay in their row of x; a row so small that it has no integers loses nothing."""
    rows, k = random_rows(stored, 19), stored.in_features
    x = torch.randn(4, k)
    x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, x[3] * 1e-38
    for impl in cpu.implementations(stored.bits, stored.codebook):
        y = torch.empty(4, 19)
        cpu.bind_linear_q(impl, x, rows, None, y, stored)()
        expected = reference(x, rows, None, stored)
        assert not y[1:3].isfinite().any()
        assert (y[0].double() - expected[0]).abs().max() <= 1e-4 * expected[0].abs().max()
        assert (y[3].double() - expected[3]).abs().max() <= 1e-4 * expected[3].abs().max()


@pytest.mark.parametrize("stored", CASES, ids=lambda stored: f"{stored.format}-{stored.in_features}")
def test_triton_gives_the_references_bits(stored: Packing) -> None:
    gpu = pytest.importorskip("forebay.kernels.quantization.dequantize_rows.gpu")
    rows, k = random_rows(stored, 7), stored.in_features
    for dtype in ROUNDING:
        for transposed in (False, True):
            how = (k, stored.bits, stored.group_size, stored.scale_dtype, dtype, transposed, stored.symmetric,
                   stored.codebook)
            expected = dequantized(rows, *how)
            gpu.bind_dequantize_rows(rows, *how, out=(found := torch.empty_like(expected)))()
            assert torch.equal(found, expected), (dtype, transposed)


@pytest.mark.parametrize("stored", [c if i % 2 else at_length(c) for i, c in enumerate(CASES)],
                         ids=lambda stored: f"{stored.format}-{stored.in_features}")
def test_experts_read_them(stored: Packing) -> None:
    """By the C++ kernel, few tokens and more than meet codes in registers, and by Triton's."""
    gpu = pytest.importorskip("forebay.kernels.products.experts.gpu")
    how = Stored(stored.bits, stored.group_size, stored.scale_dtype, stored.symmetric, stored.codebook)
    for dtype, tokens in itertools.product(ROUNDING, (2, 40)):
        each = case(tokens, 2, 3, Form(), Storage(), dtype, 96, 160)
        up, down = (torch.stack([random_rows(how.packing(k), n) for _ in range(3)]) for n, k in ((320, 96), (96, 160)))
        each.experts, each.stored = each.experts._replace(up=up, down=down), Storage(how, how)
        for bind in (bind_experts, gpu.bind_experts) if (dtype, tokens) == (torch.float32, 2) else (bind_experts,):
            out = torch.full_like(each.x, torch.nan)
            bind(each.x, each.index, each.weights, each.experts, each.form, each.stored, out)()
            integers = bind is bind_experts and "int16" in cpu.implementations(stored.bits, stored.codebook)
            assert each.error(out) < ROUNDING[dtype] + 1e-4 * integers, (tokens, bind)
