"""The PTX that unpacks codes, evaluated by hand."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import re
from pathlib import Path

import pytest
import torch
from ptx_blocks import evaluate

from forebay.kernels.gpu_support import unpacking


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
            low_block = unpacking.W4_FP16 if fp16 else unpacking.W4_BF16
            block = unpacking.W4_FP16_HIGH if high else low_block
            inputs = [words >> (4 * part - 4 * high), *twice]
        else:
            block = unpacking.W8_FP16 if fp16 else unpacking.W8_BF16
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
    source = re.sub(r"\s+", " ", Path(unpacking.__file__).read_text())
    for shift in ("w >> (4 * PART), scale", "w >> (4 * PART - 4), scale", "(w << 3) if PART == 0 else (w >> 5)",
                  "(w >> 1) if PART == 0 else (w >> 9)", "(w << 6) if PART == 0 else (w >> 2)",
                  "(w << 2) if PART == 0 else (w >> 6)"):  # fmt: skip
        assert shift in source
