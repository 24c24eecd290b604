"""Configurations of `attention/prefill_attention/gpu.py` that are audited."""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.attention.prefill_attention.gpu import (
    least_lanes,
    loop_order,
    prefill_attention_kernel,
    tile,
)
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.gpu_support.arguments import AMD_STAGES
from forebay.kernels.gpu_support.cache_tiles import CacheView, contiguous_view, row_parts, same_rows
from tests.kernels.audit.audit_case import (  # fmt: skip
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GEMMA_4,
    GPT_OSS,
    LLAMA_3_8B,
    OPT_30B,
    PHI_2,
    PHI_3_MINI,
    SMOLLM2_135M,
    AuditCase,
    HeadShape,
)

PLAIN, GEMMA_2_SCORES = Scoring(1.0), Scoring(1.0, 4096, 50.0)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Rows that are taken as two parts: 64 and 16, 64 and 32, 128 and 64.
PARTS = ((2048, PHI_2), (16, PHI_2), (2048, PHI_3_MINI), (64, PHI_3_MINI), (2048, HeadShape(64, 4, 192)))


def case(
    name: str, dtype: str, view: CacheView, queries: int, shape: HeadShape, position_nbytes: int,
    scoring: Scoring = PLAIN, ampere: bool = False, sinks: bool = False, values: int = 0, amd: bool = False,
) -> AuditCase:  # fmt: skip
    """One sequence, nothing cached before, seen through `view`; for GPUs before Hopper, AMD's, or the others. `values`
    of a row of V, where these are fewer than of K."""
    heads, kv_heads, dim = shape
    itemsize = DTYPES[dtype].itemsize
    rows = queries * heads // kv_heads
    row, lanes = row_parts(view, least_lanes(rows, itemsize), amd), view.constants["DP"]
    chosen = tile(rows, lanes, itemsize, ampere, view.power > 0, 2 if row["D2"] else 1, same_rows(view), amd)
    pointer = "*u8" if view.constants["BITS"] else f"*{dtype}"
    signature = {"q_ptr": f"*{dtype}", "k_ptr": pointer, "v_ptr": pointer, "start_ptr": "*i64"}
    signature |= {"sinks_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    strides = ("qb", "qh", "qs", "ob", "os", "oh")
    cache_strides = ("kb", "kh", "kr", "vb", "vh", "vr")
    signature |= dict.fromkeys((*strides, *cache_strides, "queries", "kv_heads", "group_heads", "window"), "i32")
    signature |= dict.fromkeys(("scale_log2", "softcap"), "fp32")
    constants: dict[str, Any] = {"WINDOWED": scoring.window != 0, "CAPPED": scoring.softcap > 0}
    constants |= {"SAME": same_rows(view), "HAS_SINKS": sinks, "BITS": view.constants["BITS"]}
    constants |= {"UNIT": view.unit, "POWER": view.power, **loop_order(scoring, view, chosen)}
    # Tiles of K and V that programs of one wave share come from L2: counted is what crosses from device memory.
    nbytes = queries * (kv_heads * position_nbytes + 2 * heads * dim * itemsize)
    return AuditCase(
        name=f"{name}/{queries}x{dim}x{heads}/{kv_heads}-{dtype}{'/amd' if amd else '/ampere' if ampere else ''}",
        fn=prefill_attention_kernel,
        signature=signature,
        constants=constants | {"ROWS": chosen.rows, "T": chosen.positions, "DV": values or dim} | row,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        amd_stages=min(chosen.num_stages, AMD_STAGES),
        # What strides of packed rows are multiples of is said by UNIT.
        divisible=(*(n for n, kind in signature.items() if kind.startswith("*")), *strides,
                   *(() if view.unit > 1 else cache_strides)),
        uses_dot=True,
        main_operands=2 if constants["SAME"] else 3,
        bytes_moved=nbytes,
        minimum_bytes=nbytes,
        archs=("gfx942",) if amd else ("sm_80",) if ampere else ("sm_90",) if (
            dtype == "fp32" or row["DP"] > 256 or row["D2"]) else ("sm_90", "gfx942"),
    )  # fmt: skip


def _case(
    name: str, dtype: str, queries: int, shape: HeadShape, scoring: Scoring = PLAIN, ampere: bool = False,
    sinks: bool = False, same: bool = False, values: int = 0, amd: bool = False,
) -> AuditCase:  # fmt: skip
    """Over values as they are; the same for keys and values, or each its own."""
    k, v = torch.empty(2, 1, shape.kv_heads, 1, shape.dim, dtype=DTYPES[dtype])
    view, nbytes = contiguous_view(k, k if same else v), (1 if same else 2) * shape.dim * k.itemsize
    return case(f"prefill_attention/{name}", dtype, view, queries, shape, nbytes, scoring, ampere, sinks, values, amd)


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B, OPT-30B, Gemma-2-9B's windowed and soft-capped layers, SmolLM in fp32, rows of two parts."""
    cases = [_case("latents", "bf16", queries, shape, same=True, amd=True)
             for queries, shape in ((2048, DEEPSEEK_V3), (1, DEEPSEEK_V2_LITE))]
    cases.append(_case("wide", "bf16", 2048, GEMMA_4, amd=True))
    for ampere in (False, True):
        cases += [
            _case("long", "bf16", 2048, LLAMA_3_8B, ampere=ampere),
            _case("chunk", "bf16", 64, LLAMA_3_8B, ampere=ampere),
            _case("short", "fp16", 16, OPT_30B, ampere=ampere),
            _case("window-softcap", "bf16", 2048, GEMMA_2_9B, scoring=GEMMA_2_SCORES, ampere=ampere),
            _case("fp32", "fp32", 64, SMOLLM2_135M, ampere=ampere),
            _case("long", "fp16", 2048, OPT_30B, ampere=ampere),
            _case("sinks", "bf16", 2048, GPT_OSS, ampere=ampere, sinks=True),
            *(_case("parts", "bf16", queries, shape, ampere=ampere) for queries, shape in PARTS),
            _case("parts", "fp32", 64, PHI_2, ampere=ampere),
            *(_case("latents", "bf16", queries, shape, ampere=ampere, same=True)
              for queries, shape in ((2048, DEEPSEEK_V3), (1, DEEPSEEK_V2_LITE))),
            _case("wide", "bf16", 2048, GEMMA_4, ampere=ampere),
            _case("expanded", "bf16", 2048, HeadShape(16, 16, 192), ampere=ampere, values=128),
        ]
    return cases
