"""Configurations of `quantization/quantize/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.quantization.quantize.gpu import (
    FIRST_PLACES,
    WARPS,
    _launch_shape,
    dequantize_kernel,
    first_warps,
    quantize_first_kernel,
    quantize_kernel,
)
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """A 4096 x 4096 matrix in bf16, groups of 64 along either dimension, and 32 and 128 along the last."""
    n = 4096
    cases = []
    for bits in (4, 8):
        for group, last in ((64, True), (64, False), (32, True), (128, True)):
            _, tile, _, _ = _launch_shape(n, n // group, 1 if last else n, group)
            nbytes = 2 * n * n + n * n * bits // 8 + 2 * 2 * n * n // group
            for op in ("quantize", "dequantize"):
                constants = {"BITS": bits, "GROUP": group, "PADDED": group}
                numbers: tuple[str, ...]
                pointers = {"packed_ptr": "*u8"} | dict.fromkeys(("scale_ptr", "low_ptr"), "*fp16")
                if op == "dequantize":
                    fn, warps, high = dequantize_kernel, WARPS, tile
                    constants |= {"LAST": last, "TRANSPOSED": False, "SYMMETRIC": False, "CODEBOOK": 0}
                    pointers |= {"out_ptr": "*bf16"}
                    numbers = ("rows", "groups", "size", "inner", "packed_outer", "scale_outer", "low_outer",
                               "out_outer")
                else:
                    fn, warps, high = quantize_kernel, WARPS, tile
                    constants |= {"FULL": True}
                    pointers |= {"x_ptr": "*bf16"}
                    numbers = ("rows", "groups", "size")
                    if not last:
                        fn, warps, high = quantize_first_kernel, first_warps(group), FIRST_PLACES
                        numbers = ("groups", "size", "inner")
                cases.append(
                    AuditCase(
                        name=f"{op}/w{bits}g{group}/{'last' if last else 'first'}",
                        fn=fn,
                        signature=pointers
                        | dict.fromkeys(numbers, "i32")
                        | ({"limit": "fp32"} if op == "dequantize" else {}),
                        constants=constants | {"R": high},
                        num_warps=warps,
                        divisible=(*pointers, *numbers),
                        main_operands=1,
                        bytes_moved=nbytes,
                        minimum_bytes=nbytes,
                        aim=0.6,
                        turn_nbytes=nbytes * high * group // (n * n),
                        in_suite=group == 64,
                    )
                )
    return cases
