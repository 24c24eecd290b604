"""The table of formats: bytes of rows as they are packed, and names that are none."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels.cache.kv_append_q.reference import pack
from forebay.kernels.formats.packing import pack_rows
from forebay.kernels.formats.table import (
    ACT8,
    CACHE_FORMATS,
    NATIVE,
    WEIGHT_FORMATS,
    cache_format,
    packed_caches,
    symmetric_name,
    weight_format,
    weight_name,
)
from forebay.kernels.operators import find
from forebay.kernels.quantization.quantize.cpu import quantize_rows
from forebay.kernels.quantization.quantize.operator import quantize
from forebay.kernels.quantization.quantize.reference import coded_rows


@pytest.mark.parametrize("size", (64, 128, 576, 4096))
@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, "w4g48", "w8g32"])
def test_rows_of_weights_are_as_long_as_the_table_says(name: str, size: int) -> None:
    found = weight_format(name)
    if found is NATIVE:
        assert found.row_nbytes(size, 2) == 2 * size and found.ratio(size, 4) == 1.0
        return
    if found.codebook:
        rows = coded_rows(torch.randn(3, size), found.bits, found.group_size, found.symmetric, found.codebook)
    else:
        rows = quantize_rows(torch.randn(3, size), found.bits, found.group_size, torch.float16)
    assert rows.shape[1] == found.row_nbytes(size, 4) == found.ratio(size, 4) * 4 * size


@pytest.mark.parametrize("size", (1, 64, 576, 4096))
@pytest.mark.parametrize(("name", "bits"), (("w4g32s", 4.5), ("w8g16s", 9.0), ("w8g128s", 8.125)))
def test_symmetric_rows_have_no_lows(name: str, bits: float, size: int) -> None:
    found = weight_format(name)
    assert weight_name(found.bits, found.group_size, found.symmetric) == name == symmetric_name(name)
    assert symmetric_name(weight_name(found.bits, found.group_size)) == name and symmetric_name("native") == "native"
    codes, scale, low = quantize(torch.randn(3, size), found.bits, found.group_size, 1, torch.float16, "symmetric")
    assert torch.equal(low, scale * -(1 << found.bits - 1))
    rows = pack_rows(codes, scale, None)
    assert rows.shape[1] == found.row_nbytes(size, 2)
    if size == 4096:
        assert 8 * found.row_nbytes(size, 2) / size == bits


@pytest.mark.parametrize("size", (32, 64, 80, 96, 128, 256))
@pytest.mark.parametrize("name", ("kv8", "kv4"))
def test_rows_of_caches_are_as_long_as_the_table_says(name: str, size: int) -> None:
    found = packed_caches()[name]
    rows = pack(torch.randn(1, 1, 2, size), *found.arguments(size).values())
    assert rows.shape[-1] == found.row_nbytes(size, 2) == found.ratio(size, 4) * 4 * size


@pytest.mark.parametrize("size", (32, 64, 80, 128))
@pytest.mark.parametrize("name", packed_caches())
def test_rows_of_caches_lose_what_the_table_says(name: str, size: int) -> None:
    """Of a single position attention gives the value."""
    found = packed_caches()[name]
    append, attend = find(found.append), find(found.attend)
    assert append is not None and attend is not None and attend.cache_format((torch.empty(1, 1, 1, size), *[None] * 6,
                                                                              *found.arguments(size).values())) == name
    values = torch.randn(512, 2, 1, size, generator=torch.Generator().manual_seed(1))
    caches = [torch.zeros(512, 2, 1, found.row(size), dtype=torch.uint8) for _ in "kv"]
    start, how = torch.zeros(512, dtype=torch.int64), found.arguments(size).values()
    append.overload(*caches, values, values, start, *how)
    back = attend.overload(values, *caches, start, 1.0, 0, 0.0, *how).transpose(1, 2)
    assert 0.5 * found.error < (back - values).norm() / values.norm() <= found.error


def test_bits_of_an_element() -> None:
    """Codes, and a scale and a low of 16 bits for each group."""
    bits = {name: 8 * f.row_nbytes(128, 2) / 128 for name, f in CACHE_FORMATS.items()}
    assert bits == {"native": 16.0, "kv8": 8.5, "kv4": 5.0}
    weights = {name: 8 * f.row_nbytes(4096, 2) / 4096 for name, f in WEIGHT_FORMATS.items()}
    assert weights == {"native": 16.0, "w4g32": 5.0, "w4g64": 4.5, "w4g128": 4.25, "w8": 8.25, "fp8": 8.25,
                       "mxfp4": 4.5, "nvfp4": 6.0, "nf4": 4.5, "fp4": 4.5, "iq1": 4.5, "iq2": 4.5, "iq3": 4.5}
    assert ACT8.row_nbytes(4096, 2) == 4352


@pytest.mark.parametrize("name", ("w4", "w3", "w4g33", "w8g0", "w8s", "w4gs", "kv4", "act8", "W8", ""))
def test_what_is_no_format_of_a_weight_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no weight format '{name}'; there are native"):
        weight_format(name)


def test_no_two_layouts_have_one_name() -> None:
    assert set(CACHE_FORMATS) & set(WEIGHT_FORMATS) == {"native"} and ACT8.name not in {*CACHE_FORMATS, *WEIGHT_FORMATS}
    with pytest.raises(ValueError, match="no cache format 'act8'"):
        cache_format("act8")
