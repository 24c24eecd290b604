"""dequantize_rows in Triton gives the reference's bits, wherever rows and result lie."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import poisoned

from forebay.kernels import operators
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing
from forebay.kernels.operator import Tensors
from forebay.kernels.quantization.dequantize_rows.gpu import bind_dequantize_rows
from forebay.kernels.quantization.dequantize_rows.reference import reference
from forebay.kernels.quantization.quantize.reference import reference as quantized


def packed(
    n: int, k: int, bits: int, group: int, scale_dtype: torch.dtype = torch.float16, symmetric: bool = False
) -> torch.Tensor:
    torch.manual_seed(n + k)
    codes, scale, low = quantized(torch.randn(n, k), bits, group, 1, scale_dtype)
    return packing.pack_rows(codes, scale, None if symmetric else low)


@pytest.mark.covering(2)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(7, 64, 32), (5, 70, 32), (33, 203, 64), (1, 33, 128), (3, 90, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_references_bits(
    bits: int, n: int, k: int, group: int, dtype: torch.dtype, transposed: bool, symmetric: bool
) -> None:
    rows = packed(n, k, bits, group, symmetric=symmetric)
    arguments = k, bits, group, torch.float16, dtype, transposed, symmetric
    expected = reference(rows, *arguments)
    bind_dequantize_rows(rows, *arguments, out=(found := torch.empty_like(expected)))()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_a_wider_matrix_into_part_of_one(transposed: bool) -> None:
    wide = torch.full((9, 3 * packed(9, 70, 4, 32).shape[1]), 255, dtype=torch.uint8)
    rows = wide[:, wide.shape[1] // 3 : 2 * wide.shape[1] // 3]
    rows.copy_(packed(9, 70, 4, 32))
    arguments = 70, 4, 32, torch.float16, torch.float16, transposed
    held = poisoned(*((70, 20) if transposed else (9, 100)), dtype=torch.float16)
    out = held[:, 3:12] if transposed else held[:, 20:90]
    bind_dequantize_rows(rows, *arguments, out=out)()
    assert torch.equal(out, reference(rows, *arguments))
    assert held.isnan().sum() == held.numel() - out.numel()


def test_the_operator_binds_it_and_takes_no_workspace() -> None:
    rows = packed(6, 70, 4, 32)[None].repeat(2, 1, 1)
    arguments = rows, 70, 4, 32, torch.float16, torch.bfloat16, False
    out = torch.empty(2, 6, 70, dtype=torch.bfloat16)
    use = Tensors(arguments, {}, (out,))
    operators.DEQUANTIZE_ROWS.bind["cuda"](use)()
    assert torch.equal(out, reference(*arguments))
    assert operators.DEQUANTIZE_ROWS.workspace_nbytes(use, "cuda") == 0
    assert (operators.DEQUANTIZE_ROWS.workspace_nbytes(use, "cpu") > 0) == (native.load() is None)


@pytest.mark.parametrize(
    ("change", "problem"),
    (
        ({"out": torch.empty(6, 71).half()}, "out must have shape"),
        ({"out": torch.empty(6, 70)}, "out must be of torch.float16"),
        ({"rows": packed(6, 70, 4, 32)[:, :-4]}, "rows must be uint8"),
        ({"rows": packed(12, 70, 4, 32).view(2, 6, -1)[:, :3], "out": torch.empty(2, 3, 70).half()}, "one stride"),
    ),
)
def test_bad_arguments_are_named(change: dict, problem: str) -> None:
    good = {"rows": packed(6, 70, 4, 32), "out": torch.empty(6, 70).half()} | change
    with pytest.raises(ValueError, match=f"dequantize_rows: .*{problem}"):
        bind_dequantize_rows(good["rows"], 70, 4, 32, torch.float16, torch.float16, False, out=good["out"])
