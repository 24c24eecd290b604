"""linear_w4 and linear_w8 in Triton against float64, and the PTX that unpacks codes, evaluated by hand."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from closeness import assert_near, poisoned
from torch import Tensor
from torch.nn import functional

from forebay.kernels import packing
from forebay.kernels.gpu import linear_quantized, linear_w4, linear_w8
from forebay.kernels.quantize import dequantize_reference, reference

OPS: dict[int, Callable[..., Tensor]] = {4: linear_w4.linear_w4, 8: linear_w8.linear_w8}


def weight(n: int, k: int, bits: int, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(rows, what they stand for in fp32)."""
    parts = reference(torch.randn(n, k) / k**0.5, bits, group, 1, scale_dtype)
    return packing.pack_rows(*parts), dequantize_reference(*parts, bits, group, 1, k)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(
    ("impl", "m", "n", "k", "group"),
    (
        ("gemv", 1, 9, 203, 32),
        ("gemv_8x512_s2", 2, 13, 600, 128),
        ("flat", 1, 70, 203, 64),
        ("flat_64x128_s2", 7, 66, 331, 32),
        ("flat", 16, 33, 259, 128),
        ("large", 70, 37, 70, 64),
        ("", 3, 40, 72, 64),
    ),
)
def test_near_float64(impl: str, m: int, n: int, k: int, group: int, dtype: torch.dtype, bits: int) -> None:
    torch.manual_seed(m + n + k)
    rows, w = weight(n, k, bits, group, dtype)
    x, bias, residual = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)
    out = poisoned(m, n, dtype=dtype)
    assert OPS[bits](x, rows, bias, residual, k, group, "gelu", dtype, out, impl) is out
    assert_near(out, functional.gelu(x.double() @ w.double().T + bias.double()) + residual.double())


@pytest.mark.parametrize("bits", (4, 8))
def test_rows_of_a_wider_matrix_other_scales_and_a_multiplier(bits: int) -> None:
    torch.manual_seed(0)
    rows, w = weight(20, 100, bits, 32, torch.float16)
    wide = torch.full((20, rows.shape[1] + 32), 255, dtype=torch.uint8)
    wide[:, 16:-16] = rows
    x, other = torch.randn(1, 4, 100).bfloat16(), torch.randn(1, 4, 20).bfloat16()
    got = OPS[bits](x, wide[:, 16:-16], None, None, 100, 32, "", torch.float16, multiplier=other)
    assert_near(got, x.double() @ w.double().T * other.double())


@pytest.mark.parametrize("impl", ("gemv", "flat"))
@pytest.mark.parametrize("bits", (4, 8))
def test_special_values_as_torch(bits: int, impl: str) -> None:
    torch.manual_seed(0)
    rows, w = weight(6, 70, bits, 32, torch.float16)
    x = torch.randn(2, 70).half()
    x[0, 3], x[1, 50] = torch.nan, torch.inf
    packing.unpack_rows(rows, 70, bits, 32, torch.float16)[1][2, 0] = torch.nan  # the scale of a group of row 2
    w[2, :32] = torch.nan
    got = OPS[bits](x, rows, None, None, 70, 32, "", torch.float16, None, impl)
    assert_near(got, x.double() @ w.to(x.dtype).double().T)


def evaluate(ptx: str, inputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The pair of values [P, 2] in dtype that a block of mov, lop3 and packed fma leaves in $0, for int64 inputs."""
    held: dict[str, Tensor] = {f"${i + 1}": value for i, value in enumerate(inputs)}

    def halves(name: str) -> Tensor:
        value = held[name]
        words = torch.stack((value & 0xFFFF, value >> 16), -1).to(torch.uint16)
        return words.view(dtype).double()

    for statement in ptx.strip("{} ").split(";"):
        name, _, rest = statement.strip().partition(" ")
        names = [part.strip() for part in rest.split(",")]
        if name == "mov.b32":
            held[names[0]] = torch.tensor(int(names[1], 16)).expand_as(inputs[0])
        elif name == "lop3.b32":
            assert names[4] == "0xEA"  # (a & b) | c
            held[names[0]] = (held[names[1]] & held[names[2]]) | held[names[3]]
        elif name.startswith("fma.rn."):
            words = (halves(names[1]) * halves(names[2]) + halves(names[3])).to(dtype).view(torch.uint16).long()
            held[names[0]] = words[..., 0] | (words[..., 1] << 16)
        else:
            assert not name or name == ".reg", statement
    return halves("$0")


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("bits", (4, 8))
def test_ptx_makes_the_weights_of_every_code(bits: int, dtype: torch.dtype) -> None:
    """The shifts and blocks of weights_of, over words that hold every code in every place, against q * scale + low."""
    torch.manual_seed(0)
    words = torch.randint(0, 1 << 32, (4096,))
    scale, low = torch.rand(4096).to(dtype) / 16, torch.randn(4096).to(dtype)
    twice = [value.view(torch.uint16).long() * 0x10001 for value in (scale, low)]
    fp16 = dtype == torch.float16
    for part in range(16 // bits):
        if bits == 4:
            high = fp16 and part % 2 == 1
            low_block = linear_quantized.W4_FP16 if fp16 else linear_quantized.W4_BF16
            block = linear_quantized.W4_FP16_HIGH if high else low_block
            inputs = [words >> (4 * part - 4 * high), *twice]
        else:
            block = linear_quantized.W8_FP16 if fp16 else linear_quantized.W8_BF16
            # Low nibbles go to bits 6 (fp16) or 3 (bf16) on, high ones to the same place.
            low_shift, high_shift = ((-6, -2), (2, 6))[part] if fp16 else ((-3, 1), (5, 9))[part]
            moved = [words << -s if s < 0 else words >> s for s in (low_shift, high_shift)]
            inputs = [moved[0] & 0xFFFFFFFF, *twice, moved[1] & 0xFFFFFFFF]
        made = evaluate(block.value, inputs, dtype)
        for half in range(2):
            codes = (words >> (part * bits + half * 16)) & ((1 << bits) - 1)
            want = (codes.double() * scale.double() + low.double()).to(dtype).double()
            assert torch.equal(made[:, half], want)
            assert codes.unique().numel() == 1 << bits


def test_ptx_shifts_stand_in_the_kernel() -> None:
    """The shifts that the test above takes are those of the kernel's source."""
    source = re.sub(r"\s+", " ", Path(linear_quantized.__file__).read_text())
    for shift in ("w >> (4 * PART), scale", "w >> (4 * PART - 4), scale", "(w << 3) if PART == 0 else (w >> 5)",
                  "(w >> 1) if PART == 0 else (w >> 9)", "(w << 6) if PART == 0 else (w >> 2)",
                  "(w << 2) if PART == 0 else (w >> 6)"):  # fmt: skip
        assert shift in source


@pytest.mark.parametrize("bits", (4, 8))
def test_bad_arguments_are_named(bits: int) -> None:
    rows, _ = weight(8, 64, bits, 32, torch.float16)
    x, out = torch.ones(2, 64).half(), poisoned(2, 8, dtype=torch.float16)

    def refused(message: str, **changed: object) -> None:
        arguments: dict[str, object] = {
            "x": x, "rows": rows, "bias": None, "residual": None, "in_features": 64, "group_size": 32,
            "activation": "", "scale_dtype": torch.float16, "out": out,
        }  # fmt: skip
        with pytest.raises(ValueError, match=f"^linear_w{bits}: {message}"):
            OPS[bits](**(arguments | changed))

    refused("x must be of", x=x.float())
    refused("x must end in 64 columns", x=x[:, :60])
    refused("rows must be of", rows=rows.to(torch.int32))
    refused("rows must be \\[N, ", rows=rows[:, :-16])
    refused("rows must be on", rows=rows.to("meta"))
    wide = torch.zeros(8, rows.shape[1] + 8, dtype=torch.uint8)
    refused("rows must lie a multiple of 16", rows=wide[:, : rows.shape[1]])
    refused("rows must start at", rows=torch.zeros(rows.numel() + 8, dtype=torch.uint8)[8:].view(rows.shape))
    refused("group_size must be one of", group_size=48)
    refused("scale_dtype must be one of", scale_dtype=torch.float32)
    refused("bias must have shape", bias=torch.ones(7).half())
    refused("residual must have shape", residual=torch.ones(2, 7).half())
    refused("out must have shape", out=out[:1])
    refused("activation must be one of", activation="tanh")
    refused("impl must be one of", impl="int16")
    assert out.isnan().all()
