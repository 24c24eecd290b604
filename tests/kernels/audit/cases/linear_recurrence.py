"""Configurations of `recurrences/linear_recurrence/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.recurrences.linear_recurrence.gpu import linear_recurrence_kernel, tile
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """A step of Qwen3-Next, Kimi-Linear and Mamba-2: the bytes are those of the states and of one token."""
    cases = []
    pointers = ("q_ptr", "k_ptr", "v_ptr", "decay_ptr", "beta_ptr", "state_ptr")
    strides = ("qb", "qs", "qh", "kb", "ks", "kh", "vb", "vs", "vh", "db", "ds", "ob", "os", "oh")
    for name, heads, columns, corrects, by_channel in (
        ("delta", 32, 128, True, False), ("channels", 32, 128, True, True), ("ssd", 64, 64, False, False),
    ):  # fmt: skip
        rows, part = tile(128, columns)
        nbytes = 4 * heads * (2 * 128 * columns + 2 * columns + 2 * 128)
        cases.append(AuditCase(
            name=f"linear_recurrence/{name}", fn=linear_recurrence_kernel,
            signature={**dict.fromkeys(pointers, "*fp32"), "start_ptr": "*i64", "count_ptr": "*i64", "out_ptr": "*fp32",
                       **dict.fromkeys(("tokens", "heads", "group", "width", "columns", *strides[:11], "dh", "bb", "bs",
                                        *strides[11:]), "i32")},
            constants={"CORRECTS": corrects, "BY_CHANNEL": by_channel, "K": rows, "V": part},
            divisible=(*pointers, "start_ptr", "count_ptr", "out_ptr", "width", "columns", *strides),
            bytes_moved=nbytes, minimum_bytes=nbytes,
        ))  # fmt: skip
    return cases
