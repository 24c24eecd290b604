"""Configurations of `norms/layer_norm/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.norms.layer_norm.gpu import layer_norm_kernel
from forebay.kernels.norms.rms_norm.gpu import tile
from forebay.kernels.norms.rms_norm.reference import MAX_COLUMNS
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """GPT-2 XL, OPT-30B and the longest row, 512 rows each, with weight and bias."""
    cases = []
    for columns, dtype in ((1600, "fp16"), (7168, "fp16"), (MAX_COLUMNS, "fp32")):
        high, wide, warps = tile(columns)
        pointers = ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr")
        numbers = ("rows", "columns", "n1", "n2", "xs0", "xs1", "xs2", "os0", "os1", "os2")
        nbytes = 2 * 512 * columns * (4 if dtype == "fp32" else 2)
        cases.append(
            AuditCase(
                name=f"layer_norm/{columns}/{dtype}",
                fn=layer_norm_kernel,
                signature={p: f"*{dtype}" for p in pointers}
                | {n: "i32" for n in numbers}
                | {"eps": "fp32"},
                constants={"WEIGHT": True, "BIAS": True, "ROWS": high, "COLUMNS": wide},
                num_warps=warps,
                divisible=(*pointers, "columns", "xs0", "xs1", "xs2", "os0", "os1", "os2"),
                main_operands=1,
                bytes_moved=nbytes,
                minimum_bytes=nbytes,
                aim=0.75,
                turn_nbytes=nbytes * high // 512,
            )
        )
    return cases
