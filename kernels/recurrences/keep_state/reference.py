"""The definition of `forebay::keep_state`, and the checks of its arguments."""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.recurrences.steps import check, failing

fail = failing("keep_state")


def reference(state: Tensor, saved: Tensor, refused: Tensor) -> Tensor:
    """Return the state and the saved state afterwards."""
    return saved.where((refused != 0).view(-1, *[1] * (state.dim() - 1)), state)


def check_arguments(state: Tensor, saved: Tensor, refused: Tensor) -> None:
    """ValueError names the argument that is wrong."""
    if state.dim() < 2:
        fail("state", f"must be [B, ...], got {tuple(state.shape)}")
    shape = tuple(state.shape)
    check(fail, {"state": (state, shape, state.dtype), "saved": (saved, shape, state.dtype),
                 "refused": (refused, shape[:1], refused.dtype)}, (), ())
