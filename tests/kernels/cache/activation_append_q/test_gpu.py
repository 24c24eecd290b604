"""Checkpoint rows by Triton, interpreted: the bits of the reference, poisoned rows around them untouched."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")

from forebay.kernels.cache.activation_append_q import gpu
from forebay.kernels.cache.activation_append_q import reference as op_reference
from forebay.kernels.formats import row_sizes


def made(features: int, bits: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row = row_sizes.row_nbytes(features, bits, group)
    cache = torch.full((2, 8, row + 6), 0xFF, dtype=torch.uint8)[:, :6, :row]
    x = torch.randn(2, 2, features, generator=torch.Generator().manual_seed(5)) * 3 + 1
    return cache, x.to(dtype), torch.tensor([[5, 1], [3, 0]])


def append(cache: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, bits: int, group: int) -> None:
    op_reference.check(cache, x, rows, bits, group)
    gpu.bind_activation_append_q(cache, x, rows, bits, group)()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=("fp16", "bf16", "fp32"))
@pytest.mark.parametrize(
    ("features", "bits", "group"), ((100, 8, 64), (1100, 8, 64), (50, 8, 128), (37, 8, 32), (100, 4, 64))
)
def test_writes_the_bits_of_the_reference(features: int, bits: int, group: int, dtype: torch.dtype) -> None:
    cache, x, rows = made(features, bits, group, dtype)
    x[0, 0, :group] = 0.75  # a constant group
    wanted = op_reference.reference(cache, x, rows, bits, group)
    append(cache, x, rows, bits, group)
    assert torch.equal(cache, wanted)
    assert (cache.as_strided((2, 8, 6), cache.stride(), cache.shape[2]) == 0xFF).all()


def test_rows_outside_are_left_out() -> None:
    cache, x, _ = made(100, 8, 64, torch.float16)
    append(cache, x, torch.tensor([[5, 6], [-1, 0]]), 8, 64)
    packed = op_reference.pack(x, 8, 64)
    assert torch.equal(cache[0, 5], packed[0, 0]) and torch.equal(cache[1, 0], packed[1, 1])
    assert (cache[0, :5] == 0xFF).all() and (cache[1, 1:] == 0xFF).all()


def test_what_cannot_be_held_reads_back_as_nan() -> None:
    cache, x, rows = made(100, 8, 64, torch.float32)
    x[0, 0, 3], x[0, 1, 70], x[1, 0, 5] = torch.nan, torch.inf, -1e6
    append(cache, x, rows, 8, 64)
    found = torch.stack([op_reference.unpack(cache[b, places], 100, 8, 64) for b, places in enumerate(rows)])
    wanted = torch.zeros(2, 2, 100, dtype=torch.bool)
    wanted[0, 0, :64] = wanted[0, 1, 64:] = wanted[1, 0, :64] = True
    assert torch.equal(found.isnan(), wanted)


def test_strided_activations_and_features_that_must_be_contiguous() -> None:
    cache, x, rows = made(100, 8, 64, torch.float16)
    wide = torch.cat((x, x), -1).transpose(0, 1).contiguous().transpose(0, 1)[..., :100]
    append(cache, wide, rows, 8, 64)
    assert torch.equal(cache, op_reference.reference(cache, x, rows, 8, 64))
    with pytest.raises(ValueError, match=r"^activation_append_q: x "):
        append(cache, x.transpose(1, 2).contiguous().transpose(1, 2), rows, 8, 64)
