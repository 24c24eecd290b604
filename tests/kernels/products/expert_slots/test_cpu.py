"""assign_slots: the compiled kernel against the definition, and the definition against what it is for."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch

from forebay.kernels.build import compile
from forebay.kernels.formats.slot_state import SlotState, slot_state
from forebay.kernels.products.expert_slots import cpu
from forebay.kernels.products.expert_slots.cpu import bind_assign_slots
from forebay.kernels.products.expert_slots.reference import reference

needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


def cases(count: int) -> list[tuple[SlotState, int, int, random.Random]]:
    """Sizes, tokens and picks of a token."""
    found = []
    for seed in range(count):
        draw = random.Random(seed)
        experts, tokens = draw.choice((4, 9, 32)), draw.choice((1, 2, 7))
        picks = draw.randint(1, min(4, experts))
        in_order = seed // 2 % 2 > 0
        sizes = slot_state(draw.randint(1, experts), experts, tokens * picks, in_order, 0 if in_order else seed % 2 * 3)
        found.append((sizes, tokens, picks, draw))
    return found


def picked(tokens: int, picks: int, experts: int, draw: random.Random) -> torch.Tensor:
    return torch.tensor([draw.sample(range(experts), picks) for _ in range(tokens)])


def list_for(sizes: SlotState) -> torch.Tensor | None:
    """Memory for the experts that are read ahead; at first all are expert 0."""
    return torch.zeros(sizes.ahead, dtype=torch.int64) if sizes.ahead else None


def zeros(sizes: SlotState, more: int = 0) -> list[torch.Tensor]:
    """A state in which all slots are empty, and room for what a step is told."""
    return [torch.zeros(n + more, dtype=torch.int64) for n in (sizes.numbers, sizes.told)]


@needs_compiler
def test_the_kernel_does_what_the_definition_says() -> None:
    for sizes, tokens, picks, draw in cases(80):
        index, kept = torch.zeros(tokens, picks, dtype=torch.int64), zeros(sizes, 1)
        places = torch.tensor([draw.randrange(9) for _ in range(sizes.experts)])
        some: dict = dict(places=places, stride=draw.randint(9, 99)) if draw.random() < 0.5 else {}
        some["listed"] = list_for(sizes)
        for each in kept:
            each[-1] = 77
        call = bind_assign_slots(index, *(each[:-1] for each in kept), sizes, **some)  # type: ignore[misc]
        for _ in range(12):
            index.copy_(picked(tokens, picks, sizes.experts, draw))
            if draw.random() < 0.2:
                index[0, 0] = draw.choice((-1, sizes.experts, 1 << 40))  # no expert at all
            want = reference(index, kept[0][:-1], sizes, **some)
            call()
            if sizes.ahead:
                some["listed"].copy_(want[1][-sizes.ahead :])
            for each, wanted in zip(kept, want, strict=True):
                assert torch.equal(each[:-1], wanted) and each[-1] == 77, (sizes, index)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
def test_each_round_finds_its_experts(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert that is named is of one round, in the slot that it is said to be in; and no slot from which a round
    reads is fetched into by one that may be under way then, nor is one slot by two of these."""
    if not compiled:
        monkeypatch.setattr(cpu.native, "load", lambda: None)
    seen = set()
    for sizes, tokens, picks, draw in cases(60):
        index, (state, told) = torch.zeros(tokens, picks, dtype=torch.int64), zeros(sizes)
        listed = list_for(sizes)
        call, memory = bind_assign_slots(index, state, told, sizes, listed=listed), [-1] * sizes.slots
        for _ in range(10):
            index.copy_(picked(tokens, picks, sizes.experts, draw))
            call()
            found: list[int] = []
            used: list[set[int]] = []  # slots, by round
            for number, each in enumerate(told[: sizes.entries_ahead].view(-1, sizes.numbers).tolist()):
                want, entries = each[: sizes.slots], each[sizes.slots :]
                into, read = ({i for i in row if i >= 0} for row in (
                    [slot if expert >= 0 else -1 for slot, expert in enumerate(want)], entries))
                assert into == (read if number else set())
                assert not into & set().union(*used[max(0, number - sizes.beside) :])
                used.append(read)
                memory = [old if new < 0 else new for old, new in zip(memory, want, strict=True)]
                mine = [expert for expert, slot in enumerate(entries) if slot >= 0]
                assert all(memory[entries[expert]] == expert for expert in mine)
                found += mine
            if listed is not None:
                entries, others = told[sizes.entries_ahead :].split([sizes.experts, sizes.ahead])
                came = [(int(slot), expert) for expert, slot in enumerate(entries) if slot >= 0]
                assert all(listed[slot] == expert for slot, expert in came)
                found += [expert for _, expert in came]
                popular = {e for e in others.tolist() if e >= 0}
                rest = set(range(sizes.experts)) - {e - 1 for e in state[: sizes.slots].tolist()} - popular
                uses = state[sizes.slots :]
                assert len(popular) == min(sizes.ahead, len(rest | popular)) and not popular & set(memory)
                assert not rest or not popular or min(uses[e] for e in popular) >= max(uses[e] for e in rest)
                listed.copy_(others)
            assert sorted(found) == sorted(set(index.flatten().tolist()))
            seen.add((sizes.at_once, sizes.in_order, min(2, sizes.slots), min(2, sum(map(bool, used[1:])))))
    some = {(False, in_order, slots, 2) for in_order in (False, True) for slots in (1, 2)}
    assert seen >= {(True, False, 2, 2), (True, True, 2, 1), *some}


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
def test_the_last_rounds_have_the_fewest(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all experts come at once, the first round has one as soon as any is missing."""
    if not compiled:
        monkeypatch.setattr(cpu.native, "load", lambda: None)
    sizes = slot_state(8, 16, 8)
    for count, rounds in enumerate(((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2))):
        index, (state, told) = torch.arange(count), zeros(sizes)
        bind_assign_slots(index, state, told, sizes)()
        wanted = (told.view(-1, sizes.numbers)[1:, : sizes.slots] >= 0).sum(1)
        assert tuple(wanted.tolist()) == rounds


def fetched(steps: list[list[int]], slots: int, experts: int) -> int:
    """Experts that are fetched, of steps that name some each, but for the first quarter of these."""
    sizes = slot_state(slots, experts, len(steps[0]))
    state, found = zeros(sizes)[0], 0
    index, told = torch.zeros(len(steps[0]), dtype=torch.int64), torch.zeros(sizes.told, dtype=torch.int64)
    assign = bind_assign_slots(index, state, told, sizes)
    for number, named in enumerate(steps):
        index.copy_(torch.tensor(named))
        assign()
        found += int((told.view(-1, sizes.numbers)[:, :slots] >= 0).sum()) * (number >= len(steps) // 4)
    return found


def least_recently(steps: list[list[int]], slots: int) -> int:
    """The same where what was used longest ago leaves."""
    held, found = OrderedDict[int, None](), 0
    for number, named in enumerate(steps):
        found += sum(expert not in held for expert in named) * (number >= len(steps) // 4)
        for expert in named:
            held[expert] = None
            held.move_to_end(expert)
        while len(held) > slots:
            held.popitem(last=False)
    return found


def test_what_is_used_often_stays_and_what_was_leaves() -> None:
    rare = [2, 3, 4, 5, 6, 7]
    mixed = [[pick] for n in range(60) for pick in (0, 1, rare[2 * n % 6], rare[(2 * n + 1) % 6])]
    assert fetched(mixed, 3, 8) <= 2 * 45 < least_recently(mixed, 3) == len(mixed) * 3 // 4  # the popular ones stay
    later = [[4], [5]] * 400  # others are from here on
    assert fetched(mixed + later, 2, 8) < 200


@pytest.mark.parametrize(("changed", "message"), [
    (dict(sizes=SlotState(0, 8, 8)), "slots must be at least 1"), (dict(sizes=SlotState(4, 8, 7)), "named must be all"),
    (dict(index=torch.zeros(4, 2)), "index must be contiguous int64"),
    (dict(state=torch.zeros(3, dtype=torch.int64)), "state must have 12"),
    (dict(told=torch.zeros(3, dtype=torch.int64)), "told must have 60"),
    (dict(places=torch.zeros(7, dtype=torch.int64)), r"places must be \[8\]"), (dict(stride=0), "stride must be"),
    (dict(listed=torch.zeros(2, dtype=torch.int64)), "listed must have the 0 experts")])
def test_wrong_arguments_are_named(changed: dict, message: str) -> None:
    given = dict(index=torch.zeros(4, 2, dtype=torch.int64), state=torch.zeros(12, dtype=torch.int64),
                 told=torch.zeros(60, dtype=torch.int64), sizes=SlotState(4, 8, 8))
    with pytest.raises(ValueError, match=message):
        bind_assign_slots(**(given | changed))  # type: ignore[arg-type]
