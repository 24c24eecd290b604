"""Configurations of `quantization/dequantize_rows/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.formats.packing import Packing
from forebay.kernels.quantization.dequantize_rows.gpu import OP
from forebay.kernels.quantization.quantize.gpu import TILE_ELEMENTS, WARPS, dequantize_kernel
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B's down projection to bf16; transposed, as GPT-2's weights are, its stores are of 2 bytes each."""
    n, k = 4096, 14336
    cases = []
    for bits, group, transposed, symmetric in (
            (4, 64, False, False), (8, 128, False, False), (4, 32, False, False), (4, 64, True, False),
            (4, 32, False, True)):
        tile, stored = TILE_ELEMENTS // group, Packing(bits, k, group, symmetric=symmetric)
        nbytes = n * (2 * k + stored.row_nbytes)
        pointers = {"packed_ptr": "*u8", "scale_ptr": "*fp16", "low_ptr": "*fp16", "out_ptr": "*bf16"}
        numbers = ("rows", "groups", "size", "inner", "packed_outer", "scale_outer", "low_outer", "out_outer")
        cases.append(
            AuditCase(
                name=f"{OP}/{stored.format}{'/transposed' if transposed else ''}",
                fn=dequantize_kernel,
                signature=pointers | dict.fromkeys(numbers, "i32") | {"limit": "fp32"},
                constants={"BITS": bits, "GROUP": group, "PADDED": group, "LAST": True, "TRANSPOSED": transposed,
                           "SYMMETRIC": symmetric, "CODEBOOK": 0, "R": tile},
                num_warps=WARPS,
                divisible=tuple(name for name in (*pointers, *numbers) if name not in ("scale_ptr", "low_ptr")),
                main_operands=1,
                bytes_moved=nbytes,
                minimum_bytes=nbytes,
                aim=0.0 if transposed else 0.6,
                turn_nbytes=nbytes * TILE_ELEMENTS // (n * k),
                in_suite=group == 64,
            )
        )  # fmt: skip
    return cases
