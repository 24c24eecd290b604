"""Configurations of `products/linear_q/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.formats.packing import Packing
from forebay.kernels.gpu_support.arguments import AMD_STAGES
from forebay.kernels.products.linear import selection
from forebay.kernels.products.linear.selection import grid_of
from forebay.kernels.products.linear_q.gpu import (
    linear_quantized_matrix_kernel,
    linear_quantized_vector_kernel,
)
from tests.kernels.audit.audit_case import AuditCase
from tests.kernels.audit.cases.linear import JOINED, join

POINTERS = ("x_ptr", "word_ptr", "half_ptr", "counter_ptr", "partial_ptr", "out_ptr", "bias_ptr", "multiplier_ptr",
            "residual_ptr")
NUMBERS = ("m", "n", "om", "pm", "rm", "k", "xm", "row_units", "groups")
DOWN = 4096, 14336  # N and K of Llama-3-8B's down projection, at which all cases stand


def case(
    bits: int, implementation: str, setting: selection.Setting, group: int, m: int, dtype: str = "bf16",
    amd: bool = False, in_suite: bool = False, symmetric: bool = False, joined: str = "",
) -> AuditCase:  # fmt: skip
    """The audit's case of one setting at one shape, bias, SiLU and residual included; scales are of x's dtype. `joined`
    as of `join`."""
    n, k = DOWN
    kind = selection.KIND_OF_BITS[bits]
    setting = selection.for_group(setting, group)
    grid = grid_of(implementation, setting, selection.default_splits(kind, setting, m, n, k), m, n, k)
    vector = implementation == "gemv"
    signature = {name: f"*{dtype}" for name in POINTERS}
    signature |= {"word_ptr": "*u32", "counter_ptr": "*i32", "partial_ptr": "*fp32"}
    rows = f"{group}s" if symmetric else str(group)
    minimum = n * Packing(bits, k, group, symmetric=symmetric).row_nbytes + 2 * (m * k + 2 * m * n + n)
    partial = 2 * 4 * m * n * grid.splits if grid.splits > 1 else 0
    return join(joined, pointer=f"*{dtype}", case=AuditCase(
        name=f"{kind}/{implementation}/g{rows}/{dtype}/m{m}/{setting.name}/s{grid.splits}{'/amd' if amd else ''}",
        fn=linear_quantized_vector_kernel if vector else linear_quantized_matrix_kernel,
        signature=signature | {name: "i32" for name in NUMBERS},
        constants={
            "BITS": bits, "GROUP": group, "BM": grid.tile_elements // setting.bn, "BN": setting.bn, "BK": setting.bk,
            "SPLITS": grid.splits, "ACTIVATION": "silu", "HAS_BIAS": True, "HAS_MULTIPLIER": False,
            "HAS_RESIDUAL": True, "ACCUMULATE": False, "SYMMETRIC": symmetric,
        } | ({} if vector else {
            "STAGES": AMD_STAGES if amd else setting.stages, "PTX": not amd, "WHOLE": not amd and k % setting.bk == 0,
        }),
        num_warps=setting.warps,
        num_stages=setting.stages,
        divisible=(*POINTERS, *(name for name in NUMBERS if name not in ("m", "row_units"))),
        uses_dot=not vector,
        main_operands=1 if m <= 16 else 2,
        bytes_moved=minimum + partial,
        minimum_bytes=minimum,
        aim=0.75 if implementation == "flat" else 0.0,  # tables take gemv where it was measured faster
        turn_nbytes=setting.bn * (setting.bk * bits // 8 + (2 if symmetric else 4) * (setting.bk // group)),
        in_suite=in_suite,
        archs=("gfx942",) if amd else (("sm_80", "sm_90", "gfx942") if vector else ("sm_80", "sm_90")),
    ))  # fmt: skip


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B's down projection, K = 14336, N = 4096: every setting, group size and dtype of x."""
    joined = [case(bits, implementation, selection.SETTINGS[selection.KIND_OF_BITS[bits], implementation][0], 128, m,
                   in_suite=bits == 4, joined=how)
              for bits, implementation, m in ((4, "flat", 1), (8, "gemv", 1), (8, "flat", 8)) for how in JOINED]
    return joined + [
        case for bits, groups in ((4, (64, 32, 128)), (8, (128,))) for case in _cases_of(bits, groups)]


def _cases_of(bits: int, groups: tuple[int, ...]) -> list[AuditCase]:
    cases = []
    for group in groups:
        for implementation, rows in (("gemv", (1, 2)), ("flat", (8, 16)), ("large", (4096,))):
            settings = selection.SETTINGS[selection.KIND_OF_BITS[bits], implementation]
            for setting in settings:
                for m in rows:
                    typical = setting == settings[0] and group == groups[0]
                    cases.append(case(bits, implementation, setting, group, m, in_suite=typical))
                    if group == 32 and setting == settings[0]:
                        cases.append(case(bits, implementation, setting, group, m, symmetric=True))
                    if implementation != "gemv" and group == groups[0]:
                        cases.append(case(bits, implementation, setting, group, m, "fp16"))
                        amd_usual = typical and m == rows[0]
                        cases.append(case(bits, implementation, setting, group, m, amd=True, in_suite=amd_usual))
    return cases
