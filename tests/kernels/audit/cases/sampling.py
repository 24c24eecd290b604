"""Configurations of `logits/sampling/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.logits.sampling.gpu import BLOCK, WARPS, sampling_kernel
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """Llama-3's vocabulary, 16 rows: greedy, and every step of sampling."""
    cases = []
    for sample, dtype, itemsize in ((False, "fp32", 4), (True, "fp32", 4), (True, "bf16", 2)):
        nbytes = 16 * (128256 * itemsize + 8 + (4 if sample else 0))
        pointers = {"logits_ptr": f"*{dtype}", "uniforms_ptr": "*fp32" if sample else "constexpr", "out_ptr": "*i64"}
        constants = {"SAMPLE": sample, "TOP_K": sample, "TOP_P": sample, "BLOCK": BLOCK}
        cases.append(
            AuditCase(
                name=f"sampling/{'top_k_top_p' if sample else 'greedy'}{'/bf16' if dtype == 'bf16' else ''}",
                fn=sampling_kernel,
                signature=pointers
                | {"vocabulary": "i32", "stride": "i32", "inverse_temperature": "fp32", "top_k": "i32",
                   "dropped_share": "fp32"},
                constants=constants | ({} if sample else {"uniforms_ptr": None}),
                num_warps=WARPS,
                divisible=("logits_ptr", "out_ptr", "vocabulary", "stride"),
                bytes_moved=nbytes,  # from device memory; the bisections read the row from L2
                minimum_bytes=nbytes,
            )
        )  # fmt: skip
    return cases
