"""`forebay::assign_slots` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.products.expert_slots.reference import check, reference


class AssignSlotsArgs(ctypes.Structure):
    """Mirror of `AssignSlotsArgs` in assign_slots.cpp."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("index", "places", "state")),
                *((name, ctypes.c_int64) for name in ("picks", "slots", "rounds", "experts", "first", "count")),
                ("stride", ctypes.c_int64))


def scratch_floats(slots: int, experts: int) -> int:
    """Numbers of scratch that a call holds."""
    return 3 * experts + slots


def bind_assign_slots(
    index: Tensor, state: Tensor, slots: int, rounds: int, experts: int, first: int = 0, count: int | None = None,
    places: Tensor | None = None, stride: int = 1,
) -> Callable[[], object]:
    """A closure that brings `state` up to date with the contents of `index` at each call (`reference`).

    ValueError names the argument that is wrong.
    """
    sizes = check(index, state, slots, rounds, experts, first, count, places, stride)
    if native.load() is None:
        return lambda: state[: sizes.numbers].copy_(
            reference(index, state[: sizes.numbers], *sizes, first, count, places, stride))
    args = AssignSlotsArgs(index.data_ptr(), None if places is None else places.data_ptr(), state.data_ptr(),
                           index.numel(), *sizes, first, experts if count is None else count, stride)
    return native.NativeCall("assign_slots", args, (index, state, places), scratch_floats(slots, experts))
