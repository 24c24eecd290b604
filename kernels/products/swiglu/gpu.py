"""`forebay::swiglu` in Triton: act(x Wg^T) * (x Wu^T) with both products kept in registers until they meet.

Made for few rows, where reading the two weights is all the time there is and the two products would be written and
read again by separate operators. M = 1 and 2 are matrix-vector products by fused multiply-adds; from 3 rows on tensor
cores take rows padded to 16, 32 or 64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor, fail
from forebay.kernels.gpu_support.audit_case import AuditCase
from forebay.kernels.gpu_support.cache_tiles import dot, round_to
from forebay.kernels.gpu_support.launches import bound, kernel_call

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class SwigluTiles:
    """One configuration: rows of x and of the weights in a tile, elements of K a step, warps, pipeline stages."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


# A step of the vector kernels reads 8 and 4 KiB of each weight: 8 rows at M = 2 would take 240 registers a thread.
# A stage of the matrix kernel holds 16 KiB of both weights beside x.
VECTOR = (SwigluTiles(1, 8, 512, 4, 2), SwigluTiles(2, 4, 512, 4, 2))
MATRIX = (SwigluTiles(16, 32, 128, 4, 4), SwigluTiles(32, 64, 64, 4, 3), SwigluTiles(64, 64, 64, 4, 3))
# fp32 products take several instructions on parts of the operands, which fill the registers.
MATRIX_FP32 = (SwigluTiles(16, 32, 32, 4, 3), SwigluTiles(32, 32, 32, 8, 3))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, gelu by the error function, gelu by tanh, or relu, which keeps NaN; in fp32."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)
    else:
        # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def swiglu_vector_kernel(
    x_ptr, gate_ptr, up_ptr, out_ptr, n, k, xm, gn, un, om,
    ACTIVATION: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs): M is 1 or 2; partial products stay apart per element of K until the end."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.arange(0, BK)
    gate_at = gate_ptr + row.to(tl.int64)[:, None] * gn + at[None, :]
    up_at = up_ptr + row.to(tl.int64)[:, None] * un + at[None, :]
    gate0 = tl.zeros((BN, BK), tl.float32)
    up0 = tl.zeros((BN, BK), tl.float32)
    gate1 = tl.zeros((BN, BK), tl.float32)
    up1 = tl.zeros((BN, BK), tl.float32)
    for begin in range(0, k, BK):
        used = at < k - begin
        inside = (row < n)[:, None] & used[None, :]
        g = tl.load(gate_at + begin, mask=inside, other=0.0)
        u = tl.load(up_at + begin, mask=inside, other=0.0)
        x0 = tl.load(x_ptr + begin + at, mask=used, other=0.0)
        if M == 2:  # both rows are on their way before one is waited for
            x1 = tl.load(x_ptr + xm + begin + at, mask=used, other=0.0).to(tl.float32)[None, :]
            gate1 += g.to(tl.float32) * x1
            up1 += u.to(tl.float32) * x1
        gate0 += g.to(tl.float32) * x0.to(tl.float32)[None, :]
        up0 += u.to(tl.float32) * x0.to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    y0 = activate(tl.sum(gate0, 1), ACTIVATION) * tl.sum(up0, 1)
    tl.store(out_ptr + row, round_to(y0, dtype), mask=row < n)
    if M == 2:
        y1 = activate(tl.sum(gate1, 1), ACTIVATION) * tl.sum(up1, 1)
        tl.store(out_ptr + om + row, round_to(y1, dtype), mask=row < n)


@triton.jit
def swiglu_matrix_kernel(
    x_ptr, gate_ptr, up_ptr, out_ptr, m, n, k, xm, gn, un, om,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of rows of x, block of outputs): programs that share weights lie side by side."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    at = tl.arange(0, BK)
    x_at = x_ptr + i.to(tl.int64)[:, None] * xm + at[None, :]
    gate_at = gate_ptr + j.to(tl.int64)[None, :] * gn + at[:, None]
    up_at = up_ptr + j.to(tl.int64)[None, :] * un + at[:, None]
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for begin in tl.range(0, k, BK, num_stages=STAGES):
        used = at < k - begin
        x = tl.load(x_at + begin, mask=(i < m)[:, None] & used[None, :], other=0.0)
        inside = (j < n)[None, :] & used[:, None]
        g = tl.load(gate_at + begin, mask=inside, other=0.0)
        u = tl.load(up_at + begin, mask=inside, other=0.0)
        gate = dot(x, g, gate)
        up = dot(x, u, up)
    y = activate(gate, ACTIVATION) * up
    out_at = out_ptr + i.to(tl.int64)[:, None] * om + j[None, :]
    tl.store(out_at, round_to(y, out_ptr.dtype.element_ty), mask=(i < m)[:, None] & (j < n)[None, :])


def setting(m: int, dtype: torch.dtype) -> SwigluTiles:
    """The configuration for m rows of x."""
    if m <= len(VECTOR):
        return VECTOR[m - 1]
    settings = MATRIX_FP32 if dtype == torch.float32 else MATRIX
    return next((s for s in settings if m <= s.bm), settings[-1])


def check(x: Tensor, gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
    """ValueError names the argument whose dtype, device, shape or stride is wrong, or the unknown activation."""
    if activation not in ACTIVATIONS:
        fail("swiglu", "activation", f"must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check_tensor("swiglu", "x", x)
    if x.dim() == 0:
        fail("swiglu", "x", "must have at least one dimension")
    if gate.dim() != 2:
        fail("swiglu", "gate", f"must be [N, K], got shape {tuple(gate.shape)}")
    k, n = x.shape[-1], gate.shape[0]
    for tensor, name, shape in ((gate, "gate", (n, k)), (up, "up", (n, k)), (out, "out", (*x.shape[:-1], n))):
        check_tensor("swiglu", name, tensor, device=x.device, dtype=x.dtype, shape=shape)
    for tensor, name in ((x, "x"), (out, "out")):
        if tensor.dim() > 2 and not tensor.is_contiguous():
            fail("swiglu", name, f"must be contiguous or a matrix, got strides {tensor.stride()}")


def bind_swiglu(x: Tensor, gate: Tensor, up: Tensor, activation: str, out: Tensor) -> Callable[[], None]:
    """swiglu as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    check(x, gate, up, activation, out)
    if out.numel() == 0:
        return lambda: None
    k, n = x.shape[-1], gate.shape[0]
    x, out = x.view(-1, k) if x.dim() != 2 else x, out.view(-1, n) if out.dim() != 2 else out
    m = x.shape[0]
    s = setting(m, x.dtype)
    strides = x.stride(0), gate.stride(0), up.stride(0), out.stride(0)
    if m <= len(VECTOR):
        return bound(kernel_call(
            swiglu_vector_kernel, (triton.cdiv(n, s.bn),),
            x, gate, up, out, n, k, *strides, ACTIVATION=activation, M=m, BN=s.bn, BK=s.bk, num_warps=s.warps,
        ))  # fmt: skip
    return bound(kernel_call(
        swiglu_matrix_kernel, (triton.cdiv(m, s.bm), triton.cdiv(n, s.bn)),
        x, gate, up, out, m, n, k, *strides,
        ACTIVATION=activation, BM=s.bm, BN=s.bn, BK=s.bk, STAGES=s.stages, num_warps=s.warps,
    ))  # fmt: skip


def swiglu(x: Tensor, gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
    """Fill out [..., N] = act(x Wg^T) * (x Wu^T) from x [..., K], gate and up [N, K] of one dtype; sums in fp32.

    activation is "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU) or "relu" (ReGLU; Shazeer 2020). Matrices may be
    strided over their rows. Rounded once, at the end. ValueError names the argument that is wrong, before the launch.
    """
    bind_swiglu(x, gate, up, activation, out)()


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B: K = 4096, N = 14336; every setting at the largest M that it serves."""
    cases = []
    k, n = 4096, 14336
    for s in (*VECTOR, *MATRIX, *MATRIX_FP32):
        vector, size = s in VECTOR, 4 if s in MATRIX_FP32 else 2
        pointers = {p: "*fp32" if size == 4 else "*bf16" for p in ("x_ptr", "gate_ptr", "up_ptr", "out_ptr")}
        numbers = (*(() if vector else ("m",)), "n", "k", "xm", "gn", "un", "om")
        tiles = {"M": s.bm} if vector else {"BM": s.bm, "STAGES": s.stages}
        minimum = size * (2 * n * k + s.bm * (n + k))
        cases.append(
            AuditCase(
                name=f"swiglu/{'vector' if vector else 'matrix'}/{s.bm}{'/fp32' if size == 4 else ''}",
                fn=swiglu_vector_kernel if vector else swiglu_matrix_kernel,
                signature=pointers | {name: "i32" for name in numbers},
                constants={"ACTIVATION": "silu", "BN": s.bn, "BK": s.bk} | tiles,
                num_warps=s.warps,
                num_stages=s.stages,
                divisible=(*pointers, "n", "k", "xm", "gn", "un", "om"),
                uses_dot=not vector,
                main_operands=2,
                bytes_moved=minimum,  # x is read again by every block of outputs, from L2: at most 512 KiB
                minimum_bytes=minimum,
                aim=0.75 if size == 2 and s.bm <= 32 else 0.0,
                turn_nbytes=2 * s.bn * s.bk * size,
                archs=("sm_80", "sm_90") if size == 4 else ("sm_80", "sm_90", "gfx942"),
            )
        )
    return cases
