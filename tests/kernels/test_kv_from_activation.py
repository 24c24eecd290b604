"""The operator on the CPU: the definition, what it refuses, and torch's own checks of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_blocks import LIMIT, relative_error
from torch.library import opcheck

from forebay.kernels import kv_from_activation as module
from forebay.kernels import packing, paged, quantize
from forebay.kernels.paged import BlockLayout

OP = torch.ops.forebay.kv_from_activation.default
NAMES = ("pool", "x", "slots", "k_weight", "v_weight", "norm_weight", "norm_bias", "k_bias", "v_bias", "cos", "sin",
         "features", "norm", "eps", "weight_format", "kv_heads", "head_dim", "block_tokens", "format", "group_size",
         "dtype")  # fmt: skip


def arguments(dtype: torch.dtype = torch.float16, format: str = "native") -> dict[str, Any]:
    """Layer norm, biases and rotary over half of D: 7 tokens, H = 40, 2 KV heads of 24."""
    g = torch.Generator().manual_seed(7)
    layout = BlockLayout(16, 2, 24, format, dtype)
    values: dict[str, Any] = dict.fromkeys(NAMES)
    values |= {"pool": paged.allocate(layout, 2).fill_(0), "slots": torch.tensor([3, 30, 4, -1, 17, 0, 5])}
    shapes = {"x": (7, 40), "k_weight": (2, 24, 40), "v_weight": (2, 24, 40), "norm_weight": (40,), "norm_bias": (40,),
              "k_bias": (48,), "v_bias": (48,), "cos": (7, 12), "sin": (7, 12)}  # fmt: skip
    values |= {name: (torch.randn(shape, generator=g) / 2).to(dtype) for name, shape in shapes.items()}
    values |= {"features": 40, "norm": "layer", "eps": 1e-5, "weight_format": "native", "kv_heads": 2, "head_dim": 24}
    return values | {"block_tokens": 16, "format": format, "group_size": 0, "dtype": dtype}


def expected(values: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    given = [values[n] for n in ("x", *NAMES[3:11])]
    return module.reference(*given, norm=values["norm"], eps=values["eps"])


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


def test_packed_weights_and_activations() -> None:
    values = arguments()
    plain = dict(values)
    for name, bits, group in (("x", 8, 128), ("k_weight", 4, 32), ("v_weight", 4, 32)):
        parts = quantize.reference(values[name], bits, group, -1, torch.float16)
        plain[name] = quantize.dequantize_reference(*parts, bits, group, -1, 40)
        values[name] = packing.pack_rows(*parts)
    values["weight_format"] = "w4g32"
    OP(*values.values())
    kept = values["slots"] >= 0
    for one, wanted in zip(found(values), expected(plain), strict=True):
        assert relative_error(one[kept], wanted[kept]) <= 1e-3


@pytest.mark.parametrize("format", ["native", "kv4"])
def test_opcheck(format: str) -> None:
    opcheck(OP, tuple(arguments(format=format).values()))


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
