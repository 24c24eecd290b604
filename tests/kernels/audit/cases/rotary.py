"""Configurations of `positions/rotary/gpu.py` that are audited."""

from __future__ import annotations

import triton

from forebay.kernels.positions.rotary.gpu import rotary_kernel, tile
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """Queries of Llama-3-8B and heads of 64 and 80, 512 tokens each."""
    cases = []
    for heads, dim, dtype in ((32, 128, "bf16"), (9, 64, "fp16"), (32, 80, "fp16"), (32, 128, "fp32")):
        half, block, warps = tile(heads, dim)
        pointers = ("x_ptr", "cos_ptr", "sin_ptr", "out_ptr")
        strides = ("xb", "xh", "xs", "cb", "cs", "nb", "ns", "ob", "oh", "os")
        nbytes = 512 * (2 * heads + 2) * dim * (4 if dtype == "fp32" else 2)
        cases.append(
            AuditCase(
                name=f"rotary/{heads}x{dim}/{dtype}",
                fn=rotary_kernel,
                signature={p: f"*{dtype}" for p in pointers} | {n: "i32" for n in ("queries", "heads", *strides)},
                constants={"D": dim, "HALF": half, "HEADS": block},
                num_warps=warps,
                divisible=(*pointers, *strides),
                bytes_moved=nbytes,
                minimum_bytes=nbytes,
                aim=0.75,
                turn_nbytes=nbytes // (512 * triton.cdiv(heads, block)),
            )
        )
    return cases
