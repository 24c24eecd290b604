"""`forebay::dequantize_rows` gives what the packed rows stand for, in any shape, and names bad arguments."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels import operators
from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.packing import pack_rows
from forebay.kernels.quantization.dequantize_rows import cpu as module_cpu
from forebay.kernels.quantization.dequantize_rows import reference as module_reference
from forebay.kernels.quantization.quantize.cpu import quantize_rows
from forebay.kernels.quantization.quantize.operator import dequantize, quantize


@pytest.mark.covering(2)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group"), [(64, 32), (70, 32), (33, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_equals_the_unpacked_groups(
    bits: int, k: int, group: int, dtype: torch.dtype, transposed: bool, symmetric: bool
) -> None:
    weight = torch.randn(7, k, generator=torch.Generator().manual_seed(k))
    parts = quantize(weight, bits, group, 1, torch.float16, "symmetric" if symmetric else "minmax")
    rows = pack_rows(*parts[:2], None) if symmetric else quantize_rows(weight, bits, group)
    expected = dequantize(*parts, bits, group, 1, k, dtype)
    if symmetric:
        assert torch.equal(dequantize(*parts[:2], None, bits, group, 1, k, dtype), expected)
    arguments = (k, bits, group, torch.float16, dtype, transposed, symmetric)
    got = operators.DEQUANTIZE_ROWS.overload(rows, *arguments)
    assert got.dtype == dtype and got.is_contiguous()
    assert torch.equal(got.T if transposed else got, expected)
    out = torch.full_like(got, float("nan"))
    module_cpu.bind_dequantize_rows(rows, *arguments, out=out)()
    assert torch.equal(out, got)
    if not transposed:  # any leading dimensions: rows that a lookup brought
        index = torch.tensor([[3, 0], [6, 3]])
        assert torch.equal(operators.DEQUANTIZE_ROWS.overload(rows[index], *arguments), expected[index])
    torch.library.opcheck(operators.DEQUANTIZE_ROWS.overload, (rows, *arguments))


def test_bad_arguments_are_named() -> None:
    rows = quantize_rows(torch.randn(4, 64), 4, 32)
    good = (64, 4, 32, torch.float16, torch.float32, False)
    with pytest.raises(ValueError, match=r"dequantize_rows: rows must be uint8 \[\.\.\., "):
        operators.DEQUANTIZE_ROWS.overload(rows[:, :-1], *good)
    with pytest.raises(ValueError, match="dequantize_rows: rows must be uint8"):
        operators.DEQUANTIZE_ROWS.overload(rows.float(), *good)
    with pytest.raises(ValueError, match="dequantize_rows: bits must be 4 or 8"):
        operators.DEQUANTIZE_ROWS.overload(rows, 64, 3, 32, torch.float16, torch.float32, False)
    with pytest.raises(ValueError, match="must be a matrix to be transposed"):
        operators.DEQUANTIZE_ROWS.overload(rows[None], *good[:-1], True)


def test_workspace_covers_what_a_call_takes() -> None:
    rows = quantize_rows(torch.randn(64, 256), 4, 64)
    bound = module_cpu.workspace_nbytes(rows.shape[:-1].numel(), 256, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        module_reference.reference(rows, 256, 4, 64, torch.float16, torch.float32, False)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert 64 * 256 * 4 < taken <= bound + 64 * 256 * 4 + 8 * row_sizes.row_nbytes(256, 4, 64) * 64
