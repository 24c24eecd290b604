"""`forebay::keep_state`: save a state before a step that checks drafted tokens, or go back to the one saved before.

Where the step before this one computed tokens that were refused (`refused` [B] is not 0), a sequence's state becomes
the saved one; elsewhere it is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.operator import Call, Cost, Operator, Use, nbytes_of
from forebay.kernels.recurrences.keep_state.cpu import bind_keep_state
from forebay.kernels.recurrences.keep_state.reference import reference


@torch.library.custom_op("forebay::keep_state", mutates_args=("state", "saved"), device_types="cpu")
def keep_state(state: Tensor, saved: Tensor, refused: Tensor) -> None:
    """state and saved [B, ...] of any dtype; refused int64 [B]. ValueError names what is wrong."""
    bind_keep_state(state, saved, refused)()


@keep_state.register_kernel("cuda")
def _(state: Tensor, saved: Tensor, refused: Tensor) -> None:
    from forebay.kernels.recurrences.keep_state.gpu import bind_keep_state as bind

    bind(state, saved, refused)()


@keep_state.register_fake
def _(state: Tensor, saved: Tensor, refused: Tensor) -> None:
    return None


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.recurrences.keep_state.gpu import bind_keep_state as bind

    return bind(*use.args)


KEEP_STATE = Operator(
    torch.ops.forebay.keep_state.default,
    reference,
    lambda use: Cost(0, nbytes_of(use.args[0]), nbytes_of(use.args[1])),
    bind={"cpu": lambda use: bind_keep_state(*use.args), "cuda": _bind_cuda},
    layouts=dict.fromkeys(("state", "saved", "refused"), "dense"),
)
