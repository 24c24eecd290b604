"""out = act(x W^T + bias) * multiplier + residual for a W of packed rows: what linear_w4 and linear_w8 share.

    int16   C++, AVX2: x rounded to 16-bit integers with one scale per group, exact integer sums. Adds 1.5e-5 of a
            group's largest |x|, 250 times less than a bf16 x has lost already. The default at every number of rows
    int8    the same with 8 bits, as llama.cpp does; 4-bit weights only. Adds 0.4 % of a group's largest |x|: some 0.4 %
            of the product's norm, beside the 10 % that 4-bit weights cost. 1.2 to 1.5 times faster from 4 rows on
    flat    C++ on any processor: some rows of W at a time unpacked to fp32, fp32 sums
    upcast  the same by torch, tile by tile in bounded scratch; needs no compiler

A row of x that integers cannot hold (NaN, infinity, or a group of magnitudes below 1e-30) goes through fp32. Weights
are used as stored, q * scale + low in fp32; the product is rounded to the dtype of out once, and what follows it as in
`linear`. Layout of the rows: `packing`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import native, packing
from forebay.kernels.linear import ACTIVATIONS, PLAIN, SCRATCH_NBYTES, After, finish_
from forebay.kernels.quantize import dequantize_reference
from forebay.kernels.quantized_native import QuantizedLinearArgs

NAMES = ("int16", "int8", "flat", "upcast")
INTEGER_NBYTES = {"int16": 2, "int8": 1, "flat": 0}
M_BLOCK = 64  # rows of x that the C++ kernels hold at a time
MAX_GROUP = 512


def reference(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    in_features: int,
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype,
    after: After = PLAIN,
) -> Tensor:
    """The definition in float64, on any device; returns [..., N]."""
    parts = packing.unpack_rows(rows, in_features, bits, group_size, scale_dtype)
    weight = dequantize_reference(*parts, bits, group_size, 1, in_features)
    y = x.double() @ weight.double().mT
    return finish_(y if bias is None else y + bias.double(), after)


def _fail(op: str, argument: str, problem: str) -> None:
    raise ValueError(f"{op}: {argument} {problem}")


def _matrix(op: str, tensor: Tensor, argument: str) -> Tensor:
    """tensor as [rows, columns] sharing memory; the last dimension must be contiguous."""
    if tensor.dim() == 0 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        _fail(op, argument, f"must have a contiguous last dimension, got strides {tensor.stride()}")
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, tensor.shape[-1])
    except RuntimeError:
        _fail(op, argument, f"must have leading dimensions of one stride, got strides {tensor.stride()}")
        raise


def check(
    op: str,
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    in_features: int,
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype,
    after: After,
) -> None:
    """ValueError, opened by op, names the argument that is wrong; any device."""
    if group_size % 32 or not 32 <= group_size <= MAX_GROUP:
        _fail(op, "group_size", f"must be a multiple of 32 up to {MAX_GROUP}, got {group_size}")
    if scale_dtype not in packing.SCALE_DTYPES:
        _fail(op, "scale_dtype", f"must be fp16 or bf16, got {scale_dtype}")
    if x.dtype not in native.DTYPES:
        _fail(op, "x", f"must be fp32, bf16 or fp16, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] != in_features:
        _fail(op, "x", f"must end in in_features = {in_features} columns, got shape {tuple(x.shape)}")
    nbytes = packing.row_nbytes(in_features, bits, group_size)
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != nbytes:
        _fail(op, "rows", f"must be uint8 [N, {nbytes}] as in_features and group_size ask, got {rows.dtype} "
              f"{tuple(rows.shape)}")  # fmt: skip
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        _fail(op, "rows", f"must have contiguous columns, got strides {rows.stride()}")
    n = rows.shape[0]
    if bias is not None and (bias.shape != (n,) or (n > 1 and bias.stride(0) != 1) or bias.dtype not in native.DTYPES):
        _fail(op, "bias", f"must be contiguous fp32, bf16 or fp16 {(n,)}, got {bias.dtype} {tuple(bias.shape)}")
    if after.activation not in ACTIVATIONS:
        _fail(op, "activation", f"must be one of {ACTIVATIONS}, got {after.activation!r}")
    for tensor, argument in ((rows, "rows"), (bias, "bias"), (after.multiplier, "multiplier"),
                             (after.residual, "residual")):  # fmt: skip
        if tensor is not None and tensor.device != x.device:
            _fail(op, argument, f"must be on x's device {x.device}, got {tensor.device}")


def _check_out(op: str, x: Tensor, rows: Tensor, out: Tensor, after: After) -> tuple[Tensor, After]:
    """out and the operands that have its shape, as matrices."""
    shape = (*x.shape[:-1], rows.shape[0])
    if out.shape != shape or out.dtype not in native.DTYPES:
        _fail(op, "out", f"must be {shape} of fp32, bf16 or fp16, got {tuple(out.shape)} {out.dtype}")
    if out.device.type != "cpu":
        _fail(op, "out", f"must be on the CPU, got {out.device}")
    made: list[Tensor | None] = []
    for tensor, argument in ((after.multiplier, "multiplier"), (after.residual, "residual")):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != out.dtype):
            _fail(op, argument, f"must be {shape} of {out.dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        made.append(None if tensor is None else _matrix(op, tensor, argument))
    return _matrix(op, out, "out"), After(after.activation, *made)


def scratch_nbytes(impl: str, dtype: torch.dtype, m: int, n: int, k: int, group_size: int) -> int:
    """Upper bound, in bytes, of the scratch that a call holds for x [m, k] of dtype and n outputs."""
    if impl == "upcast":
        return SCRATCH_NBYTES + 64 * max(1, k) + 8 * m
    return 4 * _scratch_floats(impl, dtype, m, k, group_size)


def _scratch_floats(impl: str, dtype: torch.dtype, m: int, k: int, group_size: int) -> int:
    rows = max(1, min(m, M_BLOCK))
    if impl == "flat":
        per_row, rest = 0 if dtype == torch.float32 else k, 0
    else:
        groups = packing.group_count(k, group_size)
        per_row, rest = 2 * (-(-groups // 8) * 8) + groups * group_size * INTEGER_NBYTES[impl] // 4, k
    return max(min(rows * per_row + rest, SCRATCH_NBYTES // 4), per_row + rest)


def _upcast(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    out: Tensor,
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype,
    after: After,
) -> None:
    (m, k), n = x.shape, rows.shape[0]
    # A quarter of the scratch for rows of x and for their results, a half for a tile of weight being unpacked: about
    # six fp32 numbers an element.
    m_step = max(1, SCRATCH_NBYTES // 16 // max(1, k))
    n_step = max(1, min(SCRATCH_NBYTES // 8 // 6 // max(1, k), SCRATCH_NBYTES // 16 // max(1, min(m, m_step))))
    for m0 in range(0, m, m_step):
        x32 = x[m0 : m0 + m_step].float()
        for n0 in range(0, n, n_step):
            columns = slice(n0, min(n, n0 + n_step))
            if k:
                parts = packing.unpack_rows(rows[columns], k, bits, group_size, scale_dtype)
                y = x32 @ dequantize_reference(*parts, bits, group_size, 1, k).t()
            else:
                y = x32.new_zeros(x32.shape[0], columns.stop - n0)
            if bias is not None:
                y.add_(bias[columns])
            piece = slice(m0, m0 + m_step)
            out[piece, columns].copy_(finish_(y.to(out.dtype), after.part(piece, columns)))


def bind(
    op: str,
    bits: int,
    impl: str,
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    out: Tensor,
    in_features: int,
    group_size: int,
    scale_dtype: torch.dtype = torch.float16,
    after: After = PLAIN,
) -> Callable[[], None]:
    """A closure that computes out from the tensors' contents at each call; shapes and pointers are settled here.

    x [..., K], rows uint8 [N, R] (any rows of a larger matrix, at any address), bias [N] or None, out [..., N] and what
    `after` holds like it; only last dimensions must be contiguous. out may be the memory of multiplier or residual,
    element on element. The closure keeps the tensors alive. A call costs about 1 µs over the kernel.
    """
    check(op, x, rows, bias, in_features, bits, group_size, scale_dtype, after)
    if x.device.type != "cpu":
        _fail(op, "x", f"must be on the CPU, got {x.device}")
    out2, after = _check_out(op, x, rows, out, after)
    x2 = _matrix(op, x, "x")
    if impl not in NAMES or (impl == "int8" and bits != 4):
        _fail(op, "impl", f"must be one of {implementations(bits)}, got {impl!r}")
    if impl == "upcast" or 0 in (*out2.shape, in_features):
        return functools.partial(_upcast, x2, rows, bias, out2, bits, group_size, scale_dtype, after)
    if impl not in implementations(bits):
        names = implementations(bits)
        _fail(op, "impl", f"{impl!r} needs a C++ compiler and, but for 'flat', AVX2; use one of {names}")
    _, multiplier, residual = after
    given = (x2, rows, bias, multiplier, residual, out2)
    args = QuantizedLinearArgs(
        *(None if t is None else t.data_ptr() for t in given), *out2.shape, in_features, x2.stride(0), rows.stride(0),
        *(0 if t is None else t.stride(0) for t in (multiplier, residual)), out2.stride(0), group_size,
        bits, native.DTYPES[scale_dtype], native.DTYPES[x.dtype], native.DTYPES[(x if bias is None else bias).dtype],
        native.DTYPES[out.dtype], ACTIVATIONS.index(after.activation), INTEGER_NBYTES[impl],
    )  # fmt: skip
    floats = _scratch_floats(impl, x.dtype, x2.shape[0], in_features, group_size)
    return native.NativeCall("quantized_linear", args, given, floats)


def run_op(
    op: str,
    bits: int,
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    scale_dtype: torch.dtype,
    after: After,
) -> Tensor:
    """The operator on the CPU: contiguous out [..., N] of x's dtype by the default implementation."""
    contiguous = After(after.activation, *(None if t is None else t.contiguous() for t in after[1:]))
    out = x.new_empty(*x.shape[:-1], rows.shape[0])
    impl = default_choice(bits, x.numel() // max(1, in_features))
    bind(op, bits, impl, x.contiguous(), rows, bias, out, in_features, group_size, scale_dtype, contiguous)()
    return out


def implementations(bits: int) -> tuple[str, ...]:
    """Names that work here for codes of `bits`; the first use compiles the C++ kernels."""
    library = native.load()
    if library is None:
        return ("upcast",)
    integer = (("int16", "int8") if bits == 4 else ("int16",)) if library.forebay_integer_dot() else ()
    return (*integer, "flat", "upcast")


def default_choice(bits: int, m: int) -> str:
    """The implementation for m rows of x where no machine profile says better: never int8, which costs accuracy.

    int16 where there is AVX2. Otherwise flat, and without a compiler upcast.
    """
    del m
    return implementations(bits)[0]


def measure(
    op: str,
    bits: int,
    impl: str,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    group_size: int,
    repeats: int = 5,
    cache_nbytes: int = 64 << 20,
) -> float:
    """Median time_s of one call with x and out of dtype, over packed weights that together exceed cache_nbytes."""
    nbytes = packing.row_nbytes(k, bits, group_size)
    count = max(2, -(-cache_nbytes // max(1, n * nbytes)))
    weights = torch.randint(0, 256, (count, n, nbytes), dtype=torch.uint8)
    weights[..., packing.codes_nbytes(k, bits, group_size) :] = 0x11  # small scales and lows in fp16 and bf16 alike
    x, out = torch.empty(m, k, dtype=dtype).uniform_(-1, 1), torch.empty(m, n, dtype=dtype)
    calls = [bind(op, bits, impl, x, weight, None, out, k, group_size) for weight in weights]
    calls[-1]()
    times_s = []
    for i in range(repeats):
        begin_s = time.perf_counter()
        calls[i % (count - 1)]()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s)
