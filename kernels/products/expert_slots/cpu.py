"""`forebay::assign_slots` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.formats.slot_state import SlotState
from forebay.kernels.products.expert_slots.reference import check, reference


class AssignSlotsArgs(ctypes.Structure):
    """Mirror of `AssignSlotsArgs` in assign_slots.cpp."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("index", "places", "listed", "state", "told")),
                *((name, ctypes.c_int64) for name in ("picks", "slots", "experts", "named")),
                *((name, ctypes.c_int64) for name in ("rounds", "most", "beside", "in_order", "ahead", "stride")))


def scratch_floats(slots: int, experts: int) -> int:
    """Numbers of scratch that a call holds."""
    return 3 * experts + slots


def bind_assign_slots(
    index: Tensor, state: Tensor, told: Tensor, sizes: SlotState, places: Tensor | None = None, stride: int = 1,
    listed: Tensor | None = None,
) -> Callable[[], object]:
    """A closure that brings `state` up to date with the contents of `index`, and fills `told`, at each call
    (`reference`).

    ValueError names the argument that is wrong.
    """
    check(index, state, told, sizes, places, stride, listed)
    slots, experts, named, in_order, ahead = sizes
    if native.load() is None:

        def run() -> None:
            for kept, new in zip((state, told), reference(index, state, sizes, places, stride, listed), strict=True):
                kept.copy_(new)

        return run
    begins, known = (None if each is None else each.data_ptr() for each in (places, listed))
    args = AssignSlotsArgs(index.data_ptr(), begins, known, state.data_ptr(), told.data_ptr(), index.numel(), slots,
                           experts, named, sizes.rounds, sizes.most, sizes.beside, in_order, ahead, stride)
    return native.NativeCall("assign_slots", args, (index, state, told, places, listed), scratch_floats(slots, experts))
