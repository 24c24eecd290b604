"""Tiles of rows: as few as fit a slot, and begun where a GPU's products write well."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from forebay.rewriter.planning.model_needs import WeightUse
from forebay.rewriter.planning.tiles import WHOLE_ROWS, most_tiles, room_beside_slots, tile_count, tile_rows_of


def weight(rows: int, row_nbytes: int) -> WeightUse:
    return WeightUse("w", rows * row_nbytes, rows, tileable=True, lookup=False, product=True)


@given(st.integers(1, 40000), st.integers(1, 40000), st.integers(1, 1 << 26))
def test_tiles_fill_no_more_than_a_slot_and_are_as_few_as_can_be(rows: int, row_nbytes: int, slot: int) -> None:
    slot = max(slot, row_nbytes)
    use = weight(rows, row_nbytes)
    tile, count = tile_rows_of(use, slot), tile_count(use, slot)
    if rows * row_nbytes <= slot:
        assert (tile, count) == (0, 1)
        return
    assert 0 < tile * row_nbytes <= slot and tile < rows
    assert count == -(-rows // tile) == -(-rows // (slot // row_nbytes)), "no fewer hold it, and no more are made"


def test_tiles_begin_at_whole_rows_wherever_their_number_allows() -> None:
    assert tile_rows_of(weight(4096, 28672), 8 << 20) == 288  # 15 tiles of at most 292
    assert tile_rows_of(weight(32000, 8192), 8 << 20) == 1024
    assert tile_rows_of(weight(1000, 8), 8000 - 8) == 512
    assert tile_rows_of(weight(9, 8), 8 * 3) == 3, "at none"
    for rows in range(1000, 5000, 7):
        for slot in (1 << 20, 8 << 20):
            use = weight(rows, 8192)
            tile = tile_rows_of(use, slot)
            even = -(-rows // tile_count(use, slot)) if tile else 0
            assert not tile or tile % WHOLE_ROWS[-1] == 0 or even + WHOLE_ROWS[-1] > slot // 8192


def test_weights_that_several_layers_read_take_slots_in_each() -> None:
    """Zamba's attention, which stands between recurrent layers with weights of their own."""
    first, second = (replace(weight(rows, 100), layers=(layer,)) for layer, rows in enumerate((6, 2)))
    uses = [first, second, replace(weight(6, 100), layers=(0, 1)), weight(90, 100)]
    assert most_tiles(uses, 200) == 3 + 3 and most_tiles(uses[1:], 200) == 1 + 3
    assert room_beside_slots(uses, 640, 5, 200) == 640 and room_beside_slots(uses, 639, 5, 200) == -1
