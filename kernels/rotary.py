"""`forebay::rotary`: rotary position embedding of queries or keys (Su et al. 2021), halves turned as Llama does.

out = round(round(x cos) + round(turned sin)), turned = cat(-x[..., D/2:], x[..., :D/2]), equal to the bit to torch's
operators in fp32, bf16 and fp16. The C++ kernel (`cpu/rows.cpp`) reads x once and allocates nothing; without a
compiler, or where D is not contiguous, torch does the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import native


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition by torch, on any device: x [B, H, S, D], cos and sin [B or 1, S, D] -> [B, H, S, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"rotary: {argument} {problem}")


def check(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> None:
    """ValueError names the argument whose shape, dtype or device is wrong."""
    for tensor, name in ((x, "x"), (cos, "cos"), (sin, "sin"), (out, "out")):
        if tensor is None:
            continue
        if tensor.dtype not in native.DTYPES or tensor.dtype != x.dtype:
            _fail(name, f"must be fp32, bf16 or fp16 and of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            _fail(name, f"must be on the CPU, got {tensor.device}")
    if x.dim() != 4:
        _fail("x", f"must be [B, H, S, D], got shape {tuple(x.shape)}")
    batch, _, queries, dim = x.shape
    for table, name in ((cos, "cos"), (sin, "sin")):
        if table.dim() != 3 or table.shape[0] not in (1, batch) or table.shape[1:] != (queries, dim):
            _fail(name, f"must be [{batch} or 1, {queries}, {dim}] as x asks, got shape {tuple(table.shape)}")
    if out is not None and out.shape != x.shape:
        _fail("out", f"must have x's shape {tuple(x.shape)}, got {tuple(out.shape)}")


def _table_strides(table: Tensor) -> tuple[int, int]:
    return (table.stride(0) if table.shape[0] > 1 else 0), table.stride(1)


def bind_rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Callable[[], None]:
    """A closure that fills out [B, H, S, D], of any strides, from the present contents of x, cos and sin.

    out must not share memory with the others. Strides and pointers are settled here; the closure keeps the tensors
    alive, whose storage must not be resized. ValueError names what is wrong. A call costs about 1 µs over the kernel.
    """
    check(x, cos, sin, out)
    if x.numel() == 0:
        return lambda: None
    if out.data_ptr() == x.data_ptr():
        _fail("out", "must not share x's memory")
    library = native.load()
    if library is None or any(t.stride(-1) != 1 and t.shape[-1] != 1 for t in (x, cos, sin, out)):

        def by_torch() -> None:
            out.copy_(reference(x, cos, sin))

        return by_torch
    args = native.RotaryArgs(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        *x.shape, *x.stride()[:3], *_table_strides(cos), *_table_strides(sin), *out.stride()[:3],
        native.DTYPES[x.dtype],
    )  # fmt: skip
    return native.NativeCall("rotary", args, (x, cos, sin, out))


@torch.library.custom_op("forebay::rotary", mutates_args=(), device_types="cpu")
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, D], cos and sin [B or 1, S, D], all of any strides -> [B, H, S, D] in x's order of dimensions.

    The result is dense, as of torch.empty_like(x). ValueError names the argument that is wrong.
    """
    out = torch.empty_like(x)
    bind_rotary(x, cos, sin, out)()
    return out


@rotary.register_kernel("cuda")
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from forebay.kernels.gpu.rotary import rotary as launch

    out = torch.empty_like(x)
    launch(x, cos, sin, out)
    return out


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)
