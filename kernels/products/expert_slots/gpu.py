"""`forebay::assign_slots` in Triton, and the copy of the experts that it names into their slots.

Both read what a step computes on the device, so the host need not know it. One program assigns slots, as the order in
which experts come matters. Programs of the copy take tiles of the named experts in turn, which they read from host
memory that the GPU sees at its own address.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.formats.slot_state import SlotState
from forebay.kernels.gpu_support.arguments import check_device
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.products.expert_slots.reference import DECAY_SHIFT, ONCE, check, fail

PICKS = 64  # that the program looks at together
PROGRAMS, TILE = 128, 2048  # of the copy, and elements of a tile: 2 MiB under way hide the latency of any link
UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)
NEVER = tl.constexpr(1 << 40)  # above all counts of uses, which stay below 2 ** 27


@triton.jit
def assign_kernel(
    index_ptr, places_ptr, state_ptr, told_ptr, picks, slots, experts, rounds, most, beside, stride,
    HAS_PLACES: tl.constexpr, ONCE: tl.constexpr, SHIFT: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """`reference`, in order. What is told of the experts of round 0 holds, before that, which are named."""
    e, s = tl.arange(0, E), tl.arange(0, S)
    known, within, none = e < experts, s < slots, tl.full((E,), -1, tl.int64)
    uses_ptr, flag_ptr, numbers = state_ptr + slots, told_ptr + slots, slots + experts
    tl.store(flag_ptr + e, none, mask=known)
    tl.debug_barrier()
    for begin in range(0, picks, B):
        at = begin + tl.arange(0, B)
        expert = tl.load(index_ptr + at, mask=at < picks, other=-1)
        ours = (expert >= 0) & (expert < experts)
        tl.store(flag_ptr + tl.where(ours, expert, 0), tl.full((B,), 0, tl.int64), mask=ours)
    tl.debug_barrier()
    named = tl.load(flag_ptr + e, mask=known, other=-1) >= 0
    uses = tl.load(uses_ptr + e, mask=known, other=0)
    uses += tl.where(named, ONCE, 0) - (uses >> SHIFT)
    tl.store(uses_ptr + e, uses, mask=known)
    owner = tl.load(state_ptr + s, mask=within, other=0)
    owned = within & (owner > 0)
    there = owned & (tl.load(flag_ptr + owner - 1, mask=owned, other=-1) >= 0)
    tl.debug_barrier()
    tl.store(flag_ptr + owner - 1, tl.full((S,), -1, tl.int64), mask=there)  # what is left is missing
    tl.debug_barrier()
    missing = tl.load(flag_ptr + e, mask=known, other=-1) >= 0
    rank = tl.where(missing, tl.cumsum(missing.to(tl.int32), 0) - 1, -1)
    total = tl.sum(missing.to(tl.int32), 0)
    cost = tl.load(uses_ptr + owner - 1, mask=owned, other=-1)
    tl.debug_barrier()
    for begin in range(0, (1 + rounds) * numbers, E):
        tl.store(told_ptr + begin + e, none, mask=begin + e < (1 + rounds) * numbers)
    tl.debug_barrier()
    place = s.to(tl.int64) * stride
    if HAS_PLACES:
        place += tl.load(places_ptr + owner - 1, mask=there, other=0)
    tl.store(flag_ptr + owner - 1, place, mask=there)
    used = tl.where(there, 0, -rounds - 2)  # by slot the last round that uses it
    came = tl.sum(tl.zeros((S,), tl.int32), 0)
    for number in range(1, rounds + 1):
        want_ptr = told_ptr + number * numbers
        for i in range(came, tl.minimum(total, came + most)):
            expert = tl.sum(tl.where(rank == i, e, 0), 0).to(tl.int64)
            free = within & ((used < number - beside) | (used < 0))
            price = tl.where(free, cost, NEVER)
            least = tl.min(price, 0)
            slot = tl.min(tl.where(free & (price == least), s, S), 0)
            fits = slot < S
            chosen = (s == slot) & fits
            at = slot.to(tl.int64) * stride
            if HAS_PLACES:
                at += tl.load(places_ptr + expert)
            tl.store(want_ptr + slot, expert, mask=fits)
            tl.store(want_ptr + slots + expert, at, mask=fits)
            owner = tl.where(chosen, expert + 1, owner)
            cost = tl.where(chosen, tl.load(uses_ptr + expert), cost)
            used = tl.where(chosen, number, used)
            came += fits.to(tl.int32)
    tl.store(state_ptr + s, owner, mask=within)


@triton.jit
def fetch_kernel(
    table_ptr, index_ptr, out_ptr, slots, row, programs, rows, ALIKE: tl.constexpr, BACK: tl.constexpr,
    S: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Row index[i] of a table of `rows` (with ALIKE its row i) into row i of out, or BACK, where index[i] is a row."""
    s = tl.arange(0, S)
    want = tl.load(index_ptr + s, mask=s < slots, other=-1)
    named = want >= 0
    if not ALIKE:
        named = named & (want < rows)
    rank = tl.cumsum(named.to(tl.int32), 0) - 1
    tiles = tl.cdiv(row, B)
    for turn in range(tl.program_id(0), tl.sum(named.to(tl.int32), 0) * tiles, programs):
        chosen = named & (rank == turn // tiles)
        slot = tl.sum(tl.where(chosen, s, 0), 0).to(tl.int64)
        source = slot
        if not ALIKE:
            source = tl.sum(tl.where(chosen, want, 0), 0)
        at = turn % tiles * B + tl.arange(0, B)
        if BACK:
            tl.store(table_ptr + source * row + at, tl.load(out_ptr + slot * row + at, mask=at < row), mask=at < row)
        else:
            tl.store(out_ptr + slot * row + at, tl.load(table_ptr + source * row + at, mask=at < row), mask=at < row)


def bind_assign_slots(
    index: Tensor, state: Tensor, told: Tensor, sizes: SlotState, places: Tensor | None = None, stride: int = 1,
    listed: Tensor | None = None,
) -> Callable[[], None]:
    """The CPU's `bind_assign_slots` on a GPU, whose fetches run in order, and which reads nothing ahead."""
    check(index, state, told, sizes, places, stride, listed)
    slots, experts = sizes.slots, sizes.experts
    if sizes.ahead:
        fail("ahead", f"must be 0 on a GPU, got {sizes.ahead}")
    if not sizes.in_order:
        fail("in_order", "must be true: fetches of a GPU run in order")
    for name, tensor in (("index", index), ("state", state), ("told", told), ("places", places)):
        if tensor is not None:
            check_device("assign_slots", name, tensor, index.device)
    return bound(kernel_call(
        assign_kernel, (1,), index, state if places is None else places, state, told, index.numel(), slots, experts,
        sizes.rounds, sizes.most, sizes.beside, stride, HAS_PLACES=places is not None, ONCE=ONCE, SHIFT=DECAY_SHIFT,
        E=triton.next_power_of_2(experts), S=triton.next_power_of_2(slots), B=PICKS, num_warps=4))


def bind_fetch_rows(
    table: Tensor, index: Tensor, out: Tensor, row_nbytes: int, alike: bool = False, back: bool = False
) -> Callable[[], None]:
    """A closure that copies row index[i] of `table` into row i of `out`, where index[i] is a row of the table.

    Args:
        table: uint8, rows of `row_nbytes` one after the other; on the GPU, or in pinned memory of the host.
        index: int64 [n], on the GPU, read at each call. Those that are no row of `table` move nothing.
        out: uint8, n rows on the GPU, or in pinned memory of the host.
        row_nbytes: Bytes of a row.
        alike: Row i of `out` is row i of `table`, and `index` says only which are left out (below 0).
        back: Copy the rows of `out` into `table`.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    slots = index.numel()
    if index.dtype != torch.int64 or not index.is_contiguous():
        fail("index", f"must be contiguous int64, got {index.dtype} with strides {index.stride()}")
    if out.numel() != slots * row_nbytes or table.numel() % row_nbytes or (alike and table.numel() != out.numel()):
        fail("out", f"must have {slots} rows of {row_nbytes} bytes, got {out.numel()} bytes of {table.numel()}")
    check_device("assign_slots", "index", index)
    unit = next(dtype for dtype in UNITS if not any(
        n % dtype.itemsize for n in (row_nbytes, table.data_ptr(), out.data_ptr())))
    row = row_nbytes // unit.itemsize
    programs = min(PROGRAMS, slots * triton.cdiv(row, TILE))
    return bound(kernel_call(
        fetch_kernel, (programs,), table.view(unit), index, out.view(unit), slots, row, programs,
        table.numel() // row_nbytes, ALIKE=alike, BACK=back, S=triton.next_power_of_2(slots), B=TILE, num_warps=4))
