"""The definition of `forebay::assign_slots`, and the checks of its arguments."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from forebay.kernels.formats.slot_state import SlotState

ONCE = 1 << 20  # the count of one use
DECAY_SHIFT = 6  # each step forgets the count shifted right by so many bits


def fail(argument: str, problem: str) -> NoReturn:
    raise ValueError(f"assign_slots: {argument} {problem}")


def check(
    index: Tensor, state: Tensor, told: Tensor, sizes: SlotState, places: Tensor | None = None, stride: int = 1,
    listed: Tensor | None = None,
) -> None:
    """Raise ValueError, which names the argument, unless a state of such sizes fits the tensors."""
    experts, named, ahead = sizes.experts, sizes.named, sizes.ahead
    for name, value in (("slots", sizes.slots), ("experts", experts), ("named", named), ("stride", stride)):
        if value < 1:
            fail(name, f"must be at least 1, got {value}")
    for name, tensor in (("index", index), ("state", state), ("told", told), ("places", places), ("listed", listed)):
        if tensor is not None and (tensor.dtype != torch.int64 or not tensor.is_contiguous()):
            fail(name, f"must be contiguous int64, got {tensor.dtype} with strides {tensor.stride()}")
    for name, tensor, numbers in (("state", state, sizes.numbers), ("told", told, sizes.told)):
        if tensor.numel() != numbers:
            fail(name, f"must have {numbers} numbers, got {tensor.numel()}")
    if places is not None and places.shape != (experts,):
        fail("places", f"must be [{experts}], got {list(places.shape)}")
    if (0 if listed is None else listed.numel()) != ahead:
        fail("listed", f"must have the {ahead} experts that are read ahead, got "
                       f"{'none' if listed is None else listed.numel()}")
    if min(index.numel(), experts) > named:
        fail("named", f"must be all that {index.numel()} picks may name, got {named}")


def reference(
    index: Tensor, state: Tensor, sizes: SlotState, places: Tensor | None = None, stride: int = 1,
    listed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state that follows `state`, and what a step is told that has picked the experts of `index` (`SlotState`).
    Slots are `stride` apart, and an expert begins in its slot at its place.

    Experts that are in slots are of round 0. The others come in ascending order, each to a slot that is not in use (by
    its own round, or by one that it is fetched beside), of these to the one whose expert was used least, of these to
    the first. A use counts half after some 44 steps: experts that are popular stay though others were used since, and
    those that no longer are do not. Experts of `listed` that are in no slot were read ahead, and are of no round.
    """
    (slots, experts, _, in_order, ahead), found = sizes, state.tolist()
    owner, uses = found[:slots], [count - (count >> DECAY_SHIFT) for count in found[slots:]]
    picked = sorted({expert for expert in index.flatten().tolist() if 0 <= expert < experts})
    for expert in picked:
        uses[expert] += ONCE
    told, begins = [-1] * sizes.told, [0] * experts if places is None else places.tolist()
    used = [[slot for slot, expert in enumerate(owner) if expert - 1 in picked]]  # by round
    for slot in used[0]:
        told[sizes.entries(0) + owner[slot] - 1] = slot * stride + begins[owner[slot] - 1]
    for place, expert in enumerate([] if listed is None else listed.tolist()):
        if expert in picked and expert + 1 not in owner:
            told[sizes.entries_ahead + expert] = place * stride + begins[expert]
    missing = [expert for expert in picked if expert + 1 not in owner and (
        not ahead or told[sizes.entries_ahead + expert] < 0)]
    came = 0
    for number in range(1, sizes.rounds + 1):
        evenly = len(missing) if in_order else -(-len(missing) * number // sizes.rounds)
        until = min(came + sizes.most, evenly)
        used.append([])
        while came < until:
            busy = {slot for each in used[max(0, number - sizes.beside) :] for slot in each}
            free = [slot for slot in range(slots) if slot not in busy]
            if not free:
                break
            slot, expert = min(free, key=lambda s: uses[owner[s] - 1] if owner[s] else -1), missing[came]
            owner[slot], told[sizes.want(number) + slot], came = expert + 1, expert, came + 1
            told[sizes.entries(number) + expert] = slot * stride + begins[expert]
            used[-1].append(slot)
    others = sorted({*range(experts)}.difference(expert - 1 for expert in owner), key=lambda e: (-uses[e], e))[:ahead]
    told[sizes.told - ahead : sizes.told - ahead + len(others)] = others
    return torch.tensor(owner + uses), torch.tensor(told)
