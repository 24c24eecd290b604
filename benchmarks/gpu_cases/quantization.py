"""quantize and dequantize, group-wise, and dequantize_rows."""

from __future__ import annotations

import functools

import torch

from benchmarks.gpu_cases.case import LIMITS, Aim, Case, Place, Work, checked, normal, repeated
from forebay.kernels.formats import packing
from forebay.kernels.operator import Tensors, nbytes_of
from forebay.kernels.quantization.dequantize_rows import reference as rows_op
from forebay.kernels.quantization.quantize import reference as op
from forebay.kernels.quantization.quantize.operator import QUANTIZE

DTYPE = torch.bfloat16
GROUP = 64


def groups_work(place: Place, bits: int, dim: int, back: bool) -> Work:
    """A matrix to codes, scales and lows, or `back`; the bytes of both are moved, in either direction."""
    from forebay.kernels.quantization.quantize.gpu import dequantize, quantize

    rows, columns = place.size(4096, 5), place.size(4096, 5)
    x = normal(place, rows, columns, dtype=DTYPE)
    cost = QUANTIZE.cost(Tensors((x,), {}, QUANTIZE.overload(x, bits, GROUP, dim, DTYPE)))
    nbytes = cost.read_nbytes + cost.written_nbytes
    parts = op.reference(x, bits, GROUP, dim, DTYPE)
    given = list(repeated(lambda: parts[0] if back else x, place.copies(nbytes)))
    ours = [functools.partial(dequantize, one, *parts[1:], bits, GROUP, dim, x.shape[dim], DTYPE) if back
            else functools.partial(quantize, one, bits, GROUP, dim, DTYPE) for one in given]

    def verify() -> float:
        if not back:
            return max(float((a != b).double().mean()) for a, b in zip(ours[0](), parts, strict=True))
        want = op.dequantize_reference(*parts, bits, GROUP, dim, x.shape[dim], torch.float32)
        out = ours[0]()
        return checked(lambda: out.copy_(ours[0]()), out, lambda: want)()

    return Work(f"{rows}x{columns} along {dim}, {bits} bits", ours, verify, LIMITS[DTYPE] if back else 0.0, nbytes,
                aims=(Aim("bandwidth", 0.6),))  # fmt: skip


def dequantize_rows_work(place: Place, bits: int, transposed: bool) -> Work:
    from forebay.kernels.quantization.dequantize_rows.gpu import bind_dequantize_rows

    n, k = place.size(4096, 5), place.size(14336, 139)
    rows = packing.pack_rows(*op.reference(normal(place, n, k, dtype=DTYPE), bits, GROUP, -1, DTYPE))
    out = torch.empty((k, n) if transposed else (n, k), dtype=DTYPE, device=place.device)
    nbytes = nbytes_of(rows, out)
    given = k, bits, GROUP, DTYPE, DTYPE, transposed
    packed = list(repeated(lambda: rows, place.copies(nbytes)))
    ours = [bind_dequantize_rows(one, *given, out=out) for one in packed]
    verify = checked(ours[0], out, lambda: rows_op.reference(rows, *given))
    return Work(f"{n}x{k}, {bits} bits{', transposed' if transposed else ''}", ours, verify, LIMITS[DTYPE], nbytes,
                aims=() if transposed else (Aim("bandwidth", 0.6),))  # fmt: skip


def cases(tiny: bool) -> list[Case]:
    """Both directions, widths and dimensions of a 4096 x 4096 matrix; packed rows of Llama-3-8B's down projection."""
    groups = [Case(name, functools.partial(groups_work, bits=bits, dim=dim, back=name == "dequantize"))
              for name in ("quantize", "dequantize") for bits in (4, 8) for dim in (-1, 0)]
    return groups + [Case("dequantize_rows", functools.partial(dequantize_rows_work, bits=b, transposed=t))
                     for b in (4, 8) for t in (False, True)]
