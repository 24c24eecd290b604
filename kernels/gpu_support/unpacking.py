"""Codes of 4 or 8 bits to fp16, bf16 or fp32 in registers: device functions.

Codes are read as 32-bit words. A shift, one three-input logic instruction and two packed multiply-adds make two values
at once: the code is or-ed into the mantissa of a power of two, which is subtracted again (exact), and q * scale + low
is rounded once. The two values of a word that come out together are four (4 bits) or two (8 bits) elements apart, so
who takes them works on as many interleaved parts of the dimension; no value moves between threads. On AMD and in the
interpreter plain Triton does the same in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

_HEAD = "{ .reg .b32 t, u, m, g, o, f; "
_FMA_END = " $0, t, $2, $3; }"


def _pair(kind: str, mask: int, magic: int, one: int, offset: int) -> tl.constexpr:
    """PTX for two 4-bit codes under mask in $1: $0 = ((code | magic) * one + offset) * $2 + $3, two halves at once."""
    fma = f"fma.rn.{kind}"
    return tl.constexpr(
        f"{_HEAD} mov.b32 m, {mask:#x}; mov.b32 g, {magic:#x}; mov.b32 o, {one:#x}; mov.b32 f, {offset:#x};"
        f" lop3.b32 t, $1, m, g, 0xEA; {fma} t, t, o, f; {fma}{_FMA_END}"
    )


def _byte_pair(kind: str, one: int, mask: int, low: int, high: int, offset: int) -> tl.constexpr:
    """PTX for two 8-bit codes: their low nibbles under mask in $1, their high ones in $4, both over powers of two.

    (16 q_high + high) + offset is exact and so is its sum with (q_low + low); offset = -(low + high).
    """
    fma = f"fma.rn.{kind}"
    return tl.constexpr(
        f"{_HEAD} mov.b32 m, {mask:#x}; mov.b32 g, {low:#x}; mov.b32 o, {one:#x}; mov.b32 f, {offset:#x};"
        f" lop3.b32 t, $1, m, g, 0xEA; mov.b32 g, {high:#x}; lop3.b32 u, $4, m, g, 0xEA;"
        f" {fma} u, u, o, f; {fma} t, t, o, u; {fma}{_FMA_END}"
    )


# bf16 has 7 mantissa bits: a nibble in bits 0 to 3 of 128; for bytes in bits 3 to 6 of 16 and of 256.
W4_BF16 = _pair("bf16x2", 0x000F000F, 0x43004300, 0x3F803F80, 0xC300C300)
W8_BF16 = _byte_pair("bf16x2", 0x3F803F80, 0x00780078, 0x41804180, 0x43804380, 0xC388C388)
# fp16 has 10: a nibble in bits 0 to 3 of 1024 or, times 1/16, in bits 4 to 7; for bytes in bits 6 to 9 of 16 and 256.
W4_FP16 = _pair("f16x2", 0x000F000F, 0x64006400, 0x3C003C00, 0xE400E400)
W4_FP16_HIGH = _pair("f16x2", 0x00F000F0, 0x64006400, 0x2C002C00, 0xD400D400)
W8_FP16 = _byte_pair("f16x2", 0x3C003C00, 0x03C003C0, 0x4C004C00, 0x5C005C00, 0xDC40DC40)


@triton.jit
def code_of(w, PART: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr):
    """Code of element PART + HALF * (16 / BITS) of each word w, as fp32."""
    SHIFT: tl.constexpr = PART * BITS + HALF * 16
    return ((w >> SHIFT) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def weights_of(w, scale, low, PART: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Weights [BN, 2 W] of elements PART and PART + 16 / BITS of each word of w [BN, W], in turn.

    scale and low [BN, W] are fp32, or with PTX each 32 bits of two equal values of DTYPE.
    """
    if PTX:
        if BITS == 4:
            if DTYPE.is_bf16():
                pair = tl.inline_asm_elementwise(
                    W4_BF16, "=r,r,r,r", [w >> (4 * PART), scale, low], dtype=tl.uint32, is_pure=True, pack=1
                )
            elif PART % 2 == 0:
                pair = tl.inline_asm_elementwise(
                    W4_FP16, "=r,r,r,r", [w >> (4 * PART), scale, low], dtype=tl.uint32, is_pure=True, pack=1
                )
            else:
                pair = tl.inline_asm_elementwise(
                    W4_FP16_HIGH, "=r,r,r,r", [w >> (4 * PART - 4), scale, low], dtype=tl.uint32, is_pure=True, pack=1
                )
        else:
            if DTYPE.is_bf16():
                nibbles = (w << 3) if PART == 0 else (w >> 5)
                highs = (w >> 1) if PART == 0 else (w >> 9)
                pair = tl.inline_asm_elementwise(
                    W8_BF16, "=r,r,r,r,r", [nibbles, scale, low, highs], dtype=tl.uint32, is_pure=True, pack=1
                )
            else:
                nibbles = (w << 6) if PART == 0 else (w >> 2)
                highs = (w << 2) if PART == 0 else (w >> 6)
                pair = tl.inline_asm_elementwise(
                    W8_FP16, "=r,r,r,r,r", [nibbles, scale, low, highs], dtype=tl.uint32, is_pure=True, pack=1
                )
        first = (pair & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
        second = (pair >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    else:
        first = (code_of(w, PART, 0, BITS) * scale + low).to(DTYPE)
        second = (code_of(w, PART, 1, BITS) * scale + low).to(DTYPE)
    return tl.reshape(tl.join(first, second), (w.shape[0], 2 * w.shape[1]))


@triton.jit
def spread(value, WORDS: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """value [BN, groups], one per group of WORDS words, for each word: in fp32, or with PTX twice in 32 bits."""
    if PTX:
        bits = value.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
        each = bits | (bits << 16)
    else:
        each = value.to(tl.float32)
    wide = tl.broadcast_to(each[:, :, None], (value.shape[0], value.shape[1], WORDS))
    return tl.reshape(wide, (value.shape[0], value.shape[1] * WORDS))
