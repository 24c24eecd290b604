"""The definition of `forebay::experts`, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels.formats.packing import Packing
from forebay.kernels.quantization.quantize.reference import dequantize_reference

ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu", "relu2", "alpha_swiglu")  # in the order of experts.cpp


class Form(NamedTuple):
    """How an expert computes.

    Attributes:
        activation: One of ACTIVATIONS, of what `up` gives.
        gated: `up` gives gate and value, and act(gate) * value is what `down` is given.
        interleaved: Gate and value alternate, instead of all of the gate coming first.
        transposed: `up` is [in_features, out_features].
        down_transposed: `down` is.
        scales_input: A pick's weight multiplies what `up` is given, instead of what `down` gives (Llama 4).
        alpha: Of alpha_swiglu, which is (value + 1) * gate * sigmoid(alpha * gate) (gpt-oss).
        limit: Where gated, the most that the gate, and the magnitude of the value, may be; 0 for none.
    """

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    down_transposed: bool = False
    scales_input: bool = False
    alpha: float = 0.0
    limit: float = 0.0


class Stored(NamedTuple):
    """How a matrix is stored: as it is (0 bits), or as packed rows (`Packing`)."""

    bits: int = 0
    group_size: int = 0
    scale_dtype: torch.dtype = torch.float16
    symmetric: bool = False
    codebook: str = ""

    def packing(self, in_features: int) -> Packing:
        """Return the format of packed rows over so many input features."""
        return Packing(self.bits, in_features, self.group_size, self.scale_dtype, self.symmetric, self.codebook)


class Storage(NamedTuple):
    """How both matrices of each expert are stored: both as they are, or both packed."""

    up: Stored = Stored()
    down: Stored = Stored()

    @property
    def packed(self) -> bool:
        return self.up.bits > 0


class Experts(NamedTuple):
    """The weights of experts, and which of them they are.

    Attributes:
        up: [n, U, H], or [n, H, U] where transposed; packed rows uint8 [n, U, R]. U is 2 F where gated, else F.
        up_bias: [n, U] or None.
        down: [n, H, F], or [n, F, H] where `down_transposed`; packed rows uint8 [n, H, R'].
        down_bias: [n, H] or None.
        first: Entry i is expert first + i, unless `entries` tell.
        entries: int64 [experts], the entry of each expert, below 0 for one that is not there; or None.
    """

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    first: int = 0
    entries: Tensor | None = None


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SWIGLU, PLAIN = Form(), Storage()


def fail(argument: str, problem: str) -> NoReturn:
    raise ValueError(f"experts: {argument} {problem}")


def sizes(x: Tensor, experts: Experts, form: Form, stored: Storage) -> tuple[int, int, int]:
    """H, U and F of checked arguments; ValueError names the argument that is wrong.

    Tensors may be anything with a shape and a dtype.
    """
    hidden = x.shape[-1]
    if form.activation not in ACTIVATIONS:
        fail("activation", f"must be one of {ACTIVATIONS}, got {form.activation!r}")
    if len(experts.up.shape) != 3 or len(experts.down.shape) != 3:
        fail("up", f"and down must have three dimensions, got {tuple(experts.up.shape)}, {tuple(experts.down.shape)}")
    if (form.transposed or form.down_transposed) and stored.packed:
        fail("transposed", "is for matrices that are not packed")
    if (stored.up.bits > 0) != (stored.down.bits > 0):
        fail("down", "must be packed where up is, and only there")
    units = experts.up.shape[2] if form.transposed else experts.up.shape[1]
    inner = units // 2 if form.gated else units
    if form.gated and units % 2:
        fail("up", f"must give as many gates as values, got {units} outputs")
    wanted = {"up": (units, hidden, stored.up, form.transposed),
              "down": (hidden, inner, stored.down, form.down_transposed)}
    for name, (n, k, how, transposed) in wanted.items():
        matrix = getattr(experts, name)
        count = (how.packing(k).row_nbytes,) if how.bits else (k,)
        shape = (*count, n) if transposed else (n, *count)
        if tuple(matrix.shape[1:]) != shape or matrix.shape[0] != experts.up.shape[0]:
            fail(name, f"must be [n, {shape[0]}, {shape[1]}], got {tuple(matrix.shape)}")
        bias = getattr(experts, f"{name}_bias")
        if bias is not None and tuple(bias.shape) != (experts.up.shape[0], n):
            fail(f"{name}_bias", f"must be [{experts.up.shape[0]}, {n}], got {tuple(bias.shape)}")
    return hidden, units, inner


def check_experts(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, stored: Storage, out: Tensor,
    results: Tensor | None = None,
) -> None:
    """ValueError names the argument whose dtype or layout kernels do not take."""
    named = {"x": x, "weights": weights, "out": out, "up_bias": experts.up_bias, "down_bias": experts.down_bias}
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            fail(name, f"must be fp32, bf16 or fp16, got {tensor.dtype}")
    if out.shape != x.shape or out.dtype not in (x.dtype, torch.float32):
        fail("out", f"must be {tuple(x.shape)} of {x.dtype} or fp32, got {tuple(out.shape)} {out.dtype}")
    if index.dtype != torch.int64 or index.shape[:-1].numel() != x.shape[:-1].numel() or index.dim() < 2:
        fail("index", f"must be int64 [..., K] for x {tuple(x.shape)}, got {index.dtype} {tuple(index.shape)}")
    if results is not None and (results.dtype != torch.float32 or not results.is_contiguous()
                                or results.shape != (index.numel(), x.shape[-1])):
        fail("results", f"must be contiguous fp32 {(index.numel(), x.shape[-1])}, got {results.dtype} "
                        f"{tuple(results.shape)}")
    if weights.shape != index.shape:
        fail("weights", f"must have index's shape {tuple(index.shape)}, got {tuple(weights.shape)}")
    for name, tensor in (("index", index), ("weights", weights), ("entries", experts.entries)):
        if tensor is not None and not tensor.is_contiguous():
            fail(name, f"must be contiguous, got strides {tensor.stride()}")
    for name, tensor in (("up", experts.up), ("down", experts.down), ("up_bias", experts.up_bias),
                         ("down_bias", experts.down_bias)):
        if tensor is not None and len(tensor) and not tensor[0].is_contiguous():
            fail(name, f"must have contiguous entries, got strides {tensor.stride()}")
    wanted = torch.uint8 if stored.packed else x.dtype
    for name, tensor, dtype in (("up", experts.up, wanted), ("down", experts.down, wanted),
                                ("up_bias", experts.up_bias, x.dtype), ("down_bias", experts.down_bias, x.dtype),
                                ("entries", experts.entries, torch.int64)):
        if tensor is not None and tensor.dtype != dtype:
            fail(name, f"must be {dtype}, got {tensor.dtype}")


def _matrix(weight: Tensor, in_features: int, transposed: bool, stored: Stored) -> Tensor:
    """One expert's matrix [out_features, in_features] in float64."""
    if stored.bits:
        packing = stored.packing(in_features)
        return dequantize_reference(*packing.unpack(weight), stored.bits, stored.group_size, 1, in_features,
                                    codebook=stored.codebook).double()
    return weight.double().mT if transposed else weight.double()


def activated(y: Tensor, form: Form) -> Tensor:
    """Compute the input of `down` [..., F] from the result of `up` [..., U]."""
    if not form.gated:
        return _activate(y, form.activation)
    gate, value = (y[..., ::2], y[..., 1::2]) if form.interleaved else y.chunk(2, -1)
    if form.limit > 0:
        gate, value = gate.clamp(max=form.limit), value.clamp(-form.limit, form.limit)
    if form.activation == "alpha_swiglu":
        return (value + 1) * (gate * torch.sigmoid(form.alpha * gate))
    return _activate(gate, form.activation) * value


def _activate(y: Tensor, name: str) -> Tensor:
    if name == "relu2":
        return y.relu().square()
    if name.startswith("gelu"):
        return functional.gelu(y, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"": lambda t: t, "silu": functional.silu, "relu": torch.relu}[name](y)


def picked(picks: Tensor, experts: Experts) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each entry that `picks` [T, K] choose, in ascending order of experts, with the token and the place of every pick.
    Picks of experts that have no entry are left out."""
    for expert in picks.unique().tolist():
        if experts.entries is None:
            entry = expert - experts.first
        else:
            entry = int(experts.entries[expert]) if 0 <= expert < len(experts.entries) else -1
        if expert >= 0 and 0 <= entry < experts.up.shape[0]:
            yield entry, *torch.where(picks == expert)


def reference(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, form: Form = SWIGLU, stored: Storage = PLAIN
) -> Tensor:
    """The definition in float64, on any device: sum over k of weights[t, k] * expert index[t, k] of x[t], [..., H]."""
    hidden, _, inner = sizes(x, experts, form, stored)
    rows, picks = x.double().reshape(-1, hidden), index.reshape(-1, index.shape[-1])
    shares = weights.double().reshape(picks.shape)
    out = torch.zeros_like(rows)
    for entry, token, pick in picked(picks, experts):
        share, given = shares[token, pick, None], rows[token]
        given = given * share if form.scales_input else given
        y = given @ _matrix(experts.up[entry], hidden, form.transposed, stored.up).mT
        y = activated(y if experts.up_bias is None else y + experts.up_bias[entry].double(), form)
        y = y @ _matrix(experts.down[entry], inner, form.down_transposed, stored.down).mT
        y = y if experts.down_bias is None else y + experts.down_bias[entry].double()
        out.index_add_(0, token, y if form.scales_input else y * share)
    return out.view(x.shape)
