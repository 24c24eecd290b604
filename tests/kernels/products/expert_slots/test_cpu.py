"""assign_slots: the compiled kernel against the definition, and the definition against what it is for."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch

from forebay.kernels.build import compile
from forebay.kernels.formats.slot_state import SlotState, rounds_of
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
        slots = draw.randint(1, experts)
        found.append((SlotState(slots, rounds_of(experts, tokens * picks, slots), experts), tokens, picks, draw))
    return found


def picked(tokens: int, picks: int, experts: int, draw: random.Random) -> torch.Tensor:
    return torch.tensor([draw.sample(range(experts), picks) for _ in range(tokens)])


@needs_compiler
def test_the_kernel_does_what_the_definition_says() -> None:
    for sizes, tokens, picks, draw in cases(60):
        index, state = torch.zeros(tokens, picks, dtype=torch.int64), torch.zeros(sizes.numbers + 1, dtype=torch.int64)
        state[-1] = 77
        first = draw.randrange(sizes.experts) if draw.random() < 0.5 else 0
        some = [first, sizes.experts - first if draw.random() < 0.5 or not first else 1]
        if draw.random() < 0.5:
            some += [torch.tensor([draw.randrange(9) for _ in range(sizes.experts)]), draw.randint(9, 99)]
        call = bind_assign_slots(index, state, *sizes, *some)
        for _ in range(12):
            index.copy_(picked(tokens, picks, sizes.experts, draw))
            if draw.random() < 0.2:
                index[0, 0] = draw.choice((-1, sizes.experts, 1 << 40))  # no expert at all
            want = reference(index, state[:-1], *sizes, *some)
            call()
            assert torch.equal(state[:-1], want) and state[-1] == 77, (sizes, index)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
def test_each_round_finds_its_experts_in_order(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetching what it wants, round by round, each expert that is named is in the slot it is said to be in, once."""
    if not compiled:
        monkeypatch.setattr(cpu.native, "load", lambda: None)
    for sizes, tokens, picks, draw in cases(40):
        index, state = torch.zeros(tokens, picks, dtype=torch.int64), torch.zeros(sizes.numbers, dtype=torch.int64)
        call, memory = bind_assign_slots(index, state, *sizes), [-1] * sizes.slots
        for _ in range(10):
            index.copy_(picked(tokens, picks, sizes.experts, draw))
            call()
            found: list[int] = []
            for number in range(sizes.rounds):
                want = state[sizes.want(number) :][: sizes.slots].tolist()
                memory = [old if new < 0 else new for old, new in zip(memory, want, strict=True)]
                entries = state[sizes.entries(number) :][: sizes.experts].tolist()
                mine = [expert for expert, slot in enumerate(entries) if slot >= 0]
                assert all(memory[entries[expert]] == expert for expert in mine)
                found += mine
            assert found == sorted(set(index.flatten().tolist()))


def misses(picks: list[int], slots: int, experts: int) -> int:
    """Experts that are fetched where each step picks one."""
    sizes = SlotState(slots, 1, experts)
    state, found = torch.zeros(sizes.numbers, dtype=torch.int64), 0
    for expert in picks:
        state = reference(torch.tensor([[expert]]), state, *sizes)
        found += int((state[sizes.want(0) :][:slots] >= 0).sum())
    return found


def lru_misses(picks: list[int], slots: int) -> int:
    """The same of a cache that is least recently used."""
    held, found = OrderedDict[int, None](), 0
    for expert in picks:
        found += expert not in held
        held[expert] = None
        held.move_to_end(expert)
        if len(held) > slots:
            held.popitem(last=False)
    return found


def test_what_is_used_often_stays_and_what_was_leaves() -> None:
    rare = [2, 3, 4, 5, 6, 7]
    mixed = [pick for n in range(60) for pick in (0, 1, rare[2 * n % 6], rare[(2 * n + 1) % 6])]
    assert misses(mixed, 3, 8) <= 8 + 2 * 60 < lru_misses(mixed, 3) == len(mixed)  # the popular ones stay
    later = [4, 5] * 400  # others are from here on
    assert misses(mixed + later, 2, 8) < misses(mixed, 2, 8) + 200


def test_it_misses_less_than_what_was_used_last() -> None:
    """Of experts as popular as words (Zipf); where none is preferred, as much as any."""
    draw = random.Random(5)
    words = draw.choices(range(32), [1 / (rank + 1) for rank in range(32)], k=600)
    assert misses(words, 8, 32) < 0.92 * lru_misses(words, 8)
    even = draw.choices(range(32), k=600)
    assert abs(misses(even, 8, 32) - lru_misses(even, 8)) < 0.06 * len(even)


@pytest.mark.parametrize(("changed", "message"), [
    (dict(slots=0), "slots must be at least 1"), (dict(rounds=1), "rounds must hold"),
    (dict(index=torch.zeros(4, 2)), "index must be contiguous int64"),
    (dict(state=torch.zeros(3, dtype=torch.int64)), "state must have"),
    (dict(places=torch.zeros(7, dtype=torch.int64)), r"places must be \[8\]"), (dict(stride=0), "stride must be")])
def test_wrong_arguments_are_named(changed: dict, message: str) -> None:
    given = dict(index=torch.zeros(4, 2, dtype=torch.int64), state=torch.zeros(200, dtype=torch.int64), slots=4,
                 rounds=2, experts=8)
    with pytest.raises(ValueError, match=message):
        bind_assign_slots(**(given | changed))
