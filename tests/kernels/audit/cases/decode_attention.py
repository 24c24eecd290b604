"""Configurations of `attention/decode_attention/gpu.py` that are audited."""

from __future__ import annotations

from dataclasses import replace

import torch

from forebay.kernels.attention.decode_attention.decode_shares import (
    TYPICAL_LANES,
    DecodeShape,
    part_nbytes,
    share_count,
)
from forebay.kernels.attention.decode_attention.gpu import choose, decode_attention_kernel, register_limit
from forebay.kernels.gpu_support.cache_tiles import CacheView, contiguous_view
from forebay.kernels.products.linear.selection import SM_COUNT
from tests.kernels.audit.audit_case import (  # fmt: skip
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GEMMA_4,
    GPT_OSS,
    LLAMA_3_8B,
    OPT_30B,
    SMOLLM2_135M,
    AuditCase,
    HeadShape,
)


def case(
    name: str, dtype: str, view: CacheView, model: HeadShape, position_nbytes: int, *, unified: bool = False,
    amd: bool = False, merge: bool = False, sinks: bool = False, hopper: bool = True,
) -> AuditCase:  # fmt: skip
    """One sequence of 16384 positions, each of position_nbytes in the cache of a KV head, seen through `view`."""
    length, bits = 16384, view.constants["BITS"]
    heads, kv_heads, dim = model
    itemsize = 4 if dtype == "fp32" else 2
    group_heads = heads // kv_heads
    chosen, product, constants = choose(view, itemsize, group_heads, amd, hopper)
    partial, lanes = part_nbytes(group_heads, dim), view.constants["DP"]
    shape = DecodeShape(kv_heads, length, position_nbytes, group_heads, dim, lanes, itemsize, bits)
    splits = share_count(shape, product, SM_COUNT)
    pointer = "*u8" if bits else f"*{dtype}"
    signature = {"q_ptr": f"*{dtype}", "k_ptr": pointer, "v_ptr": pointer, "start_ptr": "*i64"}
    signature |= {"sinks_ptr": f"*{dtype}", "counter_ptr": "*i32", "part_ptr": "*fp32", "stat_ptr": "*fp32"}
    signature |= {"out_ptr": f"*{dtype}"}
    strides = ("qb", "qh", "kb", "kh", "kr", "vb", "vh", "vr", "ob", "oh")
    signature |= dict.fromkeys((*strides, "kv_heads", "group_heads", "splits", "window"), "i32")
    signature |= dict.fromkeys(("scale_log2", "softcap", "phi", "low", "high"), "fp32")
    minimum = length * kv_heads * position_nbytes + 2 * heads * dim * itemsize
    constants |= {"UNIFIED": unified, "CAPPED": False, "HAS_SINKS": sinks, "UNIT": view.unit}
    constants |= {"MERGE": merge, "PTX": True, "POWER": view.power}
    plain = dtype != "fp32" and not product.folded
    return AuditCase(
        name=f"{name}/{dim}x{heads}/{kv_heads}-{dtype}{'/amd' if amd else '' if hopper else '/ampere'}",
        fn=decode_attention_kernel,
        signature=signature,
        constants=constants,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        max_registers=register_limit(view, product.folded, dtype == "bf16").get("maxnreg", 0),
        # What strides of packed rows are multiples of is said by UNIT.
        divisible=(*(n for n, kind in signature.items() if kind.startswith("*")),
                   *((*strides[:2], *strides[-2:]) if view.unit > 1 else strides)),
        uses_dot=True,
        main_operands=1 if constants["SAME"] else 2,
        bytes_moved=minimum + 2 * kv_heads * splits * partial,
        minimum_bytes=minimum,
        most_moved=1.125 if lanes <= TYPICAL_LANES else 4.0,  # what shares write stays in the L2
        turn_nbytes=chosen.positions * position_nbytes,
        archs=("gfx942",) if amd else ("sm_80",) if not hopper else ("sm_90",) if lanes > TYPICAL_LANES else (
            ("sm_80", "sm_90", "gfx942") if plain else ("sm_80", "sm_90")),
    )  # fmt: skip


def _case(
    name: str, dtype: str, shape: HeadShape, unified: bool = True, amd: bool = False, merge: bool = False,
    sinks: bool = False, same: bool = False, hopper: bool = True,
) -> AuditCase:  # fmt: skip
    """Over values as they are; the same for keys and values, or each its own."""
    kept = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    k, v = torch.empty(2, 1, shape.kv_heads, 1, shape.dim, dtype=kept)
    made = case(f"decode_attention/{name}", dtype, contiguous_view(k, k if same else v), shape,
                (1 if same else 2) * shape.dim * k.itemsize, unified=unified, amd=amd, merge=merge, sinks=sinks,
                hopper=hopper)  # fmt: skip
    return replace(made, aim=0.85 if shape.dim <= TYPICAL_LANES else 0.0)


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B (32 query heads on 8), OPT-30B (56 on 56) and Gemma-2-9B (16 on 8, D = 256), at 16384 positions."""
    return [
        _case("unified", "bf16", LLAMA_3_8B),
        _case("synchronised", "bf16", LLAMA_3_8B, False),
        _case("unified", "fp16", LLAMA_3_8B),
        _case("unified", "fp16", OPT_30B),
        _case("unified", "bf16", GEMMA_2_9B),
        _case("unified", "fp16", SMOLLM2_135M),
        _case("merged", "bf16", LLAMA_3_8B, merge=True),
        _case("merged", "bf16", GEMMA_2_9B, merge=True),
        _case("merged-synchronised", "bf16", LLAMA_3_8B, False, merge=True),
        _case("sinks", "bf16", GPT_OSS, merge=True, sinks=True),
        *(_case(name, "bf16", shape, unified=False, same=name == "latents", hopper=hopper, amd=amd)
          for name, shape in (("latents", DEEPSEEK_V3), ("latents", DEEPSEEK_V2_LITE), ("wide", GEMMA_4))
          for hopper, amd in ((True, False), (False, False), (True, True))),
    ]
