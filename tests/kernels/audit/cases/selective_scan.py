"""Configurations of `recurrences/selective_scan/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.recurrences.selective_scan.gpu import selective_scan_kernel
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """Jamba's 8192 channels of 16 numbers, over 512 tokens."""
    pointers = ("x_ptr", "dt_ptr", "a_ptr", "b_ptr", "c_ptr", "state_ptr", "out_ptr")
    strides = ("xb", "xs", "db", "ds", "bb", "bs", "cb", "cs", "ob", "os")
    nbytes = 4 * (512 * (3 * 8192 + 2 * 16) + 8192 * 3 * 16)
    return [AuditCase(
        name="selective_scan/512x8192x16", fn=selective_scan_kernel,
        signature={**dict.fromkeys(pointers[:6], "*fp32"), "start_ptr": "*i64", "count_ptr": "*i64", "out_ptr": "*fp32",
                   **dict.fromkeys(("tokens", "channels", "width", "xb", "xs", "xc", "db", "ds", "dc", "bb", "bs", "cb",
                                    "cs", "ob", "os", "oc"), "i32")},
        constants={"C": 64, "N": 16}, divisible=(*pointers, "start_ptr", "count_ptr", "channels", "width", *strides),
        bytes_moved=nbytes, minimum_bytes=nbytes,
    )]  # fmt: skip
