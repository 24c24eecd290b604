"""`forebay::keep_state`: save a state before a step that checks drafted tokens, or go back to the one saved before.

Where the step before this one computed tokens that were refused (`refused` [B] is not 0), a sequence's state becomes
the saved one; elsewhere it is saved.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.define import define_operator, filling, on_gpu
from forebay.kernels.operator import Cost, nbytes_of
from forebay.kernels.recurrences.keep_state.cpu import bind_keep_state
from forebay.kernels.recurrences.keep_state.reference import reference


def _keep_state(state: Tensor, saved: Tensor, refused: Tensor) -> None:
    """state and saved [B, ...] of any dtype; refused int64 [B]. ValueError names what is wrong."""
    return None


KEEP_STATE = define_operator(
    _keep_state,
    writes=("state", "saved"),
    reference=reference,
    cost=lambda use: Cost(0, nbytes_of(use.args[0]), nbytes_of(use.args[1])),
    bind={"cpu": filling(bind_keep_state), "cuda": on_gpu(f"{__package__}.gpu", "bind_keep_state")},
    layouts=dict.fromkeys(("state", "saved", "refused"), "dense"),
)
