"""Configurations of `products/experts/gpu.py` that are audited."""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.products.experts.gpu import (
    SORTED,
    SUMMED,
    _stored_as,
    down_kernel,
    sort_kernel,
    sum_kernel,
    tile,
    up_kernel,
)
from forebay.kernels.products.experts.reference import Form, Stored
from tests.kernels.audit.audit_case import AuditCase


def _case(
    name: str, fn: Any, signature: dict[str, str], constants: dict[str, Any], nbytes: int, **how: Any
) -> AuditCase:
    multiples = "hidden", "inner", "xs", "row", "entry_stride", "os"
    divisible = tuple(n for n, kind in signature.items() if kind.startswith("*") or n in multiples)
    return AuditCase(name=f"experts/{name}", fn=fn, signature=signature, constants=constants,
                     divisible=divisible, load_nbytes=4, bytes_moved=nbytes, minimum_bytes=nbytes, **how)  # fmt: skip


def audit_cases() -> list[AuditCase]:
    """A decode step of Qwen3-30B-A3B, in bf16 and 4 bits, and one of gpt-oss; steps of many rows an expert."""
    hidden, inner, count, picks = 2048, 768, 128, 8
    whose = {"index_ptr": "*i64", "entries_ptr": "*i64"}, dict.fromkeys(("experts", "first", "entries"), "i32")
    cases = [_case("sort", sort_kernel, whose[0] | {"order_ptr": "*i32", "ends_ptr": "*i32", "picks": "i32"} | whose[1],
                   {"HAS_ENTRIES": True, "B": SORTED}, 12 * picks + 4 * count)]
    few = tile(torch.bfloat16, 1)
    many = {f"rows-{each}": tile(torch.bfloat16, 4096, each) for each in (64, 65)}
    for name, stored, form, chosen in (
        ("bf16", Stored(), Form(), few), ("w4g32", Stored(4, 32), Form(), few),
        ("w8g32s", Stored(8, 32, symmetric=True), Form(), few),
        ("mxfp4", Stored(4, 32, torch.bfloat16, True, "e2m1"), Form(), few),
        ("gpt-oss", Stored(), Form("alpha_swiglu", True, True, True, True, alpha=1.702, limit=7.0), few),
        *((f"{kind}/{rows}", stored, Form(), chosen) for rows, chosen in many.items()
          for kind, stored in (("bf16", Stored()), ("w4g32", Stored(4, 32)))),
    ):  # fmt: skip
        warps, chosen = chosen["num_warps"], {name: n for name, n in chosen.items() if name != "num_warps"}
        shared = {**chosen, "TRANSPOSED": form.transposed, "SCALED": False, "HAS_BIAS": form.interleaved}
        rows = {"x_ptr": "*bf16", "order_ptr": "*i32", "ends_ptr": "*i32", "share_ptr": "*bf16",
                "w_ptr": "*u8" if stored.bits else "*bf16", "bias_ptr": "*bf16"}
        numbers = dict.fromkeys(("hidden", "inner"), "i32")
        ends = dict.fromkeys(("row", "entry_stride", "bias_stride"), "i32")
        size = stored.packing(hidden).row_nbytes if stored.bits else 2 * hidden
        cases.append(_case(
            f"up/{name}", up_kernel,
            rows | {"out_ptr": "*bf16", "picks": "i32"} | numbers | {"xs": "i32"} | ends
            | {"alpha": "fp32", "limit": "fp32"},
            shared | {"ACTIVATION": form.activation, "GATED": True, "INTERLEAVED": form.interleaved,
                      "LIMITED": form.limit > 0} | _stored_as(stored, hidden),
            picks * 2 * inner * size, uses_dot=True, num_warps=warps))  # fmt: skip
        size = stored.packing(inner).row_nbytes if stored.bits else 2 * inner
        cases.append(_case(f"down/{name}", down_kernel, rows | {"out_ptr": "*fp32"} | numbers | ends,
                           shared | _stored_as(stored, inner), picks * hidden * size, uses_dot=True,
                           num_warps=warps))  # fmt: skip
    numbers = dict.fromkeys(("picks", "hidden", "os"), "i32")
    cases.append(_case("sum", sum_kernel, {"part_ptr": "*fp32"} | whose[0] | {"out_ptr": "*bf16"} | numbers | whose[1],
                       {"HAS_ENTRIES": True, "ACCUMULATE": False, "B": SUMMED}, picks * hidden * 4))
    return cases
