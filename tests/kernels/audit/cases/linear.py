"""Configurations of `products/linear/gpu.py` that are audited."""

from __future__ import annotations

from dataclasses import replace

from forebay.kernels.gpu_support.arguments import AMD_STAGES
from forebay.kernels.gpu_support.launches import ALIGN
from forebay.kernels.products.linear import selection
from forebay.kernels.products.linear.gpu import FORMS, linear_matrix_kernel, linear_vector_kernel
from forebay.kernels.products.linear.selection import grid_of
from tests.kernels.audit.audit_case import AuditCase

POINTERS = (
    "x_ptr", "weight_ptr", "counter_ptr", "partial_ptr", "out_ptr", "bias_ptr", "multiplier_ptr", "residual_ptr",
)  # fmt: skip
NUMBERS = ("m", "n", "om", "pm", "rm", "k", "xm", "ws")
JOINED = ("qkv", "gate")  # weights of a launch: as many results, or one


def join(joined: str, pointer: str, case: AuditCase) -> AuditCase:
    """The case with columns of several weights in its n (`joined`), which are never added to anything."""
    if not joined:
        return case
    pointers = {"second_ptr": case.signature.get("word_ptr", pointer), "second_bias_ptr": pointer}
    if joined == "qkv":
        pointers |= {"third_ptr": pointers["second_ptr"], "third_bias_ptr": pointer}
        pointers |= dict.fromkeys(("second_out_ptr", "third_out_ptr"), pointer)
    numbers = ("second_n", "third_n", "second_om", "third_om") if joined == "qkv" else ()
    how = {"SEGMENTS": 3 if joined == "qkv" else 1, "GATED": ALIGN if joined == "gate" else 0, "HAS_RESIDUAL": False}
    return replace(
        case, name=f"{case.name}/{joined}", signature={**case.signature, **pointers, **dict.fromkeys(numbers, "i32")},
        constants={**case.constants, **how}, divisible=(*case.divisible, *pointers, *numbers),
        main_operands=case.main_operands if joined == "qkv" else 1)


def case(
    implementation: str, setting: selection.Setting, form: str, m: int, n: int, k: int, in_suite: bool,
    amd: bool = False, joined: str = "",
) -> AuditCase:  # fmt: skip
    """The audit's case of one setting at one shape, bias, SiLU and residual included. `joined` as of `join`."""
    grid = grid_of(implementation, setting, selection.default_splits("linear", setting, m, n, k), m, n, k, amd)
    vector = implementation == "gemv"
    signature = {name: "*bf16" for name in POINTERS} | {"counter_ptr": "*i32", "partial_ptr": "*fp32"}
    minimum = 2 * (n * k + m * k + 2 * m * n + n)
    # Split sums are written and read once; they and the repeated reads of x stay in L2, but are counted here.
    partial = 2 * 4 * m * n * grid.splits if grid.splits > 1 else 0
    return join(joined, pointer="*bf16", case=AuditCase(
        name=f"linear/{implementation}/{form}/m{m}/{setting.name}/s{grid.splits}{'/amd' if amd else ''}",
        fn=linear_vector_kernel if vector else linear_matrix_kernel,
        signature=signature | {name: "i32" for name in NUMBERS},
        constants={
            "KN": form == "kn", "BM": grid.tile_elements // setting.bn, "BN": setting.bn, "BK": setting.bk,
            "SPLITS": grid.splits, "ACTIVATION": "silu", "HAS_BIAS": True, "HAS_MULTIPLIER": False,
            "HAS_RESIDUAL": True, "ACCUMULATE": False,
        } | ({} if vector else {"STAGES": AMD_STAGES if amd else setting.stages}),
        num_warps=setting.warps,
        num_stages=setting.stages,
        divisible=(*POINTERS, *(name for name in NUMBERS if name != "m")),
        uses_dot=not vector,
        main_operands=1 if m <= 16 else 2,
        bytes_moved=minimum + partial,
        minimum_bytes=minimum,
        aim=0.0 if implementation == "large" else 0.75,
        turn_nbytes=2 * setting.bn * setting.bk,
        in_suite=in_suite,
        archs=("gfx942",) if amd else (("sm_80", "sm_90", "gfx942") if vector else ("sm_80", "sm_90")),
    ))  # fmt: skip


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B's down projection, K = 14336, N = 4096: every setting of every implementation, both forms."""
    n, k = 4096, 14336
    cases = []
    for implementation, rows in (("gemv", (1, 2)), ("flat", (8, 16)), ("large", (4096,))):
        settings = selection.SETTINGS["linear", implementation]
        for setting in settings:
            for form in FORMS:
                for amd in (False,) if implementation == "gemv" else (False, True):
                    cases += [case(implementation, setting, form, m, n, k, setting == settings[0], amd) for m in rows]
    cases += [case(implementation, selection.SETTINGS["linear", implementation][0], "nk", m, n, k, m == 1,
                   joined=joined) for implementation, m in (("gemv", 1), ("flat", 8)) for joined in JOINED]
    return cases
