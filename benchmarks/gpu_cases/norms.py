"""rms_norm and layer_norm."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from benchmarks.gpu_cases.case import LIMITS, Aim, Case, Place, Work, checked, normal, repeated
from forebay.kernels.norms.layer_norm import reference as layer
from forebay.kernels.norms.rms_norm import reference as rms


def rms_work(place: Place, rows: int, columns: int) -> Work:
    from forebay.kernels.norms.rms_norm.gpu import rms_norm

    rows, columns = place.size(rows, 3), place.size(columns, 77)
    nbytes = rows * columns * 2 * 2
    weight = normal(place, columns)
    xs = list(repeated(lambda: normal(place, rows, columns), place.copies(nbytes)))
    outs = [torch.empty_like(x) for x in xs]
    ours = [functools.partial(rms_norm, x, weight, 1e-5, out) for x, out in zip(xs, outs, strict=True)]
    verify = checked(ours[0], outs[0], lambda: rms.reference(xs[0].double(), weight.double(), 1e-5))
    torchs = [functools.partial(functional.rms_norm, x, (columns,), weight, 1e-5) for x in xs]
    return Work(f"{rows}x{columns}", ours, verify, LIMITS[torch.bfloat16], nbytes, rivals={"torch": torchs},
                aims=(Aim("bandwidth", 0.75),) if columns % 8 == 0 else ())  # fmt: skip


def layer_work(place: Place, rows: int, columns: int) -> Work:
    from forebay.kernels.norms.layer_norm.gpu import layer_norm

    rows, columns, dtype = place.size(rows, 3), place.size(columns, 77), torch.float16
    nbytes = rows * columns * 2 * 2
    weight, bias = normal(place, columns, dtype=dtype), normal(place, columns, dtype=dtype)
    xs = list(repeated(lambda: normal(place, rows, columns, dtype=dtype), place.copies(nbytes)))
    outs = [torch.empty_like(x) for x in xs]
    ours = [functools.partial(layer_norm, x, weight, bias, 1e-5, out) for x, out in zip(xs, outs, strict=True)]
    verify = checked(ours[0], outs[0], lambda: layer.reference(xs[0], weight, bias, 1e-5))
    torchs = [functools.partial(functional.layer_norm, x, (columns,), weight, bias) for x in xs]
    return Work(f"{rows}x{columns}", ours, verify, LIMITS[dtype], nbytes, rivals={"torch": torchs},
                aims=(Aim("bandwidth", 0.75),) if columns % 8 == 0 else ())  # fmt: skip


def cases(tiny: bool) -> list[Case]:
    """Hidden sizes of Llama-3-8B and OPT-30B, 4096 rows; and sizes that fill no tile, held to no aim."""
    return [
        Case("rms_norm", functools.partial(rms_work, rows=4096, columns=4096)),
        Case("layer_norm", functools.partial(layer_work, rows=4096, columns=7168)),
        Case("rms_norm", functools.partial(rms_work, rows=4093, columns=4099)),
        Case("layer_norm", functools.partial(layer_work, rows=4093, columns=7171)),
    ]
