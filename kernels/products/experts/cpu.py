"""`forebay::experts` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.cpu_support.matrices import as_matrix
from forebay.kernels.formats.codebooks import CODEBOOKS
from forebay.kernels.products.experts.reference import (
    ACTIVATIONS,
    Experts,
    Form,
    Storage,
    Stored,
    activated,
    check_experts,
    fail,
    picked,
    sizes,
)
from forebay.kernels.products.linear import cpu as linear
from forebay.kernels.products.linear_q import cpu as linear_q
from forebay.kernels.quantization.quantize.reference import dequantize_reference

BLOCK = 128  # rows of x that meet an expert's matrices at once
INTEGER_NBYTES = linear_q.INTEGER_NBYTES


class MatrixArgs(ctypes.Structure):
    """Mirror of `ExpertsMatrix` in experts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("row", "bits", "group")),
        *((name, ctypes.c_int32) for name in ("scale_dtype", "symmetric", "codebook", "integer_nbytes")),
        *((name, ctypes.c_int32) for name in ("bf16_panels", "transposed")),
    )


class ExpertsArgs(ctypes.Structure):
    """Mirror of `ExpertsArgs` in experts.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "index", "weights", "up", "up_bias", "down", "down_bias")),
        *((name, ctypes.c_void_p) for name in ("entries", "out", "results")),
        *((name, ctypes.c_int64) for name in ("tokens", "picks", "experts", "entry_count", "first", "hidden")),
        *((name, ctypes.c_int64) for name in ("units", "inner", "x_stride", "out_stride")),
        *((name, ctypes.c_int64) for name in ("up_entry", "up_bias_entry", "down_entry", "down_bias_entry")),
        ("block", ctypes.c_int64),
        *((name, MatrixArgs) for name in ("up_how", "down_how")),
        *((name, ctypes.c_int32) for name in ("x_dtype", "weights_dtype", "out_dtype", "activation", "gated")),
        *((name, ctypes.c_int32) for name in ("interleaved", "scales_input", "accumulate", "last")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    )


def implementation(stored: Stored) -> str:
    """Return the matmul of a matrix: the implementation of `linear` or `linear_q` that few rows take."""
    if not stored.bits:
        return "flat"
    return linear_q.default_choice(stored.bits, 1, stored.group_size, stored.codebook)


class Sizes(NamedTuple):
    """The sizes on which scratch depends: tokens, experts that each chooses, experts in all, H, U and F."""

    tokens: int
    picks: int
    experts: int
    hidden: int
    units: int
    inner: int


def scratch_nbytes(dtype: torch.dtype, out_dtype: torch.dtype, sizes: Sizes, form: Form, stored: Storage) -> int:
    """Bytes of scratch that a call holds for x of `dtype`."""
    tokens, picks, experts, hidden, units, inner = sizes
    block, size = min(max(1, tokens), BLOCK), dtype.itemsize
    parts = (0 if out_dtype == torch.float32 else tokens * hidden * 4, (experts + 1) * 4, tokens * picks * 8,
             block * hidden * size, block * units * size, block * inner * size, block * hidden * 4)
    shapes = (units, hidden, stored.up, form.transposed), (hidden, inner, stored.down, form.down_transposed)
    if stored.packed:
        rest = max(linear_q.scratch_nbytes(implementation(how), dtype, block, n, k, how.group_size, how.codebook)
                   for n, k, how, _ in shapes)
    else:
        most = max(linear.scratch_nbytes("flat", dtype, rows, n, k, transposed)
                   for n, k, _, transposed in shapes for rows in (block, min(block, 48)))
        rest = max(most, 4 * (max(hidden, inner) + 64))
    return sum(-(-part // 64) * 64 for part in parts) + rest + 64


def bind_experts(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, form: Form, stored: Storage, out: Tensor | None,
    accumulate: bool = False, results: Tensor | None = None,
) -> Callable[[], object]:
    """A closure that computes out [..., H] from the tensors' contents at each call (`reference`).

    Args:
        x: [..., H]; only its last dimension must be contiguous, as out's.
        index: int64 [..., K]: each token's experts, no one twice. Those that have no entry are left out.
        weights: [..., K], any float.
        experts: Biases of x's dtype, and matrices of it or packed rows; those of an expert are contiguous.
        form: How an expert computes.
        stored: How matrices are stored.
        out: Of x's dtype or fp32; sums are fp32, in ascending order of experts. None where `results` are kept alone.
        accumulate: Add to what out holds.
        results: fp32 [tokens * K, H], for experts some at a time in any order: keep what each pick gives there, before
            its weight. With `out` these are the last, and all of it is added up.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    hidden, units, inner = sizes(x, experts, form, stored)
    check_experts(x, index, weights, experts, stored, x if out is None else out, results)
    x2, out2 = as_matrix(x, "x", fail), None if out is None else as_matrix(out, "out", fail)
    picks = index.reshape(-1, index.shape[-1])
    if native.load() is None:
        shares = weights.reshape(picks.shape)
        return lambda: _by_torch(x2, picks, shares, experts, form, stored, out2, accumulate, results)
    count = experts.up.shape[0] + experts.first if experts.entries is None else experts.entries.shape[0]
    row = units if form.transposed else hidden, hidden if form.down_transposed else inner
    made = torch.float32 if out is None else out.dtype
    given = (x2, picks, weights, experts.up, experts.up_bias, experts.down, experts.down_bias, experts.entries, out2,
             results)
    args = ExpertsArgs(
        *(None if t is None else t.data_ptr() for t in given), *picks.shape, count, experts.up.shape[0],
        experts.first, hidden, units, inner, x2.stride(0), 0 if out2 is None else out2.stride(0),
        *(0 if t is None else t.stride(0) * t.element_size() for t in experts[:4]),
        min(max(1, x2.shape[0]), BLOCK),
        _matrix(experts.up, row[0], form.transposed, stored.up, x.dtype),
        _matrix(experts.down, row[1], form.down_transposed, stored.down, x.dtype),
        *(native.DTYPES[dtype] for dtype in (x.dtype, weights.dtype, made)), ACTIVATIONS.index(form.activation),
        form.gated, form.interleaved, form.scales_input, accumulate, out is not None, form.alpha, form.limit,
    )  # fmt: skip
    tokens, chosen = picks.shape
    nbytes = scratch_nbytes(x.dtype, made, Sizes(tokens, chosen, count, hidden, units, inner), form, stored)
    return native.NativeCall("experts", args, given, -(-nbytes // 4))


def _matrix(held: Tensor, row: int, transposed: bool, stored: Stored, dtype: torch.dtype) -> MatrixArgs:
    """Return how the C++ code reads a matrix of each expert, whose rows of values as they are are so many elements
    apart."""
    if not stored.bits:
        return MatrixArgs(row, 0, 0, 0, 0, 0, 0, 0, transposed)
    impl = implementation(stored)
    return MatrixArgs(held.shape[2], stored.bits, stored.group_size, native.DTYPES[stored.scale_dtype],
                      stored.symmetric, CODEBOOKS.index(stored.codebook),
                      INTEGER_NBYTES.get(impl, 0), impl == "bf16" and dtype != torch.float16, False)


def _by_torch(
    x: Tensor, picks: Tensor, weights: Tensor, experts: Experts, form: Form, stored: Storage, out: Tensor | None,
    accumulate: bool, results: Tensor | None,
) -> None:
    """The same by torch, expert by expert."""
    native.rest()
    sums = torch.zeros(x.shape) if out is None or not accumulate else out.float()
    for entry, token, pick in picked(picks, experts):
        share, rows = weights[token, pick, None], x[token]
        given = rows * share.to(x.dtype) if form.scales_input else rows
        y = _linear(given, experts.up[entry], experts.up_bias, entry, form.transposed, stored.up)
        y = activated(y.to(x.dtype), form)
        y = _linear(y, experts.down[entry], experts.down_bias, entry, form.down_transposed, stored.down)
        if results is None:
            sums.index_add_(0, token, y if form.scales_input else y * share.float())
        else:
            results[token * picks.shape[1] + pick] = y
    if out is None:
        return
    count = len(experts.up) + experts.first if experts.entries is None else len(experts.entries)
    for expert in picks.unique().tolist() if results is not None else ():
        if 0 <= expert < count:
            token, pick = torch.where(picks == expert)
            y, share = results[token * picks.shape[1] + pick], weights[token, pick, None]  # type: ignore[index]
            sums.index_add_(0, token, y if form.scales_input else y * share.float())
    out.copy_(sums)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, entry: int, transposed: bool, stored: Stored) -> Tensor:
    if stored.bits:
        packing = stored.packing(x.shape[1])
        weight = dequantize_reference(*packing.unpack(weight), stored.bits, stored.group_size, 1, x.shape[1],
                                      codebook=stored.codebook)
    matrix = weight.float() if transposed else weight.float().t()
    y = x.float() @ matrix
    return y if bias is None else y + bias[entry].float()
