"""K and V from activations in Triton, interpreted, against the definition in float64."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels_blocks import LIMIT, relative_error

from forebay.kernels.cache.activation_append_q import reference as activation_append_q
from forebay.kernels.cache.kv_from_activation import operator as op_operator
from forebay.kernels.cache.kv_from_activation import reference as op_reference
from forebay.kernels.formats import packing, paged
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.formats.table import WEIGHT_FORMATS
from forebay.kernels.quantization.quantize import reference as quantize


@dataclass(frozen=True)
class Work:
    """Arguments of one call, and the values that the packed ones stand for."""

    layout: BlockLayout
    x: torch.Tensor
    k_weight: torch.Tensor
    v_weight: torch.Tensor
    vectors: dict[str, Any]
    features: int
    x_bits: int
    x_group: int
    norm: str
    weight_format: str
    x_values: torch.Tensor
    k_values: torch.Tensor
    v_values: torch.Tensor

    def launch(self, pool: torch.Tensor, slots: torch.Tensor) -> None:
        states = op_reference.States(self.x, self.features, self.x_bits, self.x_group)
        by = op_reference.Projection(self.k_weight, self.v_weight, self.weight_format, self.norm, 1e-5, **self.vectors)
        op_operator.launch(pool, states, slots, by, self.layout)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        by = op_reference.Projection(self.k_values, self.v_values, "native", self.norm, 1e-5, **self.vectors)
        return op_reference.reference(self.x_values, by)


def packed(x: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, values that they stand for) of x [..., K]."""
    parts = quantize.reference(x, bits, group, -1, dtype)
    return packing.pack_rows(*parts), quantize.dequantize_reference(*parts, bits, group, -1, x.shape[-1])


def work(
    dtype: torch.dtype, norm: str = "rms", rotary: int = 0, format: str = "native", weights: str = "native",
    act: tuple[int, int] = (0, 0), tokens: int = 19, features: int = 72, kv_heads: int = 2, dim: int = 24,
) -> Work:  # fmt: skip
    g = torch.Generator().manual_seed(7)
    x = (torch.randn(tokens, features, generator=g) + 0.5).to(dtype)
    shape = (kv_heads, dim, features)
    k_weight, v_weight = (torch.randn(shape, generator=g).mul_(features**-0.5).to(dtype) for _ in "kv")
    vectors: dict[str, Any] = {}
    if norm:
        vectors["norm_weight"] = (1 + 0.1 * torch.randn(features, generator=g)).to(dtype)
    if norm == "layer":
        vectors["norm_bias"] = (0.1 * torch.randn(features, generator=g)).to(dtype)
        vectors |= {n: torch.randn(kv_heads * dim, generator=g).to(dtype) for n in ("k_bias", "v_bias")}
    if rotary:
        angle = torch.randn(tokens, rotary // 2, generator=g).repeat(1, 2)
        vectors |= {"cos": angle.cos(), "sin": angle.sin()}
    values = [x, k_weight, v_weight]
    given = list(values)
    if act[0]:
        given[0] = activation_append_q.pack(x, *act)
        values[0] = activation_append_q.unpack(given[0], features, *act)
    if weights != "native":
        bits, group = WEIGHT_FORMATS[weights].bits, WEIGHT_FORMATS[weights].group_size
        for i in (1, 2):
            given[i], values[i] = packed(given[i], bits, group, dtype)
    return Work(BlockLayout(16, kv_heads, dim, format, dtype), *given, vectors, features, *act, norm, weights, *values)


def stored(made: Work, slots: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pool, k, v [T, Hkv, D]) after a launch into a pool of 0xFF, tokens in scattered slots."""
    count = made.x.shape[0]
    if slots is None:
        slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:count]
    pool = paged.allocate(made.layout, 3).fill_(0xFF)
    made.launch(pool, slots)
    k, v = paged.read(pool, made.layout, torch.arange(3)[None].int(), torch.float64)
    return pool, k[0].transpose(0, 1)[slots], v[0].transpose(0, 1)[slots]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "options",
    [{"norm": "", "features": 50}, {"rotary": 24}, {"norm": "rms_plus_one", "rotary": 8}, {"norm": "layer"},
     {"weights": "w4g32"}, {"weights": "w8", "act": (8, 64), "features": 200},
     {"act": (8, 64), "norm": "layer", "features": 100}, {"act": (8, 128), "rotary": 24, "weights": "w4g32"},
     {"act": (8, 32), "norm": "", "features": 37}, {"act": (4, 32)},
     {"features": 256, "norm": "layer", "tokens": 48}, {"features": 512, "weights": "w4g32", "act": (4, 64)},
     {"features": 384, "weights": "w4g64", "act": (8, 64), "norm": "layer"}, {"features": 256, "weights": "w8"},
     {"features": 128, "weights": "w4g128", "tokens": 16, "dim": 40, "norm": "rms_plus_one", "rotary": 24},
     {"features": 192, "weights": "w4g128", "dim": 136, "act": (8, 128)}],
    ids=lambda o: "-".join(f"{k}{v}" for k, v in o.items()),
)  # fmt: skip
def test_matches_the_definition(dtype: torch.dtype, options: dict[str, Any]) -> None:
    made = work(dtype, **options)
    _, k, v = stored(made)
    k_wanted, v_wanted = made.expected()
    assert relative_error(k, k_wanted) <= LIMIT[dtype]
    assert relative_error(v, v_wanted) <= LIMIT[dtype]


def test_layer_norm_of_activations_far_from_zero() -> None:
    """The first features lie a hundred deviations off the rest, and all of them off zero."""
    made = work(torch.float16, norm="layer", features=576, tokens=5)
    made.x.mul_(0.25).add_(20)
    made.x[:, :64] += 25
    _, k, v = stored(made)
    for found, wanted in zip((k, v), made.expected(), strict=True):
        assert relative_error(found, wanted) <= LIMIT[torch.float16]


def test_packed_rows_must_be_aligned() -> None:
    made = work(torch.float16, weights="w4g32")
    wide = torch.zeros(*made.k_weight.shape[:2], made.k_weight.shape[2] + 8, dtype=torch.uint8)
    pool = paged.allocate(made.layout, 3)
    with pytest.raises(ValueError, match="k_weight must have rows at multiples of 16 bytes"):
        replace(made, k_weight=wide[:, :, :-8]).launch(pool, torch.arange(19))


@pytest.mark.parametrize("format", ["block8", "block4"])
def test_quantised_blocks_hold_the_codes_of_quantize(format: str) -> None:
    """The same record, to the bit, as writing what the kernel gives in native blocks."""
    made = work(torch.float16, format=format, rotary=24, kv_heads=1, dim=40)
    plain = replace(made, layout=replace(made.layout, format="native"))
    slots = torch.arange(5, 24)
    _, k, v = stored(plain, slots)
    wanted = paged.allocate(made.layout, 3).fill_(0xFF)
    paged.write(wanted, made.layout, slots, k.half(), v.half())
    assert torch.equal(stored(made, slots)[0], wanted)


def test_strided_weights_and_slots_left_out() -> None:
    """GPT-2's [in, out] matrix; negative slots and slots beyond the pool leave every byte as it was."""
    made = work(torch.float16, tokens=5)
    turned = replace(made, k_weight=made.k_weight.transpose(1, 2).contiguous().transpose(1, 2))
    slots = torch.tensor([3, -1, 17, 48, 4])
    pool = paged.allocate(made.layout, 3).fill_(0xFF)
    turned.launch(pool, slots)
    k = paged.values(pool, made.layout)[:, 0].transpose(1, 2).flatten(0, 1)  # [slots, Hkv, D]
    kept = [0, 2, 4]
    assert relative_error(k[slots[kept]], made.expected()[0][kept]) <= 1e-3
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert k[untouched].isnan().all()


def test_nan_and_infinity_do_as_torch() -> None:
    made = work(torch.float16, norm="", tokens=4)
    made.x[1, 3], made.x[2, 5] = torch.nan, torch.inf
    _, k, v = stored(made)
    k_wanted, v_wanted = made.expected()
    for found, wanted in ((k, k_wanted), (v, v_wanted)):
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
