"""`forebay::assign_slots`: which of the experts that a step has picked lie in slots, and which are to be fetched.

It keeps what it knows in a tensor (`SlotState`), which lives as long as the slots do, and tells in another the copies
what to fetch, and `forebay::experts` where experts lie: of each round by itself, in slots into which later copies that
may be under way then bring nothing. Launches alone call it: the graphs of a model know no slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forebay.kernels.formats.slot_state import SlotState
from forebay.kernels.operator import Call, Cost, Operator, Use, nbytes_of
from forebay.kernels.products.expert_slots.cpu import bind_assign_slots, scratch_floats
from forebay.kernels.products.expert_slots.reference import reference


@torch.library.custom_op("forebay::assign_slots", mutates_args=("state", "told"), device_types="cpu")
def assign_slots(
    index: Tensor, state: Tensor, told: Tensor, slots: int, experts: int, named: int, in_order: bool = False,
    ahead: int = 0, places: Tensor | None = None, stride: int = 1, listed: Tensor | None = None,
) -> None:
    """index int64 [...], state and told int64 (`SlotState`), places int64 [experts], listed int64 [ahead]. ValueError
    names the argument that is wrong."""
    index, kept, found = index.contiguous(), state.contiguous(), told.contiguous()
    places, listed = (None if each is None else each.contiguous() for each in (places, listed))
    sizes = SlotState(slots, experts, named, in_order, ahead)
    bind_assign_slots(index, kept, found, sizes, places, stride, listed)()
    for given, made in ((state, kept), (told, found)):
        if made is not given:
            given.copy_(made)


@assign_slots.register_fake
def _(
    index: Tensor, state: Tensor, told: Tensor, slots: int, experts: int, named: int, in_order: bool = False,
    ahead: int = 0, places: Tensor | None = None, stride: int = 1, listed: Tensor | None = None,
) -> None:
    return None


def _with_sizes(use: Use) -> tuple[Any, ...]:
    """The arguments of a use with its sizes as a record."""
    index, state, told, *more = use.args
    return index, state, told, SlotState(*more[:5]), *more[5:]


def _cost(use: Use) -> Cost:
    return Cost(0, nbytes_of(*use.args[:2]), nbytes_of(*use.args[1:3]))


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.products.expert_slots.gpu import bind_assign_slots as bind

    return bind(*_with_sizes(use))


ASSIGN_SLOTS = Operator(
    torch.ops.forebay.assign_slots.default,
    reference,
    _cost,
    bind={"cpu": lambda use: bind_assign_slots(*_with_sizes(use)), "cuda": _bind_cuda},
    workspace={"cpu": lambda use: 4 * scratch_floats(use.args[3], use.args[4])},
    layouts={"index": "dense", "state": "dense", "told": "dense", "places": "dense", "listed": "dense"},
)
