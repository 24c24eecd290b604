"""packing: the stated layout, byte by byte, views that share memory, and what it must refuse."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels.formats import packing, row_sizes


def test_codes_low_nibble_first() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    packed = packing.pack_codes(codes, 4)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(packing.unpack_codes(packed, 4), codes)
    assert torch.equal(packing.pack_codes(codes, 8), codes) and torch.equal(packing.unpack_codes(codes, 8), codes)


@pytest.mark.parametrize(
    ("k", "bits", "group", "nbytes"),
    ((576, 4, 64, 288 + 36 + 12), (576, 4, 32, 288 + 72 + 8), (577, 4, 64, 320 + 40 + 8), (1, 4, 32, 16 + 4 + 12),
     (576, 8, 128, 640 + 20 + 12), (2048, 4, 64, 1024 + 128), (0, 4, 64, 0)),
)  # fmt: skip
def test_row_nbytes(k: int, bits: int, group: int, nbytes: int) -> None:
    assert row_sizes.row_nbytes(k, bits, group) == nbytes
    assert nbytes % 16 == 0


def test_w4g64_is_at_most_029_of_fp16() -> None:
    for k in (576, 1536, 2048, 4096, 5632, 14336):
        assert row_sizes.row_nbytes(k, 4, 64) <= (0.295 if k == 576 else 0.29) * 2 * k


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("k", (1, 33, 64, 300))
@pytest.mark.parametrize("symmetric", (False, True))
def test_rows_hold_codes_scales_lows_and_zeros(bits: int, dtype: torch.dtype, k: int, symmetric: bool) -> None:
    groups, nbytes = row_sizes.group_count(k, 32), row_sizes.codes_nbytes(k, bits, 32)
    packed = torch.randint(0, 256, (5, nbytes), dtype=torch.uint8)
    scale, low = torch.randn(2, 5, groups).to(dtype).unbind()
    given = (packed, scale) if symmetric else (packed, scale, low)
    rows = packing.pack_rows(packed, scale.mT.contiguous().mT, None if symmetric else low)
    assert rows.shape == (5, row_sizes.row_nbytes(k, bits, 32, symmetric=symmetric)) and rows.is_contiguous()
    for i in range(5):
        raw = bytes(rows[i].tolist())
        want = bytes(packed[i].tolist()) + scale[i].clone().view(torch.uint8).numpy().tobytes()
        if not symmetric:
            want += low[i].clone().view(torch.uint8).numpy().tobytes()
        assert raw == want.ljust(rows.shape[1], b"\0")
    found = packing.unpack_rows(rows, k, bits, 32, dtype, symmetric)
    assert (found[2] is None) == symmetric
    views = [view for view in found if view is not None]
    for view, part in zip(views, given, strict=True):
        assert torch.equal(view, part)
    rows[2:4] = 0  # rows [2, 4) are one contiguous slice; the views see it
    for view, part in zip(views, given, strict=True):
        assert (view[2:4] == 0).all() and torch.equal(view[4], part[4])


def test_refuses() -> None:
    rows = torch.zeros(3, 48, dtype=torch.uint8)
    columns, scalar = torch.zeros(48, 3, dtype=torch.uint8).t(), torch.tensor(1, dtype=torch.uint8)
    for bad in (rows.float(), rows[:, :39], columns, scalar):
        with pytest.raises(ValueError, match="unpack_rows: rows"):
            packing.unpack_rows(bad, 64, 4, 32, torch.float16)
    with pytest.raises(ValueError, match="scale_dtype"):
        packing.unpack_rows(rows, 64, 4, 32, torch.float32)
    for bits, group in ((3, 32), (4, 0), (4, 31)):
        with pytest.raises(ValueError, match="bits" if bits == 3 else "group_size"):
            row_sizes.row_nbytes(64, bits, group)
    scale = torch.zeros(3, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match="low"):
        packing.pack_rows(rows[:, :32], scale, scale.bfloat16())
    with pytest.raises(ValueError, match="packed"):
        packing.pack_rows(rows[:2, :32], scale, scale)
