"""Configurations of `recurrences/wkv/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.recurrences.wkv.gpu import CHANNELS, wkv_kernel
from forebay.kernels.recurrences.wkv.reference import EMPTY
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """RWKV-4 14B's 5120 channels, over 512 tokens."""
    pointers = ("k_ptr", "v_ptr", "decay_ptr", "bonus_ptr", "state_ptr", "out_ptr")
    strides = ("kb", "ks", "vb", "vs", "ob", "os")
    nbytes = 4 * 5120 * (512 * 3 + 2 + 2 * 3)
    return [AuditCase(
        name="wkv/512x5120", fn=wkv_kernel,
        signature={**dict.fromkeys(pointers[:5], "*fp32"), "start_ptr": "*i64", "count_ptr": "*i64", "out_ptr": "*fp32",
                   **dict.fromkeys(("tokens", "channels", *strides), "i32")},
        constants={"EMPTY": EMPTY, "C": CHANNELS},
        divisible=(*pointers, "start_ptr", "count_ptr", "channels", *strides), num_warps=2,
        load_nbytes=4, bytes_moved=nbytes, minimum_bytes=nbytes,
    )]  # fmt: skip
