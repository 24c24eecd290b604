"""The operator on the CPU: the definition, what it refuses, and torch's own checks of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_blocks import LIMIT, relative_error
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.cache.activation_append_q import operator as activation_append_q_operator
from forebay.kernels.cache.activation_append_q import reference as activation_append_q_reference
from forebay.kernels.cache.kv_from_activation import reference as module
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, paged, row_sizes
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.quantization.quantize import reference as quantize

OP = operators.KV_FROM_ACTIVATION.overload
NAMES = ("pool", "x", "slots", "k_weight", "v_weight", "norm_weight", "norm_bias", "k_bias", "v_bias", "cos", "sin",
         "features", "x_bits", "x_group", "norm", "eps", "weight_format", "kv_heads", "head_dim", "block_tokens",
         "format", "group_size", "dtype")  # fmt: skip


def arguments(dtype: torch.dtype = torch.float16, format: str = "native") -> dict[str, Any]:
    """Layer norm, biases and rotary over half of D: 7 tokens, H = 40, 2 KV heads of 24."""
    g = torch.Generator().manual_seed(7)
    layout = BlockLayout(16, 2, 24, format, dtype)
    values: dict[str, Any] = dict.fromkeys(NAMES)
    values |= {"pool": paged.allocate(layout, 2).fill_(0), "slots": torch.tensor([3, 30, 4, -1, 17, 0, 5])}
    shapes = {"x": (7, 40), "k_weight": (2, 24, 40), "v_weight": (2, 24, 40), "norm_weight": (40,), "norm_bias": (40,),
              "k_bias": (48,), "v_bias": (48,), "cos": (7, 12), "sin": (7, 12)}  # fmt: skip
    values |= {name: (torch.randn(shape, generator=g) / 2).to(dtype) for name, shape in shapes.items()}
    values |= {"features": 40, "x_bits": 0, "x_group": 0, "norm": "layer", "eps": 1e-5, "weight_format": "native"}
    values |= {"kv_heads": 2, "head_dim": 24, "block_tokens": 16, "format": format, "group_size": 0}
    return values | {"dtype": dtype}


def expected(values: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    by = module.Projection(**{n: values[n] for n in (*NAMES[3:11], "norm", "eps")})
    return module.reference(values["x"], by)


def found(values: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    layout = BlockLayout(16, 2, 24, values["format"], values["dtype"])
    k, v = paged.read(values["pool"], layout, torch.tensor([[0, 1]], dtype=torch.int32), torch.float64)
    kept = values["slots"].clamp(min=0)
    return k[0].transpose(0, 1)[kept], v[0].transpose(0, 1)[kept]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("norm", ["", "rms", "rms_plus_one", "layer"])
def test_matches_the_definition(dtype: torch.dtype, norm: str) -> None:
    values = arguments(dtype) | {"norm": norm}
    values |= {} if norm == "layer" else {"norm_bias": None}
    values |= {} if norm else {"norm_weight": None, "cos": None, "sin": None, "k_bias": None}
    OP(*values.values())
    for one, wanted in zip(found(values), expected(values), strict=True):
        kept = values["slots"] >= 0
        assert relative_error(one[kept], wanted[kept]) <= LIMIT[dtype]


def checkpoint(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows that `activation_append_q` writes for x [T, H], the values that they stand for)."""
    rows = torch.full((1, len(x), row_sizes.row_nbytes(x.shape[1], bits, group)), 0xFF, dtype=torch.uint8)
    activation_append_q_operator.activation_append_q(rows, x[None], torch.tensor([0]), bits, group)
    return rows[0], activation_append_q_reference.unpack(rows[0], x.shape[1], bits, group)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (8, 32), (4, 32)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_packed_weights_and_activations(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, bits: int, group: int, dtype: torch.dtype
) -> None:
    """Tokens fall into several tiles, the last of them partial."""
    if not compiled:
        monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(module, "TILE_TOKENS", 3)
    values = arguments(dtype)
    plain = dict(values)
    values["x"], plain["x"] = checkpoint(values["x"], bits, group)
    for name in ("k_weight", "v_weight"):
        parts = quantize.reference(values[name], 4, 32, -1, dtype)
        plain[name] = quantize.dequantize_reference(*parts, 4, 32, -1, 40)
        values[name] = packing.pack_rows(*parts)
    values |= {"weight_format": "w4g32", "x_bits": bits, "x_group": group}
    OP(*values.values())
    kept = values["slots"] >= 0
    for one, wanted in zip(found(values), expected(plain), strict=True):
        assert relative_error(one[kept], wanted[kept]) <= LIMIT[dtype]


def test_what_a_checkpoint_does_not_hold_makes_nan() -> None:
    values = arguments() | {"norm": "", "norm_weight": None, "norm_bias": None, "cos": None, "sin": None}
    values["x"][1, 3], values["x"][4, 5] = torch.nan, torch.inf
    values["x"], _ = checkpoint(values["x"], 8, 64)
    OP(*(values | {"x_bits": 8, "x_group": 64}).values())
    for one in found(values):
        assert one[[1, 4]].isnan().all() and one[[0, 2, 5, 6]].isfinite().all()


@pytest.mark.parametrize("format", ["native", "block4"])
def test_opcheck(format: str) -> None:
    opcheck(OP, tuple(arguments(format=format).values()))


def test_opcheck_of_checkpoints() -> None:
    values = arguments()
    opcheck(OP, tuple((values | {"x": checkpoint(values["x"], 8, 64)[0], "x_bits": 8, "x_group": 64}).values()))


def test_bad_arguments_are_named() -> None:
    good = arguments()
    changes: dict[str, list[Any]] = {
        "pool": [good["pool"].char(), good["pool"][:, 16:]],
        "x": [good["x"].float(), good["x"][:, 1:], good["x"][1:], good["x"].t().contiguous().t()],
        "slots": [good["slots"].int(), torch.tensor([0, 1, 2, 3, 4, 5, 99])],
        "k_weight": [good["k_weight"][:1], good["k_weight"].float()],
        "v_weight": [good["v_weight"].flatten(0, 1)],
        "norm_weight": [None, good["norm_weight"].float()],
        "norm_bias": [None, good["norm_bias"][1:]],
        "k_bias": [good["k_bias"][1:]],
        "sin": [None],
        "cos": [good["cos"][:, :11], good["cos"][1:], good["cos"].double()],
        "features": [0],
        "x_bits": [3],
        "norm": ["batch"],
        "weight_format": ["w3"],
        "format": ["kv1"],
        "block_tokens": [10],
    }
    for name, wrong in changes.items():
        for value in wrong:
            before = good["pool"].clone()
            with pytest.raises(ValueError, match=f"^kv_from_activation: {name} "):
                OP(*(good | {name: value}).values())
            assert torch.equal(good["pool"], before)
    rows = checkpoint(good["x"], 8, 64)[0]
    packed = good | {"x": rows, "x_bits": 8, "x_group": 64}
    odd = torch.zeros(7, rows.shape[1] + 1, dtype=torch.uint8)
    for name, value in (("x", good["x"]), ("x", rows[:, :-16]), ("x", odd[:, 1:]), ("x_group", 48), ("x", rows[1:])):
        with pytest.raises(ValueError, match=f"^kv_from_activation: {name} "):
            OP(*(packed | {name: value}).values())
