"""Configurations of `recurrences/short_conv/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.recurrences.short_conv.gpu import CHANNELS, TOKENS, short_conv_kernel
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """Qwen3-Next's 8192 channels of 4 taps: a prompt of 512 tokens and a decode step."""
    cases = []
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "state_ptr", "out_ptr")
    for tokens, tile in ((512, TOKENS), (1, 4)):
        nbytes = 2 * 8192 * (2 * tokens + 2 * 3 + 4)
        cases.append(AuditCase(
            name=f"short_conv/{tokens}x8192/bf16", fn=short_conv_kernel,
            signature={"x_ptr": "*bf16", "weight_ptr": "*bf16", "bias_ptr": "*bf16", "state_ptr": "*bf16",
                       "start_ptr": "*i64", "count_ptr": "*i64", "out_ptr": "*bf16",
                       **dict.fromkeys(("tokens", "channels", "xb", "xs", "ob", "os"), "i32")},
            constants={"TAPS": 4, "KEPT_P": 4, "T": tile, "C": CHANNELS, "HAS_BIAS": False, "SILU": True},
            divisible=(*pointers, "start_ptr", "count_ptr", "channels", "xb", "xs", "ob", "os"),
            load_nbytes=16 if tokens > 1 else 4, bytes_moved=nbytes, minimum_bytes=nbytes,
        ))  # fmt: skip
    return cases
