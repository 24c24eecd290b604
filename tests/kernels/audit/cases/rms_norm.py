"""Configurations of `norms/rms_norm/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.norms.rms_norm.gpu import rms_norm_kernel, tile
from forebay.kernels.norms.rms_norm.reference import MAX_COLUMNS
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """Per-head norm of Qwen3 (D = 128), and the hidden sizes of Llama-3-8B and OPT-30B, 512 rows each."""
    cases = []
    for columns, dtype in ((128, "bf16"), (4096, "bf16"), (7168, "fp16"), (MAX_COLUMNS, "fp32")):
        high, wide, warps = tile(columns)
        pointers = ("x_ptr", "weight_ptr", "out_ptr")
        numbers = ("rows", "columns", "n1", "n2", "xs0", "xs1", "xs2", "os0", "os1", "os2")
        nbytes = 2 * 512 * columns * (4 if dtype == "fp32" else 2)
        cases.append(
            AuditCase(
                name=f"rms_norm/{columns}/{dtype}",
                fn=rms_norm_kernel,
                signature={p: f"*{dtype}" for p in pointers}
                | {n: "i32" for n in numbers}
                | {"eps": "fp32"},
                constants={"ROWS": high, "COLUMNS": wide},
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
