"""The definition of `forebay::assign_slots`, and the checks of its arguments."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from forebay.kernels.formats.slot_state import SlotState

ONCE = 1 << 20  # the count of one use
DECAY_SHIFT = 5  # each step forgets the count shifted right by so many bits


def fail(argument: str, problem: str) -> NoReturn:
    raise ValueError(f"assign_slots: {argument} {problem}")


def check(
    index: Tensor, state: Tensor, slots: int, rounds: int, experts: int, first: int = 0, count: int | None = None,
    places: Tensor | None = None, stride: int = 1,
) -> SlotState:
    """The sizes of a state; ValueError names the argument that is wrong."""
    for name, value in (("slots", slots), ("rounds", rounds), ("experts", experts), ("stride", stride)):
        if value < 1:
            fail(name, f"must be at least 1, got {value}")
    sizes = SlotState(slots, rounds, experts)
    for name, tensor in (("index", index), ("state", state), ("places", places)):
        if tensor is not None and (tensor.dtype != torch.int64 or not tensor.is_contiguous()):
            fail(name, f"must be contiguous int64, got {tensor.dtype} with strides {tensor.stride()}")
    if state.numel() < sizes.numbers:
        fail("state", f"must have {sizes.numbers} numbers, got {state.numel()}")
    if places is not None and places.shape != (experts,):
        fail("places", f"must be [{experts}], got {list(places.shape)}")
    count = experts if count is None else count
    if first < 0 or count < 1 or first + count > experts:
        fail("first", f"and count must name some of {experts} experts, got {first} and {count}")
    if min(index.numel(), count) > slots * rounds:
        fail("rounds", f"must hold all that {index.numel()} picks may name, got {rounds} of {slots} slots")
    return sizes


def reference(
    index: Tensor, state: Tensor, slots: int, rounds: int, experts: int, first: int = 0, count: int | None = None,
    places: Tensor | None = None, stride: int = 1,
) -> Tensor:
    """The state [n] that follows `state` once a step has picked the experts of `index`, of which the slots are for
    `count`, all unless told, from `first` on. Slots are `stride` apart, and an expert begins in its slot at its place.

    Rounds have the experts that are named in ascending order, as many each as there are slots. One that is in a slot
    stays there; others come in ascending order, each to a slot that no expert of its round has, of these to one that no
    later round needs, of these to the one whose expert was used least, of these to the first. A use counts half after
    some 22 steps: experts that are popular stay though others were used since, and those that no longer are do not.
    """
    sizes, found = SlotState(slots, rounds, experts), state.tolist()
    owner, uses = found[:slots], [count - (count >> DECAY_SHIFT) for count in found[slots:][:experts]]
    end = experts if count is None else first + count
    named = sorted({expert for expert in index.flatten().tolist() if first <= expert < end})
    for expert in named:
        uses[expert] += ONCE
    slot_of = {expert - 1: slot for slot, expert in enumerate(owner) if expert > 0}
    found[sizes.want(0) : sizes.want(rounds)] = [-1] * (sizes.want(rounds) - sizes.want(0))
    for number in range(rounds):
        want, entries = sizes.want(number), sizes.entries(number)
        group, later = named[number * slots :][:slots], set(named[(number + 1) * slots :])
        held = {slot_of[expert] for expert in group if expert in slot_of}
        for expert in group:
            if expert not in slot_of:
                free = [s for s in range(slots) if s not in held]
                slot = min(free, key=lambda s: (owner[s] - 1 in later, uses[owner[s] - 1] if owner[s] else -1))
                slot_of.pop(owner[slot] - 1, None)
                owner[slot], slot_of[expert] = expert + 1, slot
                found[want + slot] = expert
                held.add(slot)
            found[entries + expert] = slot_of[expert] * stride + (0 if places is None else int(places[expert]))
    found[: slots + experts] = owner + uses
    return torch.tensor(found, dtype=torch.int64, device=state.device)
