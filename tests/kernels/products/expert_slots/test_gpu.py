"""assign_slots in Triton, interpreted, against its definition; and the copy of the experts that it names."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")

from forebay.kernels.formats.slot_state import SlotState, slot_state
from forebay.kernels.products.expert_slots.gpu import bind_assign_slots, bind_fetch_rows
from forebay.kernels.products.expert_slots.reference import reference
from tests.kernels.products.expert_slots.test_cpu import cases, picked


def test_it_does_what_the_definition_says() -> None:
    for known, tokens, picks, draw in cases(24):
        sizes = known._replace(in_order=True, ahead=0)
        index, state, told = torch.zeros(tokens, picks, dtype=torch.int64), *(
            torch.zeros(n, dtype=torch.int64) for n in (sizes.numbers, sizes.told))
        some: list = []
        if draw.random() < 0.5:
            some += [torch.tensor([draw.randrange(9) for _ in range(sizes.experts)]), draw.randint(9, 99)]
        call = bind_assign_slots(index, state, told, sizes, *some)
        for _ in range(6):
            index.copy_(picked(tokens, picks, sizes.experts, draw))
            if draw.random() < 0.2:
                index[0, 0] = draw.choice((-1, sizes.experts, 1 << 40))  # no expert at all
            want = reference(index, state, sizes, *some)
            call()
            assert torch.equal(state, want[0]) and torch.equal(told, want[1]), (sizes, index)


def test_more_picks_than_are_looked_at_together() -> None:
    index, sizes = torch.arange(140).view(70, 2) % 7, slot_state(4, 9, 140, True)
    state, told = (torch.zeros(n, dtype=torch.int64) for n in (sizes.numbers, sizes.told))
    want = reference(index, state, sizes)
    bind_assign_slots(index, state, told, sizes)()
    assert torch.equal(state, want[0]) and torch.equal(told, want[1])


@pytest.mark.parametrize("row", [4096 * 8 + 8, 12, 6, 5])  # of several tiles, and of ever smaller units
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_rows_that_are_named_come_and_others_stay(row: int, alike: bool, back: bool) -> None:
    """Or go back. A number that is no row moves nothing."""
    index = torch.tensor([-1, 4, 0, -1, 2])
    table = torch.randint(0, 256, (5, row), dtype=torch.uint8, generator=torch.Generator().manual_seed(row))
    out, want = torch.full((5, row), 9, dtype=torch.uint8), torch.full((5, row), 9, dtype=torch.uint8)
    kept = table.clone()
    call = bind_fetch_rows(table.view(-1), index, out.view(-1), row, alike, back)
    for turn, named in enumerate((index.tolist(), [-1] * 5, [1, -1, -1, 3, -1], [-5, 1 << 40, 2, 0, -1])):
        index.copy_(torch.tensor(named))
        if back:
            out.fill_(turn)
            want.fill_(turn)
        for slot, expert in enumerate(named):
            if expert >= 0 if alike else 0 <= expert < 5:
                ends = want[slot], kept[slot if alike else expert]
                ends[back].copy_(ends[not back])
        call()
        assert torch.equal(out, want) and torch.equal(table, kept)


def test_wrong_arguments_are_named() -> None:
    table, index, out = torch.zeros(24, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), torch.zeros(
        16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="index must be contiguous int64"):
        bind_fetch_rows(table, index.int(), out, 8)
    for wrong in ((table, index, table, 8), (table[:-1], index, out, 8), (table, index, out, 8, True)):
        with pytest.raises(ValueError, match="out must have 2 rows of 8 bytes"):
            bind_fetch_rows(*wrong)
    with pytest.raises(ValueError, match="in_order must be true"):
        bind_assign_slots(index, torch.zeros(10, dtype=torch.int64), torch.zeros(30, dtype=torch.int64),
                          SlotState(1, 9, 2))
    with pytest.raises(ValueError, match="ahead must be 0 on a GPU"):
        bind_assign_slots(index, torch.zeros(10, dtype=torch.int64), torch.zeros(41, dtype=torch.int64),
                          SlotState(1, 9, 2, True, 2), listed=index[:2])
    with pytest.raises(ValueError, match="state must have 10 numbers"):
        bind_assign_slots(index, torch.zeros(9, dtype=torch.int64), index, SlotState(1, 9, 2))
