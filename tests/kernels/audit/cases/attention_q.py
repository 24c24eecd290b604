"""Configurations of `attention/attention_q/gpu.py` that are audited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from forebay.kernels.attention.decode_attention.decode_shares import (  # fmt: skip
    DecodeProduct,
    DecodeShape,
    part_nbytes,
    product,
    share_count,
)
from forebay.kernels.attention.decode_attention.gpu_wide import wide_attention_kernel, wide_tile
from forebay.kernels.formats import row_sizes
from forebay.kernels.gpu_support.cache_rows import packed_view, unit_of
from forebay.kernels.gpu_support.cache_tiles import CacheView, same_rows
from forebay.kernels.products.linear.selection import SM_COUNT
from tests.kernels.audit.audit_case import (  # fmt: skip
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA_2_9B,
    LLAMA_3_8B,
    NEMOTRON_4_340B,
    SMOLLM2_135M,
    AuditCase,
    HeadShape,
)
from tests.kernels.audit.cases import decode_attention, prefill_attention
from tests.kernels.audit.cases.prefill_attention import GEMMA_2_SCORES

HEADS_OF_80 = HeadShape(32, 32, 80)


def _case(
    kind: str, bits: int, dtype: str, shape: HeadShape, queries: int = 1, in_suite: bool = True, **how: Any
) -> AuditCase:
    """Rows of kv8 (but of 256 elements) and of kv4 of 64 are no multiple of 16 bytes, nor are groups of 40: loads are
    8 or 4 bytes wide there."""
    _, kv_heads, dim = shape
    group, row_nbytes = row_sizes.cache_group_size(dim, bits), row_sizes.cache_row_nbytes(dim, bits)
    rows = torch.empty(1, kv_heads, 2, row_nbytes, dtype=torch.uint8)
    view = packed_view(rows, rows, dim, bits, group)
    name, same = f"attention_q/{kind}-kv{bits}", same_rows(view)
    chosen = product(dim, group, bits, 4 if dtype == "fp32" else 2, shape.heads // kv_heads, how.get("amd", False),
                     how.get("hopper", True))
    if queries == 1 and chosen.wide:
        position_nbytes = row_nbytes if same else 2 * row_nbytes
        made = _wide_case(name, bits, dtype, shape, view, position_nbytes, chosen, **how)
    elif queries == 1:
        made = decode_attention.case(name, dtype, view, shape, 2 * row_nbytes, **how)
        made = replace(made, aim=0.7 if dim == 128 and dtype != "fp32" else 0.0)
    else:
        made = prefill_attention.case(name, dtype, view, queries, shape, 2 * row_nbytes, **how)
    return replace(made, load_nbytes=unit_of(view.unit, group * bits // 8 if group < dim else 0), in_suite=in_suite)


def _wide_case(
    name: str, bits: int, dtype: str, shape: HeadShape, view: CacheView, position_nbytes: int, chosen: DecodeProduct,
    amd: bool = False, hopper: bool = True,
) -> AuditCase:  # fmt: skip
    """One sequence of 16384 positions of latent rows, or of rows in chunks."""
    length, (heads, kv_heads, dim), same = 16384, shape, same_rows(view)
    group_heads = heads // kv_heads
    sizes = DecodeShape(kv_heads, length, position_nbytes, group_heads, dim, view.constants["DP"], 2, bits)
    tile, minimum = wide_tile(chosen.rows, dim, bits, amd), length * kv_heads * position_nbytes + 4 * heads * dim
    signature = {"q_ptr": f"*{dtype}", "k_ptr": "*u8", "v_ptr": "*u8", "start_ptr": "*i64"}
    signature |= {"part_ptr": "*fp32", "stat_ptr": "*fp32"}
    strides = ("qb", "qh", "kb", "kh", "kr", "vb", "vh", "vr")
    signature |= dict.fromkeys((*strides, "kv_heads", "group_heads", "splits", "window"), "i32")
    signature |= dict.fromkeys(("scale_log2", "softcap"), "fp32")
    constants = {name: view.constants[name] for name in ("BITS", "D", "G", "GP")}
    constants |= {"CAPPED": False, "UNIT": view.unit, "POWER": view.power, "SAME": same, "PTX": not amd}
    return AuditCase(
        name=f"{name}/{dim}x{heads}/{kv_heads}-{dtype}{'/amd' if amd else '' if hopper else '/ampere'}",
        fn=wide_attention_kernel,
        signature=signature,
        constants=constants | {"M": chosen.rows, "T": tile.positions},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible=(*(n for n, kind in signature.items() if kind.startswith("*")), *strides[:2]),
        uses_dot=True,
        main_operands=1 if same else 2,
        bytes_moved=minimum + 2 * kv_heads * share_count(sizes, chosen, SM_COUNT) * part_nbytes(group_heads, dim),
        minimum_bytes=minimum,
        most_moved=8.0 if same else 1.125,  # what shares write stays in the L2
        turn_nbytes=tile.positions * position_nbytes,
        archs=("gfx942",) if amd else ("sm_90",) if hopper else ("sm_80",),
    )


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B, SmolLM2-135M, Gemma-2-9B, and heads of 80, whose groups are not whole blocks of a rotation."""
    cases = [
        _case("decode", 4, "bf16", LLAMA_3_8B),
        _case("decode", 8, "bf16", LLAMA_3_8B),
        _case("decode", 4, "fp16", SMOLLM2_135M),
        _case("decode", 8, "fp16", SMOLLM2_135M, in_suite=False),
        _case("decode", 4, "bf16", GEMMA_2_9B, in_suite=False),
        _case("decode", 8, "bf16", GEMMA_2_9B, in_suite=False),
        _case("decode", 4, "fp16", HEADS_OF_80),
        _case("decode", 8, "fp16", HEADS_OF_80, in_suite=False),
        _case("decode", 4, "fp32", SMOLLM2_135M),
        _case("decode", 8, "fp32", LLAMA_3_8B, in_suite=False),
        _case("merged", 4, "bf16", LLAMA_3_8B, merge=True),
        _case("merged", 8, "bf16", LLAMA_3_8B, merge=True, in_suite=False),
        _case("merged", 4, "fp32", SMOLLM2_135M, merge=True),
        _case("decode", 4, "bf16", LLAMA_3_8B, amd=True),
        _case("decode", 8, "fp16", HEADS_OF_80, amd=True, in_suite=False),
    ]
    cases += [
        _case("latents", bits, "bf16", shape, amd=amd, hopper=hopper, in_suite=not amd)
        for bits in (8, 4) for shape in (DEEPSEEK_V3, DEEPSEEK_V2_LITE)
        for hopper, amd in ((True, False), (False, False), (True, True))
    ]
    cases += [
        _case("decode", bits, "bf16", NEMOTRON_4_340B, hopper=hopper) for bits in (8, 4) for hopper in (True, False)
    ]
    for ampere in (False, True):
        cases += [
            _case("long", 4, "bf16", LLAMA_3_8B, 2048, ampere=ampere),
            _case("long", 8, "bf16", LLAMA_3_8B, 2048, ampere=ampere),
            _case("chunk", 4, "bf16", LLAMA_3_8B, 64, ampere=ampere, in_suite=False),
            _case("short", 4, "fp16", HEADS_OF_80, 16, ampere=ampere),
            _case("long", 8, "fp16", HEADS_OF_80, 2048, ampere=ampere, in_suite=False),
            _case("window-softcap", 4, "bf16", GEMMA_2_9B, 2048, scoring=GEMMA_2_SCORES, ampere=ampere),
            _case("fp32", 4, "fp32", SMOLLM2_135M, 64, ampere=ampere),
            _case("fp32", 8, "fp32", LLAMA_3_8B, 64, ampere=ampere, in_suite=False),
        ]
    return cases
