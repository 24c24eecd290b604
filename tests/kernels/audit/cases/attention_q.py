"""Configurations of `attention/attention_q/gpu.py` that are audited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from forebay.kernels.formats import row_sizes
from forebay.kernels.gpu_support.cache_rows import packed_view, unit_of
from tests.kernels.audit.audit_case import GEMMA_2_9B, LLAMA_3_8B, SMOLLM2_135M, AuditCase, HeadShape
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
    name = f"attention_q/{kind}-kv{bits}"
    if queries == 1:
        made = decode_attention.case(name, dtype, view, shape, 2 * row_nbytes, **how)
        made = replace(made, aim=0.7 if dim == 128 and dtype != "fp32" else 0.0)
    else:
        made = prefill_attention.case(name, dtype, view, queries, shape, 2 * row_nbytes, **how)
    return replace(made, load_nbytes=unit_of(view.unit, group * bits // 8 if group < dim else 0), in_suite=in_suite)


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
