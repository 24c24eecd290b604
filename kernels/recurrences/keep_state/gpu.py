"""`forebay::keep_state` in Triton: a program moves a piece of one sequence's state."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.recurrences.keep_state.reference import check_arguments, fail

OP = "keep_state"
PIECE = 4096  # elements of a program


@triton.jit
def keep_state_kernel(state_ptr, saved_ptr, refused_ptr, numbers, PIECE: tl.constexpr):
    """Program (piece, sequence)."""
    row = tl.program_id(1).to(tl.int64)
    at = (tl.program_id(0) * PIECE + tl.arange(0, PIECE)).to(tl.int64)
    there = at < numbers
    state_at, saved_at = state_ptr + row * numbers + at, saved_ptr + row * numbers + at
    if tl.load(refused_ptr + row) != 0:
        tl.store(state_at, tl.load(saved_at, mask=there), mask=there)
    else:
        tl.store(saved_at, tl.load(state_at, mask=there), mask=there)


def bind_keep_state(state: Tensor, saved: Tensor, refused: Tensor) -> Callable[[], None]:
    """keep_state as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    check_arguments(state, saved, refused)
    if not (state.is_contiguous() and saved.is_contiguous()):
        fail("state", "must be contiguous, as saved must be")
    check_tensor(OP, "state", state)
    check_tensor(OP, "saved", saved, device=state.device)
    if state.numel() == 0:
        return lambda: None
    numbers = state[0].numel()
    return bound(kernel_call(keep_state_kernel, (triton.cdiv(numbers, PIECE), len(state)), state, saved, refused,
                             numbers, PIECE=PIECE, num_warps=4))
