"""Configurations of `products/linear_q/gpu_raw.py` that are audited."""

from __future__ import annotations

from forebay.kernels.formats.codebooks import CODEBOOKS
from forebay.kernels.formats.packing import Packing
from forebay.kernels.gpu_support.arguments import AMD_STAGES
from forebay.kernels.products.linear import raw_layout, selection
from forebay.kernels.products.linear_q.gpu_raw import linear_raw_kernel, raw_order_kernel
from tests.kernels.audit.audit_case import AuditCase
from tests.kernels.audit.cases.linear import JOINED, join
from tests.kernels.audit.cases.linear_q import DOWN

POINTERS = ("ordered_ptr", "sum_ptr", "word_ptr", "half_ptr", "counter_ptr", "partial_ptr", "out_ptr", "bias_ptr",
            "multiplier_ptr", "residual_ptr")
NUMBERS = ("m", "n", "om", "pm", "rm", "row_units", "groups", "width", "padded")


def _order_case(bits: int, dtype: str) -> AuditCase:
    layout = raw_layout.of(16, DOWN[1], 128)
    return AuditCase(
        name=f"{selection.KIND_OF_BITS[bits]}/raw_order/g128/{dtype}/m16",
        fn=raw_order_kernel,
        signature={"x_ptr": f"*{dtype}", "ordered_ptr": "*fp16", "sum_ptr": "*fp32"} | dict.fromkeys(
            ("m", "k", "xm", "width", "padded"), "i32"),
        constants={"BITS": bits, "GROUP": 128, "BM": layout.tile_rows, "SCALED": dtype == "bf16", "SYMMETRIC": False},
        num_warps=1, num_stages=1, divisible=("x_ptr", "ordered_ptr", "sum_ptr", "k", "xm", "width", "padded"),
        main_operands=0, bytes_moved=2 * 16 * DOWN[1] + layout.nbytes, minimum_bytes=2 * 16 * DOWN[1] + layout.nbytes,
        in_suite=bits == 4 and dtype == "bf16",
    )


def case(
    bits: int, setting: selection.Setting, group: int, m: int, dtype: str = "bf16", amd: bool = False,
    in_suite: bool = False, symmetric: bool = False, codebook: str = "",
) -> AuditCase:  # fmt: skip
    """The audit's case of one setting at one shape, bias, SiLU and residual included; scales are of x's dtype."""
    n, k = DOWN
    kind, layout = selection.KIND_OF_BITS[bits], raw_layout.of(m, k, group)
    splits = selection.default_splits(kind, setting, m, n, k) if m <= 16 else 1
    grid = selection.grid_of("raw", setting, splits, m, n, k, group_size=group)
    minimum = n * Packing(bits, k, group, symmetric=symmetric).row_nbytes + 2 * (m * k + 2 * m * n + n)
    partial = 2 * 4 * m * n * grid.splits if grid.splits > 1 else 0
    signature = {name: f"*{dtype}" for name in POINTERS}
    signature |= {"ordered_ptr": "*fp16", "sum_ptr": "*fp32", "word_ptr": "*u32", "counter_ptr": "*i32",
                  "partial_ptr": "*fp32"}
    rows = f"{group}s" if symmetric else str(group)
    return AuditCase(
        name=f"{kind}/raw/{codebook}g{rows}/{dtype}/m{m}/{setting.name}/s{grid.splits}{'/amd' if amd else ''}",
        fn=linear_raw_kernel,
        signature=signature | {name: "i32" for name in NUMBERS},
        constants={
            "BITS": bits, "GROUP": group, "BM": layout.tile_rows, "BN": setting.bn, "SPLITS": grid.splits,
            "ACTIVATION": "silu", "HAS_BIAS": True, "HAS_MULTIPLIER": False, "HAS_RESIDUAL": True, "ACCUMULATE": False,
            "SYMMETRIC": symmetric, "CODEBOOK": CODEBOOKS.index(codebook), "SCALED": dtype == "bf16",
            "STAGES": AMD_STAGES if amd else setting.stages,
            "PTX": not amd, "WHOLE": True,
        },
        num_warps=setting.warps,
        num_stages=setting.stages,
        divisible=(*POINTERS, *(name for name in NUMBERS if name not in ("m", "row_units"))),
        uses_dot=True,
        main_operands=2,
        bytes_moved=minimum + partial,
        minimum_bytes=minimum,
        aim=0.75 if m <= 8 and group == 128 else 0.0,
        turn_nbytes=setting.bn * (raw_layout.TURN * bits // 8 + (2 if symmetric else 4) * (raw_layout.TURN // group)),
        in_suite=in_suite,
        archs=("gfx942",) if amd else ("sm_80", "sm_90"),
    )  # fmt: skip


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B's down projection at 8 to 64 rows: every setting, by groups and dtypes of x."""
    cases = [_order_case(bits, dtype) for bits in (4, 8) for dtype in ("bf16", "fp16")]
    cases += [join(how, "*bf16", case(bits, selection.SETTINGS[selection.KIND_OF_BITS[bits], "raw"][0], 128, 8))
              for bits in (4, 8) for how in JOINED]
    for bits in (4, 8):
        for setting in selection.SETTINGS[selection.KIND_OF_BITS[bits], "raw"]:
            first = setting == selection.SETTINGS[selection.KIND_OF_BITS[bits], "raw"][0]
            cases += [case(bits, setting, 128, m, in_suite=first and m == 8) for m in (8, 16, 64)]
            cases += [case(bits, setting, 128, 8, "fp16"), case(bits, setting, 64, 8)]
            if first:
                cases += [case(bits, setting, 32, 8), case(bits, setting, 128, 8, symmetric=True),
                          case(bits, setting, 128, 16, amd=True)]
    cases += [case(8, selection.SETTINGS["linear_w8", "raw"][0], 128, m, codebook="e4m3", in_suite=m == 8)
              for m in (8, 16, 64)]
    fours = selection.SETTINGS["linear_w4", "raw"][0]
    cases += [case(4, fours, 32, m, symmetric=True, codebook="e2m1") for m in (8, 16)]
    cases += [case(4, fours, 64, m, codebook="nf4", in_suite=m == 8) for m in (8, 16, 64)]
    cases.append(case(4, fours, 16, 8, codebook="e2m1"))
    cases += [case(4, fours, 32, m, symmetric=True, codebook="iq3") for m in (8, 16)]
    return [*cases, case(8, selection.SETTINGS["linear_w8", "raw"][0], 128, 16, amd=True, codebook="e4m3")]
