"""Configurations of `cache/activation_append_q/gpu.py` that are audited."""

from __future__ import annotations

import triton

from forebay.kernels.cache.activation_append_q.gpu import activation_append_q_kernel, tile
from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.table import ACT8
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """act8 at the hidden sizes of SmolLM2-135M, Llama-3-8B and OPT-30B, 512 tokens."""
    cases = []
    bits, group = ACT8.bits, ACT8.group_size
    for features, dtype in ((576, "bf16"), (4096, "bf16"), (7168, "fp16")):
        row = row_sizes.row_nbytes(features, bits, group)
        wide, warps = tile(features, group)
        nbytes = 512 * (2 * features + row + 8)
        strides = ("xb", "xs", "cb", "cl", "sb", "sl", "rb", "rs")
        signature = {"x_ptr": f"*{dtype}", "rows_ptr": "*i64", "codes_ptr": "*u8"}
        signature |= dict.fromkeys(("scale_ptr", "low_ptr"), "*fp16")
        numbers = ("queries", "features", "groups", "capacity", "row_nbytes", *strides)
        cases.append(
            AuditCase(
                name=f"activation_append_q/act8/{features}-{dtype}",
                fn=activation_append_q_kernel,
                signature=signature | dict.fromkeys(numbers, "i32"),
                constants={"BITS": bits, "GROUP": group, "GROUPS": wide, "FULL": features % group == 0},
                num_warps=warps,
                divisible=("x_ptr", "codes_ptr", "features", "row_nbytes", "xb", "xs", "cb", "cl"),
                bytes_moved=nbytes,
                minimum_bytes=nbytes,
                aim=0.6 if features >= 4096 else 0.0,
                turn_nbytes=nbytes // (512 * triton.cdiv(features, wide * group)),
                in_suite=features == 4096,
            )
        )
    return cases
