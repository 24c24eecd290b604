"""Numbers that codes stand for by a codebook (`kernels.formats.codebooks`): device functions."""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.formats.codebooks import CODEBOOKS, FOURS

E4M3, E2M1 = tl.constexpr(CODEBOOKS.index("e4m3")), tl.constexpr(CODEBOOKS.index("e2m1"))
NF4, FP4 = tl.constexpr(CODEBOOKS.index("nf4")), tl.constexpr(CODEBOOKS.index("fp4"))
IQ1, IQ2 = tl.constexpr(CODEBOOKS.index("iq1")), tl.constexpr(CODEBOOKS.index("iq2"))
_NF4, _FP4 = tl.constexpr(FOURS["nf4"]), tl.constexpr(FOURS["fp4"][:8])
_IQ1, _IQ2, _IQ3 = tl.constexpr(FOURS["iq1"][:8]), tl.constexpr(FOURS["iq2"][:8]), tl.constexpr(FOURS["iq3"][:8])


@triton.jit
def number_of(code, CODEBOOK: tl.constexpr):
    """Return the values of int32 codes, in fp32."""
    if CODEBOOK <= E2M1:
        MANTISSA: tl.constexpr = 3 if CODEBOOK == E4M3 else 1
        BIAS: tl.constexpr = 7 if CODEBOOK == E4M3 else 1
        SIGN: tl.constexpr = 7 if CODEBOOK == E4M3 else 3
        magnitude = code & ((1 << SIGN) - 1)
        normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        small = magnitude.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA)
        value = tl.where(magnitude < (1 << MANTISSA), small, normal)
        return tl.where((code >> SIGN) != 0, -value, value)
    GRID: tl.constexpr = _IQ1 if CODEBOOK == IQ1 else _IQ2 if CODEBOOK == IQ2 else _IQ3
    SIGNED: tl.constexpr = _FP4 if CODEBOOK == FP4 else GRID
    VALUES: tl.constexpr = _NF4 if CODEBOOK == NF4 else SIGNED
    place = code if CODEBOOK == NF4 else code & 7
    value = tl.zeros(code.shape, tl.float32)
    for i in tl.static_range(16 if CODEBOOK == NF4 else 8):
        value = tl.where(place == i, VALUES[i], value)
    return value if CODEBOOK == NF4 else tl.where(code > 7, -value, value)


@triton.jit
def coded_scale(upper, lower, SYMMETRIC: tl.constexpr):
    """fp32 scales of rows with a codebook: as they are, or the upper and lower halves of their bits."""
    if SYMMETRIC:
        return upper.to(tl.float32)
    high = upper.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return (high | lower.to(tl.uint16, bitcast=True).to(tl.uint32)).to(tl.float32, bitcast=True)
