"""Packed cache rows by Triton, interpreted: the reference's 8-bit rows bit for bit, its 4-bit rows but for ties."""

from __future__ import annotations

import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from forebay.kernels.cache.kv_append_q import gpu
from forebay.kernels.cache.kv_append_q import reference as op
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.quantization.quantize.reference import reference as quantize_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def made(dim: int, bits: int, group: int, dtype: torch.dtype, start: tuple[int, ...] = (4, 1), new: int = 2) -> list:
    """Strided caches of 0xff between positions that no call may touch, and K, V as a runtime has them."""
    generator = torch.Generator().manual_seed(dim + bits)
    row = row_sizes.row_nbytes(dim, bits, group, row_sizes.CACHE_ALIGN)
    caches = torch.full((2, len(start), 3, 9, row), 0xFF, dtype=torch.uint8)[..., :7, :]
    k, v = (torch.randn(len(start), new, 3, dim, generator=generator) * 3 + 1 for _ in "kv")
    k[..., dim // 2] += 20.0
    k, v = (x.to(dtype).transpose(1, 2) for x in (k, v))
    return [*caches, k, v, torch.tensor(start), bits, group]


def written(cache: Tensor, args: list) -> Tensor:
    """The rows of a cache at the new positions, [B, Hkv, S, R]."""
    return torch.stack([cache[b, :, begin : begin + args[2].shape[2]] for b, begin in enumerate(args[4].tolist())])


def values(cache: Tensor, args: list) -> Tensor:
    """What the rows of a cache at the new positions stand for, [B, Hkv, S, D] in float64."""
    return op.unpack(written(cache, args), args[2].shape[3], *args[5:]).double()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=("fp16", "bf16", "fp32"))
@pytest.mark.parametrize(
    ("dim", "bits", "group"),
    [(64, 4, 32), (128, 4, 32), (128, 8, 64), (80, 4, 40), (64, 8, 64), (96, 8, 48), (37, 4, 12), (3, 4, 4)],
)
def test_rows_are_those_of_the_reference(dim: int, bits: int, group: int, dtype: torch.dtype) -> None:
    """Codes of 4 bits are of ranges fitted in float32: a range may come out one fp16 number beside the reference's."""
    args = made(dim, bits, group, dtype)
    args[2][0, 0, 0] = 0.75  # a constant group where it is not rotated
    wanted = op.reference(*args)
    gpu.bind_kv_append_q(*args)()
    for cache, want, x in zip(args[:2], wanted, args[2:4], strict=True):
        if bits == 8:
            assert torch.equal(cache, want)
            continue
        assert (written(cache, args) != written(want, args)).double().mean() < 0.02
        found, beside, x = values(cache, args), values(want, args), x.double()
        assert (found - x).norm() <= 1.001 * (beside - x).norm()
        step = packing.unpack_rows(written(want, args), dim, bits, group, torch.float16)[1].max()
        assert (found - beside).abs().max() <= 1.01 * step * op.rotation_size(dim) ** 0.5
        for b, begin in enumerate(args[4].tolist()):
            cache[b, :, begin : begin + x.shape[2]] = 0xFF
        assert (cache == 0xFF).all()


def test_ranges_are_fitted() -> None:
    """The error is what the reference's fit leaves, below that of plain ranges."""
    args = made(64, 4, 32, torch.float32, (0,), 7)
    gpu.bind_kv_append_q(*args)()
    for cache, x in zip(args[:2], args[2:4], strict=True):
        rows = op._hadamard(x.reshape(-1, 64)) * op._factors(64)[0]
        plain = packing.pack_rows(*quantize_reference(rows, 4, 32, 1, torch.float16), align=4)
        unfitted = op.unpack(plain, 64, 4, 32).double().view(x.shape) - x
        assert (values(cache, args) - x).norm() < 0.97 * unfitted.norm()


def test_positions_outside_are_left_out() -> None:
    args = made(64, 8, 64, torch.float16, (6, -1))
    gpu.bind_kv_append_q(*args)()
    rows = op.pack(args[2], 8, 64)
    assert torch.equal(args[0][0, :, 6], rows[0, :, 0]) and torch.equal(args[0][1, :, 0], rows[1, :, 1])
    assert (args[0][0, :, :6] == 0xFF).all() and (args[0][1, :, 1:] == 0xFF).all()


@pytest.mark.parametrize("bits", (4, 8))
def test_what_cannot_be_held_reads_back_as_nan(bits: int) -> None:
    """A rotation spreads it over its block of 32."""
    args = made(64, bits, 32, torch.float32, (0,), 4)
    k = args[2]
    k[0, 0, 0, 1], k[0, 0, 1, 2], k[0, 1, 2, 45], k[0, 1, 3, 0] = math.nan, math.inf, -math.inf, 1e30
    gpu.bind_kv_append_q(*args)()
    lost = values(args[0], args).isnan().view(3, 4, 2, 32)
    assert torch.equal(lost.all(-1), lost.any(-1))
    assert lost.all(-1).nonzero().tolist() == [[0, 0, 0], [0, 1, 0], [1, 2, 1], [1, 3, 0]]


def test_a_bound_call_reads_present_contents() -> None:
    args = made(20, 8, 20, torch.float16, (0,), 1)
    call = gpu.bind_kv_append_q(*args)
    for position in (5, 2):
        args[4].fill_(position)
        args[2].normal_()
        call()
        assert torch.equal(args[0][:, :, position], op.pack(args[2], 8, 20)[:, :, 0])
    assert (args[0][:, :, [0, 1, 3, 4, 6]] == 0xFF).all()


@pytest.mark.parametrize(
    ("index", "argument", "wrong"),
    [(2, "k", lambda x: x.double()), (3, "v", lambda x: x[:, :, :1]), (4, "start", lambda x: x.int()),
     (2, "k", lambda x: x.mT.contiguous().mT), (0, "k_cache", lambda x: x[..., :-4]),
     (1, "v_cache", lambda x: x.new_zeros(x.numel() + 1)[1:].view(x.shape)), (5, "bits", lambda x: 3)],
)  # fmt: skip
def test_bad_arguments_are_named_before_a_launch(index: int, argument: str, wrong: object) -> None:
    args = made(64, 4, 32, torch.float16)
    args[index] = wrong(args[index])  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"^kv_append_q: {argument} "):
        gpu.bind_kv_append_q(*args)
