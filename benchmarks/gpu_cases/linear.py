"""linear, and linear_q of 4 and 8 bits, fp8 and NF4, few rows: every candidate of `selection`, and cuBLAS in bf16."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_cases.case import LIMITS, Aim, Call, Case, Place, Work, normal, relative_error, repeated
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.formats.codebooks import split_scales
from forebay.kernels.formats.packing import Packing
from forebay.kernels.products.linear import reference as plain
from forebay.kernels.products.linear import selection
from forebay.kernels.products.linear_q import reference as packed
from forebay.runtime.devices.cuda.kind import CUDA

GROUP = 128
BITS = {kind: bits for bits, kind in selection.KIND_OF_BITS.items()}
CODED = {"linear_fp8": ("e4m3", 8, GROUP), "linear_nf4": ("nf4", 4, 64)}  # over codes as they are, or dequantized
DTYPE = torch.bfloat16
# (N, K) of Llama-3-8B: down, gate or up, fused QKV, output; and of OPT-30B: up, down, QKV or output.
SHAPES = ((4096, 14336), (14336, 4096), (6144, 4096), (4096, 4096), (28672, 7168), (7168, 28672), (7168, 7168))
ROWS = (1, 16, 2, 8, 4, 64, 128, 512, 2048)  # the last two: prefill
# (M, N, K) that fill no tile: rows, columns and depth end within one. Checked on every candidate, held to no aim.
TAILS = ((1, 4099, 4104), (13, 4099, 4104), (5, 999, 14344), (61, 4099, 4104))


def packed_rows(place: Place, n: int, stored: Packing) -> Tensor:
    """A weight of random codes, about normal with variance 1 / K once dequantized."""
    bits, k = stored.bits, stored.in_features
    generator = torch.Generator(place.device).manual_seed(n + k)
    groups = row_sizes.group_count(k, stored.group_size)
    nbytes = row_sizes.codes_nbytes(k, bits, stored.group_size)
    codes = torch.randint(0, 256, (n, nbytes), dtype=torch.uint8, device=place.device, generator=generator)
    scale = torch.rand(n, groups, device=place.device, generator=generator) * (2**-bits * 8 / k**0.5)
    if stored.codebook:  # fp8: of numbers below 2, without the codes that are none
        return packing.pack_rows(codes & 0xBF if bits == 8 else codes, *split_scales(scale * 2**bits / 8))
    low = None if stored.symmetric else (scale * -(2 ** (bits - 1))).to(DTYPE)
    return packing.pack_rows(codes, scale.to(DTYPE), low)


def _calls(stored: Packing | None, x: Tensor, weights: list[Tensor], impl: str, out: Tensor) -> list[Call]:
    if impl == selection.ATEN and stored is None:  # as a plan's launch is bound
        from forebay.kernels.operator import Tensors
        from forebay.kernels.products.linear.operator import LINEAR

        how = {"form": "nk", "accumulate": False}
        return [LINEAR.bind[CUDA.name](Tensors((x, w, None), how, (out,), impl)) for w in weights]
    if stored is None:
        from forebay.kernels.products.linear.gpu import linear

        return [functools.partial(linear, x, w, out=out, impl=impl) for w in weights]
    from forebay.kernels.products.linear_q.gpu import linear_q

    return [functools.partial(linear_q, x, w, None, stored, out=out, impl=impl) for w in weights]


def linear_work(place: Place, kind: str, m: int, n: int, k: int, symmetric: bool = False) -> Work:
    n, k = place.size(n, 72), place.size(k, 272)
    x, out = normal(place, m, k, dtype=DTYPE), torch.empty(m, n, dtype=DTYPE, device=place.device)
    codebook, bits, group = CODED.get(kind, ("", BITS.get(kind, 8), GROUP))
    stored = None if kind == "linear" else Packing(bits, k, group, DTYPE, symmetric, codebook)
    if stored is None:
        weight_nbytes = 2 * n * k
        make = functools.partial(normal, place, n, k, dtype=DTYPE, scale=k**-0.5)
    else:
        weight_nbytes = n * stored.row_nbytes
        make = functools.partial(packed_rows, place, n, stored)
    nbytes = weight_nbytes + 2 * m * (n + k)
    weights = list(repeated(make, place.copies(weight_nbytes)))
    processors = torch.cuda.get_device_properties(place.device).multi_processor_count if not place.tiny else 4
    names = (selection.ATEN, selection.RAW) if codebook else \
        selection.candidates(kind, m, n, k, processors)[:: place.size(1, 4)]
    candidates = {name: _calls(stored, x, weights, name, out) for name in names}
    ours = _calls(stored, x, weights, "", out)

    def verify() -> float:
        want = plain.reference(x, weights[0]) if stored is None else packed.reference(x, weights[0], None, stored)
        errors = []
        for calls in (ours, *candidates.values()):
            out.fill_(torch.nan)
            calls[0]()
            errors.append(relative_error(out, want))
        return max(errors)

    dense = weights if kind == "linear" else list(
        repeated(functools.partial(normal, place, n, k, dtype=DTYPE, scale=k**-0.5), place.copies(2 * n * k))
    )
    rivals = {"cuBLAS bf16": [functools.partial(functional.linear, x, w) for w in dense]}
    aims = (Aim("cuBLAS bf16", 1.0),) if kind == "linear" else (Aim("bandwidth", 0.75), Aim("cuBLAS bf16", 3.0))
    rows = ", symmetric" if symmetric else ""
    return Work(f"M={m} N={n} K={k}{rows}", ours, verify, LIMITS[DTYPE], nbytes, 2 * m * n * k, rivals,
                aims if m <= 16 and BITS.get(kind) != 8 and codebook != "nf4" and (n, k) in SHAPES else (), candidates,
                (kind, m, n, k) if (n, k) in SHAPES and not codebook else None)  # fmt: skip


def cases(tiny: bool) -> list[Case]:
    """4-bit weights first, at the fewest and the most rows that have an aim; what comes last may be left out."""
    sizes = [(m, n, k) for m in (ROWS[:2] if tiny else ROWS) for n, k in (SHAPES[:1] if tiny else SHAPES)]
    first = len(SHAPES) * 2  # one and 16 rows, then tails: what breaks there is no matter of speed
    return [
        Case(kind, functools.partial(linear_work, kind=kind, m=m, n=n, k=k))
        for m, n, k in (sizes if tiny else (*sizes[:first], *TAILS, *sizes[first:]))
        for kind in (selection.KIND_OF_BITS[4], "linear", selection.KIND_OF_BITS[8], *(CODED if m <= 128 else ()))
    ] + [
        Case(kind, functools.partial(linear_work, kind=kind, m=m, n=n, k=k, symmetric=True))
        for m, n, k in TAILS for kind in BITS
    ]
