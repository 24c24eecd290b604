"""Configurations of `cache/kv_append/gpu.py` that are audited."""

from __future__ import annotations

from dataclasses import replace

import triton

from forebay.kernels.cache.kv_append.gpu import kv_append_kernel, tile
from forebay.kernels.positions.rotary.gpu import STRIDES
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B's 8 heads of 128 and SmolLM's 3 of 64, 512 tokens each."""
    cases = []
    for heads, dim, dtype in ((8, 128, "bf16"), (3, 64, "fp16")):
        wide, block, warps = tile(heads, dim)
        pointers = {"k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "start_ptr": "*i64",
                    "k_cache_ptr": f"*{dtype}", "v_cache_ptr": f"*{dtype}"}  # fmt: skip
        strides = ("kb", "kh", "ks", "vb", "vh", "vs", "kcb", "kch", "kcl", "vcb", "vch", "vcl")
        numbers = ("queries", "heads", "capacity", "k_dim", "v_dim", *strides)
        nbytes = 512 * 4 * heads * dim * 2
        cases.append(
            AuditCase(
                name=f"kv_append/{heads}x{dim}/{dtype}",
                fn=kv_append_kernel,
                signature=pointers | {n: "i32" for n in numbers},
                constants={"HEADS": block, "D": wide},
                num_warps=warps,
                divisible=(*pointers, *strides, "k_dim", "v_dim"),
                main_operands=2,
                bytes_moved=nbytes,
                minimum_bytes=nbytes,
                aim=0.75 if dim == 128 else 0.0,
                turn_nbytes=nbytes // (512 * triton.cdiv(heads, block)),
            )
        )
        cases.append(turned(cases[-1], f"*{dtype}", 2 * 512 * 4 * heads * dim * 2, K_DIM=dim))
    return cases


def turned(case: AuditCase, pointer: str, nbytes: int, **constants: int) -> AuditCase:
    """The case with queries and keys turned on their way, which moves so many bytes more."""
    pointers = dict.fromkeys(("q_ptr", "turned_ptr", "cos_ptr", "sin_ptr"), pointer)
    return replace(
        case, name=f"{case.name}/turned", in_suite=False,
        signature={**case.signature, **pointers, **dict.fromkeys(("q_heads", *STRIDES), "i32")},
        constants={**case.constants, **constants, "TURNED": True}, divisible=(*case.divisible, *pointers, *STRIDES),
        bytes_moved=case.bytes_moved + nbytes, minimum_bytes=case.minimum_bytes + nbytes, aim=0.0, turn_nbytes=0,
        load_nbytes=8)  # a thread has 4 elements of each half of a head
