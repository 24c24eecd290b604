"""The block layout: sizes, views that share memory, and values that come back."""

from __future__ import annotations

import pytest
import torch
from kernels_blocks import fill_cache, slots_of

from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.quantization.quantize import reference as quantize

LAYOUTS = [
    BlockLayout(tokens, heads, dim, format, dtype, group)
    for tokens, heads, dim, format, dtype, group in (
        (16, 2, 80, "native", torch.bfloat16, 0), (32, 1, 64, "block8", torch.float16, 0),
        (64, 3, 80, "block4", torch.bfloat16, 0),
        (16, 2, 24, "block4", torch.float16, 8), (16, 1, 40, "block8", torch.float16, 32),
    )
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_byte_of_a_record_belongs_to_one_value(layout: BlockLayout) -> None:
    """Filling values, or codes and pairs, with zeros leaves no byte of a poisoned pool as it was."""
    pool = paged.allocate(layout, 2).fill_(0xFF)
    if layout.bits:
        paged.codes(pool, layout).zero_()
        for part in paged.pairs(pool, layout):
            part.zero_()
    else:
        paged.values(pool, layout).zero_()
    assert not pool.any() and layout.record_nbytes % 16 == 0
    per_position = 2 * (layout.row_nbytes + (4 * layout.groups if layout.bits else 0))
    assert layout.position_nbytes == per_position
    assert layout.record_nbytes == layout.tokens * layout.kv_heads * per_position


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_written_is_read(layout: BlockLayout) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    pool = paged.allocate(layout, 4).fill_(0xFF)
    length = layout.tokens + 3
    written = []
    for row in table:
        shape = (length, layout.kv_heads, layout.head_dim)
        k, v = (torch.randn(shape, generator=generator).to(layout.dtype) for _ in "kv")
        paged.write(pool, layout, slots_of(row, layout.tokens, length), k, v)
        written.append((k, v))
    found = paged.read(pool, layout, table, torch.float32)
    for b, pair in enumerate(written):
        for side, value in enumerate(pair):
            if layout.bits:
                parts = quantize.reference(value, layout.bits, layout.group, -1, layout.dtype)
                value = quantize.dequantize_reference(*parts, layout.bits, layout.group, -1, layout.head_dim)
            assert torch.equal(found[side][b, :, :length], value.float().transpose(0, 1))


def test_negative_slots_are_left_out() -> None:
    layout = LAYOUTS[0]
    pool = paged.allocate(layout, 1).fill_(0xFF)
    k = torch.ones(2, layout.kv_heads, layout.head_dim, dtype=layout.dtype)
    paged.write(pool, layout, torch.tensor([-1, 5]), k, k)
    assert paged.values(pool, layout)[0, 0, 0, :, 0].isfinite().nonzero().flatten().tolist() == [5]


def test_wrong_layouts_and_pools_are_refused() -> None:
    good = LAYOUTS[0]
    for field, bad in (("tokens", 8), ("kv_heads", 0), ("head_dim", 300), ("format", "kv3"), ("dtype", torch.float32)):
        with pytest.raises(ValueError, match=r"^op: "):
            paged.check_layout("op", BlockLayout(**{**good.__dict__, field: bad}))
    with pytest.raises(ValueError, match=r"^op: group_size"):
        paged.check_layout("op", BlockLayout(16, 1, 32, "block4", torch.float16, 5))
    pool = paged.allocate(good, 2)
    uneven = torch.empty(2, good.record_nbytes + 8, dtype=torch.uint8)[:, 8:]
    for wrong in (pool[:, 1:], pool.to(torch.int8), pool[0], uneven):
        with pytest.raises(ValueError, match=r"^op: pool"):
            paged.check_pool("op", wrong, good)


def test_used_blocks_must_exist() -> None:
    cache = fill_cache(LAYOUTS[0], [20, 3])
    check = (cache.pool, cache.table, cache.lengths, cache.layout)
    paged.check_used_blocks("op", *check)
    cache.table[1, 1] = 99  # not used by a sequence of 3
    paged.check_used_blocks("op", *check)
    cache.table[0, 1] = 99
    with pytest.raises(ValueError, match=r"^op: table"):
        paged.check_used_blocks("op", *check)
    with pytest.raises(ValueError, match=r"^op: lengths"):
        paged.check_used_blocks("op", cache.pool, cache.table, torch.tensor([1000, 3]), cache.layout)
