"""Launches with several weights give, to the bit, what launches with one weight each give, on GPUs and CPUs."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import Any

import pytest
import torch
from closeness import assert_near, poisoned
from torch.nn import functional

from forebay.kernels.formats import packing
from forebay.kernels.formats.packing import Packing
from forebay.kernels.operator import Operator, Product, Tensors
from forebay.kernels.operators import LINEAR, LINEAR_Q
from forebay.kernels.products.linear import choices, joined
from forebay.kernels.products.linear.gpu_arguments import Others
from forebay.kernels.quantization.quantize.reference import reference as quantize

QKV, PAIR, GATE = (70, 33, 32), (24, 40), (37, 37)  # rows of weights


def launch(
    m: int, rows: tuple[int, ...], k: int, impl: str, dtype: torch.dtype, stored: Packing | None = None,
    bias: bool = True, activation: str = "",
) -> tuple[Operator, Tensors]:
    """A launch whose results are not written yet: with an activation one."""
    torch.manual_seed(m + k)
    plain = [torch.randn(n, k) / k**0.5 for n in rows]
    operator, how, weights = LINEAR, dict[str, Any](form="nk", accumulate=False), [w.to(dtype) for w in plain]
    if stored is not None:
        mode = "symmetric" if stored.symmetric else "minmax"
        parts = [quantize(w, stored.bits, stored.group_size, 1, stored.scale_dtype, mode) for w in plain]
        operator, how = LINEAR_Q, stored._asdict()
        weights = [packing.pack_rows(*p[:2], None if stored.symmetric else p[2]) for p in parts]
    biases = tuple(torch.randn(n).to(dtype) if bias else None for n in rows)
    outs = tuple(poisoned(m, n, dtype=dtype) for n in (rows[:1] if activation else rows))
    how |= {"activation": activation} if activation else {}
    return operator, Tensors((torch.randn(m, k).to(dtype), tuple(weights), biases), how, outs, impl)


def check(operator: Operator, use: Tensors, device: str = "cuda") -> None:
    operator.bind[device](use)()
    apart = use._replace(out=tuple(torch.full_like(out, torch.nan) for out in use.out))
    for part in joined.parts(apart):
        operator.bind[device](part)()
    assert not any(out.isnan().any() for out in use.out)
    assert all(map(torch.equal, use.out, apart.out))


@pytest.mark.parametrize(("rows", "activation"), ((QKV, ""), (PAIR, ""), (GATE, "silu")))
@pytest.mark.parametrize(("impl", "m"), (
    ("gemv_8x512_s1", 1), ("gemv_8x512_s2", 2), ("flat_64x64_s3", 7), ("large_128x64x64_s1", 65), ("aten", 3)))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.covering(2)
def test_plain_weights(rows: tuple[int, ...], activation: str, impl: str, m: int, dtype: torch.dtype) -> None:
    check(*launch(m, rows, 331, impl, dtype, bias=m != 2, activation=activation))


@pytest.mark.parametrize(("rows", "activation"), ((QKV, ""), (PAIR, ""), (GATE, "gelu_tanh")))
@pytest.mark.parametrize("impl", ("gemv_32x512_s1", "flat", "large", "raw", "aten"))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("group", (32, 128))
@pytest.mark.covering(2)
def test_packed_weights(rows: tuple[int, ...], activation: str, impl: str, bits: int, group: int) -> None:
    stored = Packing(bits, 256 if group == 128 else 200, group, torch.float16, symmetric=group == 32)
    m = {"gemv_32x512_s1": 2, "flat": 9, "raw": 12}.get(impl, 66 if impl == "large" else 3)
    check(*launch(m, rows, stored.in_features, impl, torch.bfloat16, stored, bits == 4, activation))


@pytest.mark.parametrize(("rows", "activation"), ((QKV, ""), (GATE, "silu")))
def test_on_host_cores(rows: tuple[int, ...], activation: str) -> None:
    check(*launch(3, rows, 40, "aten", torch.float32, activation=activation), "cpu")
    stored = Packing(8, 64, 32)
    check(*launch(3, rows, 64, "int16", torch.float32, stored, activation=activation), "cpu")


def test_a_gate_near_float64() -> None:
    operator, use = launch(2, GATE, 203, "flat_64x64_s2", torch.float16, activation="silu")
    operator.bind["cuda"](use)()
    x, (gate, up), (b, c) = use.args
    y = functional.silu((x.double() @ gate.double().T + b.double()).half().double())
    assert_near(use.out[0], y * (x.double() @ up.double().T + c.double()))


def test_costs_and_scratch_are_of_all_weights() -> None:
    _, use = launch(4, QKV, 600, "flat_64x128_s4", torch.float16)
    apart = joined.parts(use)
    costs = [LINEAR.cost(part) for part in apart]
    assert LINEAR.cost(use).flops == sum(cost.flops for cost in costs)
    assert LINEAR.cost(use).read_nbytes == sum(cost.read_nbytes for cost in costs) - 2 * 2 * 4 * 600
    assert LINEAR.implementations is not None
    assert LINEAR.implementations.shape(use)[1:] == (4, sum(QKV), 600)
    tiles = sum(-(-n // 64) for n in QKV)  # one more than of 135 columns side by side
    whole, split = (choices.workspace_nbytes(impl, Product("float16", 4, sum(QKV), 600), widths=joined.widths(use))
                    for impl in ("flat_64x128_s1", "flat_64x128_s4"))
    assert split - whole == 4 * 8 * 64 * 4 * tiles + 16


def test_what_does_not_go_together_is_refused() -> None:
    _, use = launch(2, QKV, 64, "flat", torch.float16)
    x, weights, biases = use.args

    def refused(message: str, args: tuple[Any, ...], **how: Any) -> None:
        with pytest.raises(ValueError, match=f"^linear: {message}"):
            LINEAR.bind["cuda"](use._replace(args=args, kwargs={**use.kwargs, **how}))()

    refused("weight must all have rows of 64 columns", (x, (weights[0], weights[1][:, :32], weights[2]), biases))
    refused("bias must be of all weights or of none", (x, weights, (biases[0], None, biases[2])))
    refused("out must have shape", (x, (weights[0], weights[2], weights[1]), (biases[0], biases[2], biases[1])))
    with pytest.raises(ValueError, match=r"^linear: weight of a gate must have an activation"):
        LINEAR.bind["cuda"](use._replace(args=(x, weights[:2], biases[:2]), out=use.out[:1]))()
    assert all(out.isnan().all() for out in use.out)


@pytest.mark.parametrize(("rows", "activation"), ((QKV, ""), (GATE, "silu")))
@pytest.mark.parametrize(("bits", "codebook"), ((8, "e4m3"), (4, "e2m1")))
def test_codes_of_fp8_and_mxfp4(rows: tuple[int, ...], activation: str, bits: int, codebook: str) -> None:
    operator, use = launch(3, rows, 256, "raw", torch.bfloat16, Packing(bits, 256, 32, torch.bfloat16, True), False,
                           activation)
    check(operator, use._replace(kwargs={**use.kwargs, "codebook": codebook}))


def test_a_gate_is_told_what_both_addresses_are_multiples_of() -> None:
    """A compiler that relies on more would load where nothing lies."""
    memory = torch.zeros(300, dtype=torch.bfloat16)
    first = memory[:128].view(8, 16)
    for shift, known in ((0, 16), (1, 1)):
        second = memory[128 + shift :][:128].view(8, 16)
        assert Others((second,), (None,)).constants(first)["GATED"] == known
        assert Others((first,), (None,)).constants(second)["GATED"] == known
        assert Others((second,), (None,), (memory.view(2, 150),)).constants(first)["GATED"] == 0
