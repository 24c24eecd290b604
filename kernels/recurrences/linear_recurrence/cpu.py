"""`forebay::linear_recurrence` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.recurrences.linear_recurrence.reference import check_arguments, reference
from forebay.kernels.recurrences.steps import by_reference

MOST_WIDTH = 512  # of keys; MOST_WIDTH in linear_recurrence.cpp


class LinearRecurrenceArgs(ctypes.Structure):
    """Mirror of `LinearRecurrenceArgs` in linear_recurrence.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "log_decay", "beta", "state", "start", "count", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "heads", "group", "width", "columns")),
        *((f"{t}_{d}", ctypes.c_int64) for t in ("q", "k", "v", "decay") for d in ("batch", "token", "head")),
        *((name, ctypes.c_int64) for name in ("beta_batch", "beta_token", "out_batch", "out_token", "out_head")),
        ("by_channel", ctypes.c_int32),
    )


def workspace_nbytes(tokens: int, heads: int, width: int, columns: int) -> int:
    """Bytes of scratch of the C++ kernel: rows, products and states of a chunk for each thread, where there are chunks.
    """
    library = native.load()
    each = library.forebay_linear_recurrence_scratch(tokens, heads, width, columns) if library is not None else 0
    return int(4 * torch.get_num_threads() * each)


def bind_linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, start: Tensor,
    count: Tensor, out: Tensor,
) -> Callable[[], object]:
    """A closure that fills out [B, S, H, Dv] and renews the state, from the tensors' contents at each call. ValueError
    names what is wrong."""
    check_arguments(q, k, v, log_decay, beta, state, start, count)
    given = (q, k, v, log_decay, beta, state, start, count, out)
    if native.load() is None or k.shape[3] > MOST_WIDTH or (out.shape[-1] > 1 and out.stride(-1) != 1):
        return by_reference(reference, (q, k, v, log_decay, beta, state, start, count), state, out)
    args = LinearRecurrenceArgs(
        *(None if t is None else t.data_ptr() for t in given), *v.shape[:3], v.shape[2] // k.shape[2], *state.shape[2:],
        *(stride for t in (q, k, v, log_decay) for stride in t.stride()[:3]),
        *((0, 0) if beta is None else beta.stride()[:2]), *out.stride()[:3], log_decay.dim() == 4,
    )  # fmt: skip
    floats = workspace_nbytes(v.shape[1], *state.shape[1:]) // 4
    return native.NativeCall("linear_recurrence", args, given, floats)
