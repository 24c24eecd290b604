"""GGUF's blocks whose codes are places in a grid, eight or four values each: IQ1, IQ2 and IQ3, as `gguf_blocks` has it.

Each value of a grid is one of few magnitudes, so it fits a code of 4 bits. The grids are those of the `gguf` package.
d is a block's factor in fp16, s a group's, v a value of the grid, with its sign.

    IQ1_S                  groups of 32: d (2s + 1) / 8 (8v +- 1), v is -1, 0 or 1; the sign is a group's
    IQ1_M                  groups of 16: the same, with a sign for 8 values
    IQ2_XXS                groups of 32: d (2s + 1) / 8 v, |v| is 8, 25 or 43
    IQ2_XS, IQ2_S          the same in groups of 16
    IQ3_XXS                groups of 32: d (2s + 1) / 4 v, |v| is one of 8
    IQ3_S                  groups of 32: d (2s + 1) v, v is odd, from -15 to 15

Codes are places in codebooks: iq1 of odd numbers over 16, iq2 and iq3 of |v| / 64. Scales are rounded to fp16.
"""

from __future__ import annotations

import functools

import numpy as np

GridBlocks = np.ndarray  # uint8 [blocks, bytes of a block]
GridParts = tuple[np.ndarray, np.ndarray, np.ndarray | int]  # as `gguf_blocks.BlockParts`
NO_LOW = 8  # the code that moves nowhere in rows with a codebook
BITS = np.arange(8, dtype=np.uint8)


@functools.cache
def grid_of(name: str) -> np.ndarray:
    """The grid of a type: int16 [entries, values of each]."""
    from gguf import GGMLQuantizationType, quants

    kind = quants._type_traits[GGMLQuantizationType[name]]
    kind.init_grid()
    assert kind.grid is not None
    return kind.grid.reshape(kind.grid_shape).astype(np.int16)


@functools.cache
def _places(name: str) -> np.ndarray:
    """The same, each value as its place among the magnitudes: uint8."""
    grid = grid_of(name)
    return np.searchsorted(np.unique(grid), grid).astype(np.uint8)


@functools.cache
def _seven_signs() -> np.ndarray:
    """The signs of 8 values by their first 7: the last one makes their number even. uint8 [128, 8]."""
    seven = np.arange(128, dtype=np.uint8)[:, None] >> BITS & 1
    seven[:, 7] = seven.sum(1) & 1
    return seven


def _half(blocks: GridBlocks, at: int = 0) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _words(blocks: GridBlocks, begin: int, end: int, dtype: type[np.unsignedinteger]) -> np.ndarray:
    return blocks[:, begin:end].copy().view(dtype)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The two halves of each byte, the low one first."""
    return np.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1)


def _steps(d: np.ndarray, factors: np.ndarray, unit: float) -> np.ndarray:
    return d * ((2 * factors.astype(np.float32) + 1) * np.float32(unit))


def _signed(places: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Codes [blocks, 256] of a codebook whose upper half is negative."""
    return (places | signs.reshape(places.shape) << 3).reshape(len(places), -1)


def iq2_xxs(blocks: GridBlocks) -> GridParts:
    """Decode each 32 values: four entries of a byte, then 4 times 7 signs and the factor in a word."""
    words = _words(blocks, 2, 66, np.uint32).reshape(len(blocks), 8, 2)
    entries = words[..., 0].copy().view(np.uint8).reshape(len(blocks), 32)
    signs = _seven_signs()[words[..., 1:] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    return _signed(_places("IQ2_XXS")[entries], signs), _steps(_half(blocks), words[..., 1] >> 28, 8), NO_LOW


def iq2_xs(blocks: GridBlocks) -> GridParts:
    words = _words(blocks, 2, 66, np.uint16)
    codes = _signed(_places("IQ2_XS")[words & 511], _seven_signs()[words >> 9])
    return codes, _steps(_half(blocks), _nibbles(blocks[:, 66:74]), 8), NO_LOW


def iq2_s(blocks: GridBlocks) -> GridParts:
    high = blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    entries = blocks[:, 2:34] | high.reshape(len(blocks), -1).astype(np.uint16) << 8
    codes = _signed(_places("IQ2_S")[entries], blocks[:, 34:66, None] >> BITS & 1)
    return codes, _steps(_half(blocks), _nibbles(blocks[:, 74:82]), 8), NO_LOW


def iq3_xxs(blocks: GridBlocks) -> GridParts:
    words = _words(blocks, 66, 98, np.uint32)
    signs = _seven_signs()[words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    return _signed(_places("IQ3_XXS")[blocks[:, 2:66]], signs), _steps(_half(blocks), words >> 28, 16), NO_LOW


def iq3_s(blocks: GridBlocks) -> GridParts:
    high = (blocks[:, 66:74, None] >> BITS & 1).reshape(len(blocks), 64)
    signs = blocks[:, 74:106, None] >> BITS & 1
    codes = _signed(_places("IQ3_S")[blocks[:, 2:66] | high.astype(np.uint16) << 8], signs)
    return codes, _steps(_half(blocks), _nibbles(blocks[:, 106:110]), 16), NO_LOW


def iq1_s(blocks: GridBlocks) -> GridParts:
    high = _words(blocks, 34, 50, np.uint16)
    entries = blocks[:, 2:34] | (high[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32) << 8
    moved = np.where(high & 0x8000, np.int16(-1), np.int16(1))[..., None]
    values = 8 * grid_of("IQ1_S")[entries].reshape(len(blocks), 8, 32) + moved
    return _odd_codes(values), _steps(_half(blocks), high >> 12 & 7, 2), NO_LOW


def iq1_m(blocks: GridBlocks) -> GridParts:
    words = _words(blocks, 48, 56, np.uint16)
    d = ((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)).sum(1, dtype=np.uint16, keepdims=True)
    factors = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), 16)
    high = _nibbles(blocks[:, 32:48])
    moved = np.where(high & 8, np.int16(-1), np.int16(1))[..., None]
    values = 8 * grid_of("IQ1_M")[blocks[:, :32] | (high & 7).astype(np.uint16) << 8] + moved
    return _odd_codes(values), _steps(d.view(np.float16).astype(np.float32), factors, 2), NO_LOW


def _odd_codes(values: np.ndarray) -> np.ndarray:
    """Codes [blocks, 256] of odd numbers from -15 to 15, by their magnitude and sign."""
    return (np.abs(values) >> 1 | (values < 0) << 3).astype(np.uint8).reshape(len(values), -1)
