"""rms_norm and layer_norm."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from benchmarks.gpu_cases.case import LIMITS, Aim, Case, Place, Work, checked, normal, repeated
from forebay.kernels.norms.layer_norm import reference as layer
from forebay.kernels.norms.rms_norm import reference as rms


def norm_work(place: Place, op: str, rows: int, columns: int) -> Work:
    from forebay.kernels.norms.layer_norm.gpu import bind_layer_norm
    from forebay.kernels.norms.rms_norm.gpu import bind_rms_norm

    rows, columns = place.size(rows, 3), place.size(columns, 77)
    centred = op == "layer_norm"
    dtype = torch.float16 if centred else torch.bfloat16
    nbytes = rows * columns * 2 * 2
    given = tuple(normal(place, columns, dtype=dtype) for _ in range(1 + centred))  # a weight, and layer_norm's bias
    xs = list(repeated(lambda: normal(place, rows, columns, dtype=dtype), place.copies(nbytes)))
    outs = [torch.empty_like(x) for x in xs]
    bind, reference = (bind_layer_norm, layer.reference) if centred else (bind_rms_norm, rms.reference)
    ours = [bind(x, *given, 1e-5, out) for x, out in zip(xs, outs, strict=True)]
    exact = xs[0] if centred else xs[0].double()
    verify = checked(ours[0], outs[0], lambda: reference(exact, *(part.to(exact.dtype) for part in given), 1e-5))
    torchs = [functools.partial(getattr(functional, op), x, (columns,), *given, eps=1e-5) for x in xs]
    return Work(f"{rows}x{columns}", ours, verify, LIMITS[dtype], nbytes, rivals={"torch": torchs},
                aims=(Aim("bandwidth", 0.75),) if columns % 8 == 0 else ())  # fmt: skip


def cases(tiny: bool) -> list[Case]:
    """Hidden sizes of Llama-3-8B and OPT-30B, 4096 rows; and sizes that fill no tile, held to no aim."""
    return [Case(op, functools.partial(norm_work, op=op, rows=rows, columns=columns)) for op, rows, columns in (
        ("rms_norm", 4096, 4096), ("layer_norm", 4096, 7168), ("rms_norm", 4093, 4099), ("layer_norm", 4093, 7171))]
