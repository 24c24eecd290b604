"""`forebay::linear` on the CPU."""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.cpu_support.matrices import as_matrix
from forebay.kernels.products.linear.reference import ACTIVATIONS, PLAIN, After, fail, finish_


class LinearArgs(ctypes.Structure):
    """Mirror of `LinearArgs` in linear.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "multiplier", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "x_stride", "w_stride")),
        *((name, ctypes.c_int64) for name in ("multiplier_stride", "residual_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("x_dtype", "w_dtype", "bias_dtype", "out_dtype")),
        *((name, ctypes.c_int32) for name in ("conv1d", "accumulate", "activation")),
    )


# Most scratch that one thread's calls of flat and upcast hold between them, kept from call to call.
SCRATCH_NBYTES = 8 << 20
ROW_PADDING_NBYTES = 256  # of rows of bf16 that meet panels, in so much apart that they do not share a set of the cache
GROUPS = range(3, 49)  # rows of x that meet weights in groups, on processors with AVX2
NAMES = ("aten", "flat", "upcast")
# Rows of x up to which flat beats torch's sgemm; bf16 and fp16 weights have no fast matmul to compare with.
FLAT_MAX_ROWS_FP32 = 32


def scratch_nbytes(impl: str, dtype: torch.dtype, m: int, n: int, k: int, conv1d: bool = False) -> int:
    """Upper bound, in bytes, of the scratch that run(impl) holds for x [m, k] of dtype and n outputs."""
    if impl == "flat":
        return _flat_scratch_nbytes(dtype, m, k, conv1d)
    if impl == "upcast":
        return SCRATCH_NBYTES
    return m * n * dtype.itemsize  # aten may make its result apart from a strided out


def _flat_scratch_nbytes(dtype: torch.dtype, m: int, k: int, conv1d: bool) -> int:
    """Rows of x as panels take them, or groups, those of fp32 too."""
    if dtype == torch.float32 and (conv1d or m not in GROUPS):
        return 0
    each = 4 * k + ROW_PADDING_NBYTES
    return each * max(1, min(m, 64, SCRATCH_NBYTES // each))


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, conv1d: bool, after: After = PLAIN
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, After]:
    """The arguments as matrices x [M, K], weight, bias, out [M, N] sharing memory; ValueError names what is wrong."""
    _, multiplier, residual = after
    named = ((x, "x"), (weight, "weight"), (bias, "bias"), (out, "out"), (multiplier, "multiplier"),
             (residual, "residual"))
    for tensor, argument in named:
        if tensor is None:
            continue
        if tensor.dtype not in native.DTYPES:
            fail(argument, f"must be fp32, bf16 or fp16, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            fail(argument, f"must be on the CPU, got {tensor.device}")
    if weight.dim() != 2:
        fail("weight", f"must have two dimensions, got shape {tuple(weight.shape)}")
    if after.activation not in ACTIVATIONS:
        fail("activation", f"must be one of {ACTIVATIONS}, got {after.activation!r}")
    n, k = reversed(weight.shape) if conv1d else weight.shape
    x2, out2 = as_matrix(x, "x", fail), as_matrix(out, "out", fail)
    if x2.shape[1] != k:
        fail("x", f"must end in {k} columns as weight {tuple(weight.shape)} asks, got shape {tuple(x.shape)}")
    if out.shape != (*x.shape[:-1], n):
        fail("out", f"must have shape {(*x.shape[:-1], n)}, got {tuple(out.shape)}")
    if bias is not None and (bias.shape != (n,) or (n > 1 and bias.stride(0) != 1)):
        fail("bias", f"must be contiguous of shape {(n,)}, got {tuple(bias.shape)}")
    rows: list[Tensor | None] = [None, None]
    for i, (tensor, argument) in enumerate(named[4:]):
        if tensor is not None:
            if tensor.shape != out.shape or tensor.dtype != out.dtype:
                fail(argument, f"must be {tuple(out.shape)} of {out.dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
            rows[i] = as_matrix(tensor, argument, fail)
    return x2, as_matrix(weight, "weight", fail), bias, out2, After(after.activation, *rows)


def _check_aten(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dtype != weight.dtype:
        fail("weight", f"must have x's dtype {x.dtype} for aten, got {weight.dtype}")
    if bias is not None and bias.dtype != x.dtype:
        fail("bias", f"must have x's dtype {x.dtype} for aten, got {bias.dtype}")


def _aten(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool, conv1d: bool, after: After = PLAIN
) -> None:
    native.rest()
    matrix = weight if conv1d else weight.t()
    if out.dtype == x.dtype and not accumulate and not after.anything():
        if bias is None:
            torch.mm(x, matrix, out=out)
        else:
            torch.addmm(bias, x, matrix, out=out)
        return
    y = torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
    if accumulate:
        y = y.add_(out)
    out.copy_(finish_(y.to(out.dtype), after))


def _upcast(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool, conv1d: bool, after: After
) -> None:
    (m, k), n = x.shape, out.shape[1]
    native.rest()
    if k == 0 or m == 0 or n == 0:
        _aten(x.float(), weight.float(), None if bias is None else bias.float(), out, accumulate, conv1d, after)
        return
    buffer = native.scratch(SCRATCH_NBYTES // 4)
    # Half of the scratch for rows of x, the rest for a tile of weight and its result. 512 weight rows a tile are
    # enough: sgemm is no faster with more. Very long rows are taken in pieces of k, added up in fp32.
    budget = buffer.numel() // 4
    k_step = min(k, budget // 16)
    rows = min(m, 2 * budget // k_step)
    columns = min(n, 512, budget // max(k_step, rows))
    x_tile, w_tile, y_tile = buffer[: 2 * budget], buffer[2 * budget : 3 * budget], buffer[3 * budget :]
    for m0 in range(0, m, rows):
        m1 = min(m, m0 + rows)
        whole = k_step == k
        if whole:
            x32 = x_tile[: (m1 - m0) * k].view(m1 - m0, k)
            x32.copy_(x[m0:m1])
        for n0 in range(0, n, columns):
            n1 = min(n, n0 + columns)
            y = y_tile[: (m1 - m0) * (n1 - n0)].view(m1 - m0, n1 - n0)
            for k0 in range(0, k, k_step):
                k1 = min(k, k0 + k_step)
                if not whole:
                    x32 = x_tile[: (m1 - m0) * (k1 - k0)].view(m1 - m0, k1 - k0)
                    x32.copy_(x[m0:m1, k0:k1])
                part = weight[k0:k1, n0:n1] if conv1d else weight[n0:n1, k0:k1]
                w32 = w_tile[: part.numel()].view(part.shape)
                w32.copy_(part)
                torch.addmm(y, x32, w32 if conv1d else w32.t(), beta=int(k0 > 0), out=y)
            if bias is not None:
                y.add_(bias[n0:n1])
            if accumulate:
                y.add_(out[m0:m1, n0:n1])
            if after.anything():  # rounded into the place of the weight's tile, whose turn is over
                rounded = w_tile.view(out.dtype)[: y.numel()].view(y.shape)
                y = finish_(rounded.copy_(y), after.part(slice(m0, m1), slice(n0, n1)))
            out[m0:m1, n0:n1].copy_(y)


def _bind_flat(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool, conv1d: bool, after: After
) -> Callable[[], None]:
    if native.load() is None:
        raise ValueError("linear: impl 'flat' needs a C++ compiler; use one of implementations()")
    _, multiplier, residual = after
    given = (x, weight, bias, multiplier, residual, out)
    args = LinearArgs(
        *(None if t is None else t.data_ptr() for t in given), *out.shape, x.shape[1], x.stride(0), weight.stride(0),
        *(0 if t is None else t.stride(0) for t in (multiplier, residual)), out.stride(0),
        native.DTYPES[x.dtype], native.DTYPES[weight.dtype], native.DTYPES[(weight if bias is None else bias).dtype],
        native.DTYPES[out.dtype], conv1d, accumulate, ACTIVATIONS.index(after.activation),
    )  # fmt: skip
    floats = _flat_scratch_nbytes(x.dtype, x.shape[0], x.shape[1], conv1d) // 4
    return native.NativeCall("linear", args, given, floats)


def bind_linear(
    impl: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    accumulate: bool = False,
    conv1d: bool = False,
    after: After = PLAIN,
) -> Callable[[], None]:
    """A closure that computes out from the tensors' contents at each call; shapes and pointers are settled here.

    The closure keeps the tensors alive; their storage must not be resized. A call costs about 1 µs over the kernel.
    """
    x2, weight2, bias, out2, after = check(x, weight, bias, out, conv1d, after)
    if impl == "flat":
        return _bind_flat(x2, weight2, bias, out2, accumulate, conv1d, after)
    if impl == "aten":
        _check_aten(x2, weight2, bias)
        return functools.partial(_aten, x2, weight2, bias, out2, accumulate, conv1d, after)
    if impl == "upcast":
        return functools.partial(_upcast, x2, weight2, bias, out2, accumulate, conv1d, after)
    raise ValueError(f"linear: impl must be one of {NAMES}, got {impl!r}")


def run(
    impl: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    accumulate: bool = False,
    conv1d: bool = False,
    after: After = PLAIN,
) -> None:
    """Compute out by the implementation named (see the module's docstring)."""
    bind_linear(impl, x, weight, bias, out, accumulate, conv1d, after)()


def implementations(dtype: torch.dtype) -> tuple[str, ...]:
    """Names that work here for weights of dtype; the first use compiles the C++ kernels."""
    if dtype not in native.DTYPES:
        return ()
    flat = ("flat",) if native.load() is not None else ()
    return ("aten", *flat, *(() if dtype == torch.float32 else ("upcast",)))


def default_choice(dtype: torch.dtype, m: int, n: int, k: int) -> str:
    """The implementation for x [m, k] and n outputs, all of dtype, where no machine profile says better.

    flat for bf16 and fp16 whatever the rows (60 to 70 GFLOP/s a core on Zen 3 with AVX2, against 35 to 50 for upcast
    and 10 for aten), and for fp32 up to FLAT_MAX_ROWS_FP32. Without flat: upcast for several rows of bf16 or fp16, and
    otherwise aten.
    A CPU with bf16 matrix instructions prefers aten for many rows; only a profile tells.
    """
    del n, k
    names = implementations(dtype)
    if "flat" in names and (dtype != torch.float32 or m <= FLAT_MAX_ROWS_FP32):
        return "flat"
    return "upcast" if "upcast" in names and m > 4 else "aten"


def measure(
    impl: str, dtype: torch.dtype, m: int, n: int, k: int, repeats: int = 5, cache_nbytes: int = 64 << 20
) -> float:
    """Median time_s of one call with x, weight and out of dtype, over weights that together exceed cache_nbytes."""
    count = max(2, -(-cache_nbytes // max(1, n * k * dtype.itemsize)))
    weights = torch.empty(count, n, k, dtype=dtype).uniform_(-1, 1)
    x, out = torch.empty(m, k, dtype=dtype).uniform_(-1, 1), torch.empty(m, n, dtype=dtype)
    calls = [bind_linear(impl, x, weight, None, out) for weight in weights]
    return median_s(calls, repeats)


def median_s(calls: Sequence[Callable[[], None]], repeats: int) -> float:
    """Median seconds of one of the calls but the last, which runs once before them."""
    calls[-1]()
    times_s = []
    for i in range(repeats):
        begin_s = time.perf_counter()
        calls[i % (len(calls) - 1)]()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s)
