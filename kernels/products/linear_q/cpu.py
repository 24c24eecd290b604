"""`forebay::linear_q` on the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.cpu_support.matrices import as_matrix
from forebay.kernels.formats import packing
from forebay.kernels.formats.codebooks import CODEBOOKS, IN_BYTES
from forebay.kernels.formats.packing import Packing
from forebay.kernels.products.linear.cpu import SCRATCH_NBYTES, median_s
from forebay.kernels.products.linear.reference import ACTIVATIONS, PLAIN, After, finish_
from forebay.kernels.products.linear_q.reference import check, fail
from forebay.kernels.quantization.quantize.reference import dequantize_reference


class QuantizedLinearArgs(ctypes.Structure):
    """Mirror of `QuantizedLinearArgs` in linear_q.cpp; rows_stride in bytes, the other strides in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "rows", "bias", "multiplier", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "x_stride", "rows_stride")),
        *((name, ctypes.c_int64) for name in ("multiplier_stride", "residual_stride", "out_stride", "group")),
        *((name, ctypes.c_int32) for name in ("bits", "scale_dtype", "x_dtype", "bias_dtype", "out_dtype")),
        *((name, ctypes.c_int32) for name in ("activation", "integer_nbytes", "bf16_panels", "symmetric", "codebook")),
    )


NAMES = ("int16", "bf16", "int8", "flat", "upcast")
# fp32 numbers that the torch code holds for each element of a weight being unpacked, and of a result being finished.
UNPACKED_FLOATS, RESULT_FLOATS = 6, 4
CODED_ROWS = 4  # rows of x that meet codes of a codebook in registers, as floats
CODED_INTEGER_ROWS = 5  # the same as integers; more are floats with int16, too
FEW_ROWS = 6  # rows of x up to which bf16 is int16
INTEGER_NBYTES = {"int16": 2, "bf16": 2, "int8": 1, "flat": 0}
# What the library answers where it has the kernels for AVX-512 and VNNI, for bf16 instructions too; 1 for AVX2 or ARM.
VNNI, BF16 = 2, 3
# Rows of x that the C++ kernels hold at a time: weights are expanded once for each block, so more where they are short
# enough to stay in L2 as integers.
M_BLOCK, M_BLOCK_CACHED, CACHED_NBYTES = 64, 256, 1 << 19
MANY_ROWS = 32  # from so many on, with scales of their own for fewer than 64 elements, weights are expanded once


def _check_out(x: Tensor, rows: Tensor, out: Tensor, after: After) -> tuple[Tensor, After]:
    """out and the operands that have its shape, as matrices."""
    shape = (*x.shape[:-1], rows.shape[0])
    if out.shape != shape or out.dtype not in native.DTYPES:
        fail("out", f"must be {shape} of fp32, bf16 or fp16, got {tuple(out.shape)} {out.dtype}")
    if out.device.type != "cpu":
        fail("out", f"must be on the CPU, got {out.device}")
    made: list[Tensor | None] = []
    for tensor, argument in ((after.multiplier, "multiplier"), (after.residual, "residual")):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != out.dtype):
            fail(argument, f"must be {shape} of {out.dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        made.append(None if tensor is None else as_matrix(tensor, argument, fail))
    return as_matrix(out, "out", fail), After(after.activation, *made)


def scratch_nbytes(
    impl: str, dtype: torch.dtype, m: int, n: int, k: int, group_size: int, codebook: str = ""
) -> int:
    """Upper bound, in bytes, of the scratch that a call holds for x [m, k] of dtype and n outputs."""
    if impl == "upcast":
        rows, columns = (min(of, step) for of, step in zip((m, n), _upcast_steps(m, k), strict=True))
        unpacked = 4 * UNPACKED_FLOATS * columns * packing.group_count(k, group_size) * group_size
        held = 4 * rows * k + unpacked + 4 * RESULT_FLOATS * rows * columns
        return min(SCRATCH_NBYTES, held) + 64 * max(1, k) + 8 * m
    return 4 * _scratch_floats(impl, dtype, m, k, group_size, codebook)


def _scratch_floats(impl: str, dtype: torch.dtype, m: int, k: int, group_size: int, codebook: str) -> int:
    if codebook and impl != "flat":
        return max(_scratch_floats(impl, dtype, m, k, group_size, ""), _scratch_floats(
            "flat", dtype, m, k, group_size, codebook)) + group_size
    if impl == "flat":
        arranged = CODED_ROWS * packing.group_count(k, group_size) * group_size if codebook else 0
        per_row, rest = 0 if dtype == torch.float32 else k, arranged
    else:
        groups = packing.group_count(k, group_size)
        lines = -(-groups * group_size // 64) * INTEGER_NBYTES[impl]
        per_row, rest = 2 * (-(-groups // 16) * 16) + 16 * (lines | 1), k
    most = max(M_BLOCK, min(M_BLOCK_CACHED, CACHED_NBYTES // (4 * max(1, per_row))))
    return max(min(max(1, min(m, most)) * per_row + rest, SCRATCH_NBYTES // 4), per_row + rest)


def _upcast_steps(m: int, k: int) -> tuple[int, int]:
    """Rows of x, and of the weight, that `_upcast` takes at a time: a quarter of the scratch for rows of x and for
    their results, a half for a tile of weight being unpacked."""
    m_step = max(1, SCRATCH_NBYTES // 16 // max(1, k))
    n_step = max(1, min(SCRATCH_NBYTES // 8 // UNPACKED_FLOATS // max(1, k),
                        SCRATCH_NBYTES // 16 // max(1, min(m, m_step))))
    return m_step, n_step


def _upcast(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    out: Tensor,
    stored: Packing,
    after: After,
) -> None:
    bits, k, group_size, *_ = stored
    m, n = x.shape[0], rows.shape[0]
    m_step, n_step = _upcast_steps(m, k)
    for m0 in range(0, m, m_step):
        x32 = x[m0 : m0 + m_step].float()
        for n0 in range(0, n, n_step):
            columns = slice(n0, min(n, n0 + n_step))
            if k:
                parts = stored.unpack(rows[columns])
                y = x32 @ dequantize_reference(*parts, bits, group_size, 1, k, codebook=stored.codebook).t()
            else:
                y = x32.new_zeros(x32.shape[0], columns.stop - n0)
            if bias is not None:
                y.add_(bias[columns])
            piece = slice(m0, m0 + m_step)
            out[piece, columns].copy_(finish_(y.to(out.dtype), after.part(piece, columns)))


def bind_linear_q(
    impl: str,
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    out: Tensor,
    stored: Packing,
    after: After = PLAIN,
) -> Callable[[], None]:
    """A closure that computes out from the tensors' contents at each call; shapes and pointers are settled here.

    x [..., K], rows uint8 [N, R] (any rows of a larger matrix, at any address), bias [N] or None, out [..., N] and what
    `after` holds like it; only last dimensions must be contiguous. out may be the memory of multiplier or residual,
    element on element. The closure keeps the tensors alive. A call costs about 1 µs over the kernel.
    """
    check(x, rows, bias, stored, after)
    bits, in_features, group_size, scale_dtype, symmetric, codebook = stored
    if x.device.type != "cpu":
        fail("x", f"must be on the CPU, got {x.device}")
    out2, after = _check_out(x, rows, out, after)
    x2 = as_matrix(x, "x", fail)
    if impl not in NAMES or (impl == "int8" and not takes_int8(bits, group_size)):
        names = tuple(name for name in implementations(bits, codebook)
                      if name != "int8" or takes_int8(bits, group_size))
        fail("impl", f"must be one of {names} for groups of {group_size}, got {impl!r}")
    if impl == "upcast" or 0 in (*out2.shape, in_features):
        return functools.partial(_upcast, x2, rows, bias, out2, stored, after)
    if impl not in implementations(bits, codebook):
        names = implementations(bits, codebook)
        fail("impl", f"{impl!r} needs a C++ compiler and, but for 'flat', AVX2 or ARM; use one of {names}")
    _, multiplier, residual = after
    given = (x2, rows, bias, multiplier, residual, out2)
    args = QuantizedLinearArgs(
        *(None if t is None else t.data_ptr() for t in given), *out2.shape, in_features, x2.stride(0), rows.stride(0),
        *(0 if t is None else t.stride(0) for t in (multiplier, residual)), out2.stride(0), group_size,
        bits, native.DTYPES[scale_dtype], native.DTYPES[x.dtype], native.DTYPES[(x if bias is None else bias).dtype],
        native.DTYPES[out.dtype], ACTIVATIONS.index(after.activation), INTEGER_NBYTES[impl],
        impl == "bf16" and x.dtype != torch.float16, symmetric, CODEBOOKS.index(codebook),
    )  # fmt: skip
    floats = _scratch_floats(impl, x.dtype, x2.shape[0], in_features, group_size, codebook)
    return native.NativeCall("linear_q", args, given, floats)


def takes_int8(bits: int, group_size: int) -> bool:
    """Return whether int8 takes rows in such groups: not of 16, and codes of 8 bits in groups of a power of two
    alone."""
    return group_size != 16 and (bits == 4 or group_size & (group_size - 1) == 0)


def implementations(bits: int, codebook: str = "") -> tuple[str, ...]:
    """Names that work here for codes of `bits`; the first use compiles the C++ kernels. Few rows of x meet numbers of
    some codebooks as integers."""
    library = native.load()
    if library is None:
        return ("upcast",)
    if codebook:
        needed = 3 if codebook == "e4m3" else 1 if codebook in IN_BYTES else 2
        return ("int16", "flat", "upcast") if library.forebay_integer_codebooks() >= needed else ("flat", "upcast")
    integer = library.forebay_integer_dot()
    names = ("int16",) if integer else ()
    if integer >= VNNI or (integer and bits == 4):
        names = (*names, "int8")
    if integer >= BF16:
        names = (*names, "bf16")
    return (*names, "flat", "upcast")


def default_choice(bits: int, m: int, group_size: int, codebook: str = "") -> str:
    """The implementation for m rows of x where no machine profile says better: never one that costs accuracy.

    int16 for few rows where there is AVX2, flat for many: on one core of Zen 3 int16 makes 60 to 70 GFLOP/s in groups
    of 32 and 80 to 90 in groups of 64, whatever the rows; flat 75 with 32 rows, 83 with 64 and 90 with 256. With VNNI
    int16 for any: on one core of Zen 4 150 to 190 GFLOP/s at 64 rows, flat 70. On ARM, where nothing was timed, as with
    AVX2. Many rows of x meet a codebook as floats. Without a compiler upcast.
    """
    names = implementations(bits, codebook)
    if codebook and m > CODED_INTEGER_ROWS:
        return names[-2:][0]
    library = native.load()
    many = m >= (MANY_ROWS if group_size < 64 else 2 * MANY_ROWS)
    slower = library is not None and library.forebay_integer_dot() < VNNI
    return "flat" if many and slower and "flat" in names else names[0]


def measure(
    impl: str,
    dtype: torch.dtype,
    m: int,
    n: int,
    stored: Packing,
    repeats: int = 5,
    cache_nbytes: int = 64 << 20,
) -> float:
    """Median time_s of one call with x and out of dtype, over packed weights that together exceed cache_nbytes."""
    bits, k, group_size, *_ = stored
    nbytes = stored.row_nbytes
    count = max(2, -(-cache_nbytes // max(1, n * nbytes)))
    weights = torch.randint(0, 256, (count, n, nbytes), dtype=torch.uint8)
    weights[..., packing.codes_nbytes(k, bits, group_size) :] = 0x11  # small scales and lows in fp16 and bf16 alike
    x, out = torch.empty(m, k, dtype=dtype).uniform_(-1, 1), torch.empty(m, n, dtype=dtype)
    calls = [bind_linear_q(impl, x, weight, None, out, stored) for weight in weights]
    return median_s(calls, repeats)
