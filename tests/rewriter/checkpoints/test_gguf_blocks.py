"""Blocks of every type that rows hold, against the dequantization of the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from forebay.kernels.formats import packing
from forebay.kernels.quantization.quantize.operator import dequantize
from forebay.rewriter.checkpoints.gguf_blocks import BLOCK_KINDS, BlockKind, repack, representable

# Bytes at which a block's fp16 factors stand, and the kinds whose scales are products that fp16 rounds.
FACTORS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
           "Q6_K": (208,), "MXFP4": ()}
GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
ROUNDED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", *GRIDS)


def random_blocks(name: str, rows: int, count: int, size: float = 0.01, seed: int = 0) -> np.ndarray:
    """Rows of `count` blocks of random bytes, whose factors are numbers about `size`, some of them 0 and negative."""
    kind, random = BLOCK_KINDS[name], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * count, kind.nbytes), dtype=np.uint8)
    for at in FACTORS.get(name, (0,)):
        with np.errstate(over="ignore"):
            factors = (random.standard_normal((len(blocks), 1)) * size).astype(np.float16)
        factors[::7] = 0
        put_factors(name, blocks, at, factors)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(90, 150, len(blocks))
    return blocks.reshape(rows, -1)


def put_factors(name: str, blocks: np.ndarray, at: int, factors: np.ndarray) -> None:
    """Put an fp16 factor into each block: of IQ1_M into the upper 4 bits of four words."""
    bits = factors.reshape(-1, 1).view(np.uint16)
    if name != "IQ1_M":
        blocks[:, at : at + 2] = bits.view(np.uint8)
        return
    nibbles = bits >> np.array([0, 4, 8, 12], np.uint16) & 15
    words = blocks[:, 48:].copy().view(np.uint16) & 0x0FFF | nibbles << 12
    blocks[:, 48:] = words.view(np.uint8)


def values_of(rows: torch.Tensor, kind: BlockKind, k: int) -> torch.Tensor:
    parts = packing.unpack_rows(rows, k, kind.bits, kind.group, kind.scale_dtype, kind.symmetric)
    return dequantize(*parts, kind.bits, kind.group, -1, k, torch.float32, kind.codebook)


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_rows_hold_what_the_blocks_stand_for(name: str) -> None:
    """Bit for bit where scales are the file's own; else to the rounding of scale and low, 2^-11 of each, and of fp16's
    numbers that are not normal, 2^-24."""
    kind = BLOCK_KINDS[name]
    blocks = random_blocks(name, 5, 3)
    expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]))
    found = values_of(repack(blocks, kind), kind, 3 * kind.values)
    assert found.shape == expected.shape and found.abs().max() > 0
    if name not in ROUNDED:
        assert torch.equal(found, expected)
        return
    _, scale, low = kind.parts(blocks.reshape(-1, kind.nbytes))
    low = scale * (1 << kind.bits - 1) if isinstance(low, int) else low
    most = np.abs(scale) * ((1 << kind.bits) - 1 if kind.bits == 4 else 255) + np.abs(low)
    bound = torch.from_numpy(most).repeat_interleave(kind.group, 1).reshape(5, -1) * 2**-11 + 256 * 2**-24
    assert ((found - expected).abs() <= bound).all()
    assert (found - expected).norm() < 4e-4 * expected.norm()


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_sizes_are_the_formats(name: str) -> None:
    kind = BLOCK_KINDS[name]
    assert (kind.values, kind.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", ["Q3_K", "Q6_K", "IQ4_XS"])
def test_the_code_of_zero_stands_for_zero(name: str) -> None:
    """Scales are rounded before lows are taken from them: what the file holds as 0 is 0."""
    kind = BLOCK_KINDS[name]
    blocks = random_blocks(name, 4, 2)
    expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]))
    found = values_of(repack(blocks, kind), kind, 2 * kind.values)
    assert (expected == 0).any() and torch.equal(found[expected == 0], expected[expected == 0])


@pytest.mark.parametrize("name", [n for n in BLOCK_KINDS if n not in ("MXFP4", "Q4_1", "Q5_1")])
def test_factors_beyond_the_rows_dtype_are_seen(name: str) -> None:
    kind = BLOCK_KINDS[name]
    assert representable(random_blocks(name, 2, 1), kind)
    assert not representable(random_blocks(name, 20, 1, size=3e4), kind)
    torn = random_blocks(name, 2, 1)
    at = FACTORS.get(name, (0,))[0]
    put_factors(name, torn[1:], at, np.array([np.nan], np.float16))
    assert not representable(torn, kind)
