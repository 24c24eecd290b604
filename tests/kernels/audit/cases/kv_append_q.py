"""Configurations of `cache/kv_append_q/gpu.py` that are audited."""

from __future__ import annotations

import triton

from forebay.kernels.cache.kv_append_q.gpu import _constants, kv_append_q_kernel
from forebay.kernels.formats import row_sizes
from forebay.kernels.gpu_support.cache_rows import unit_of
from tests.kernels.audit.audit_case import AuditCase
from tests.kernels.audit.cases.kv_append import turned


def _case(bits: int, heads: int, dim: int, dtype: str, in_suite: bool = True, amd: bool = False) -> AuditCase:
    """512 tokens."""
    group = row_sizes.cache_group_size(dim, bits)
    row_nbytes = row_sizes.cache_row_nbytes(dim, bits)
    constants, warps = _constants(heads, dim, group, bits, 4 if dtype == "fp32" else 2, amd)
    pointers = dict.fromkeys(("k_ptr", "v_ptr"), f"*{dtype}") | {"start_ptr": "*i64"}
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*u8")
    strides = ("kb", "kh", "ks", "vb", "vh", "vs")
    numbers = ("queries", "heads", "capacity", "step", "tb", "ts", *strides, "kcb", "kch", "kcl", "vcb", "vch", "vcl")
    nbytes = 2 * 512 * heads * (dim * (4 if dtype == "fp32" else 2) + row_nbytes)
    return AuditCase(
        name=f"kv_append_q/kv{bits}/{heads}x{dim}-{dtype}{'/amd' if amd else ''}",
        fn=kv_append_q_kernel,
        signature=pointers | dict.fromkeys(numbers, "i32"),
        constants=constants | {"UNIT": unit_of(row_nbytes)},
        num_warps=warps,
        divisible=(*pointers, *strides),
        main_operands=1,  # the compiler makes one code of the two branches, K's and V's
        bytes_moved=nbytes,
        minimum_bytes=nbytes,
        # What fits ranges to 4-bit codes is arithmetic; other shapes take the general way and have no aim.
        aim={4: 0.35, 8: 0.5}[bits] if dim >= 128 and dtype != "fp32" else 0.0,
        turn_nbytes=nbytes // (2 * 512 * triton.cdiv(heads, constants["HEADS"])),
        archs=("gfx942",) if amd else (("sm_80", "sm_90") if constants["BLOCKWISE"] else ("sm_80", "sm_90", "gfx942")),
        in_suite=in_suite,
    )


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B, SmolLM2-135M, Gemma-2-9B, and heads of 80, whose groups are not whole blocks of a rotation."""
    return [
        *(turned(_case(bits, 8, 128, "bf16"), "*bf16", 2 * 512 * 32 * 128 * 2) for bits in (4, 8)),
        _case(4, 8, 128, "bf16"),
        _case(8, 8, 128, "bf16"),
        _case(4, 3, 64, "fp16"),
        _case(8, 3, 64, "fp32", in_suite=False),
        _case(4, 8, 256, "bf16", in_suite=False),
        _case(4, 32, 80, "fp16"),
        _case(8, 32, 80, "fp16", in_suite=False),
        _case(4, 8, 128, "bf16", amd=True),
        _case(8, 8, 128, "bf16", amd=True),
    ]
