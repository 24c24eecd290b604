"""`forebay::keep_state` on the CPU: copies by torch, which move memory as fast as any."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from forebay.kernels.recurrences.keep_state.reference import check_arguments


def bind_keep_state(state: Tensor, saved: Tensor, refused: Tensor) -> Callable[[], None]:
    """A closure that saves or restores each sequence's state, from the tensors' contents at each call. ValueError names
    what is wrong."""
    check_arguments(state, saved, refused)
    each = list(zip(state, saved, strict=True))

    def run() -> None:
        for (now, before), back in zip(each, refused.tolist(), strict=True):
            source, target = (before, now) if back else (now, before)
            target.copy_(source)

    return run
