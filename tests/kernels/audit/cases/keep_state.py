"""Configurations of `recurrences/keep_state/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.recurrences.keep_state.gpu import PIECE, keep_state_kernel
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """A layer's state of Mamba-2 2.7B, of one sequence: 80 heads of 64 by 128 numbers."""
    numbers = 80 * 64 * 128
    return [AuditCase(
        name="keep_state/655360", fn=keep_state_kernel,
        signature={"state_ptr": "*fp32", "saved_ptr": "*fp32", "refused_ptr": "*i64", "numbers": "i32"},
        constants={"PIECE": PIECE}, divisible=("state_ptr", "saved_ptr", "refused_ptr", "numbers"),
        bytes_moved=8 * numbers, minimum_bytes=8 * numbers,
    )]  # fmt: skip
