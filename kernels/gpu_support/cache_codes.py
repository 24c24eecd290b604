"""Codes of a quantized cache as factors of the tensor cores, in registers: device functions.

A warp has 16 positions of K or V, as one batch of a product of three dimensions: words [B, 16, W] of codes, and scales
and lows [B, 16, groups]. What a thread reads of them goes straight to its own registers of the product: the orders of
positions and words below are those in which threads find neighbours in memory.

K: a code becomes fp16 by one logic instruction or byte permutation, which puts it under a power of two.
V: q * scale + low is rounded once, two positions at a time, which is how the second product wants its factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.gpu_support.cache_tiles import from_half, round_to
from forebay.kernels.gpu_support.unpacking import W4_BF16, W4_FP16, W4_FP16_HIGH, code_of

# How scales and lows of a tile come: fp32 [B, 16, groups], words of the only pair, or words [B, 16, groups / 2] of two
# groups.
PLAIN, PAIRS, HALVES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def _nibbles(mask: int, magic: int) -> tl.constexpr:
    """PTX for two 4-bit codes of $1 under mask, or-ed into the mantissas of fp16 powers of two."""
    return tl.constexpr(f"{{ .reg .b32 g; mov.b32 g, {magic:#x}; lop3.b32 $0, $1, {mask:#x}, g, 0xEA; }}")


def _byte_pair(order: int) -> tl.constexpr:
    """PTX for two bytes of $1 in fp16: ((code over 1024) - 1024) * $2 + $3, two halves at once."""
    return tl.constexpr(
        "{ .reg .b32 t, o, f; mov.b32 o, 0x3C003C00; mov.b32 f, 0xE400E400;"
        f" prmt.b32 t, $1, 0x64646464, {order:#x}; fma.rn.f16x2 t, t, o, f; fma.rn.f16x2 $0, t, $2, $3; }}"
    )


# fp16 has 10 mantissa bits: a code in bits 0 to 3 over 1024, or in bits 4 to 7 over 64; a byte over 1024.
KEY4_EVEN, KEY4_ODD = _nibbles(0x000F000F, 0x64006400), _nibbles(0x00F000F0, 0x54005400)
KEY8_EVEN = tl.constexpr("prmt.b32 $0, $1, 0x64646464, 0x4240;")
KEY8_ODD = tl.constexpr("prmt.b32 $0, $1, 0x64646464, 0x4341;")
VALUE8_EVEN, VALUE8_ODD = _byte_pair(0x4240), _byte_pair(0x4341)
# Byte 0 .. 3 of $1 as fp32 over 32768, whose mantissa has it in bits 8 to 15.
BYTE_0, BYTE_1, BYTE_2, BYTE_3 = (tl.constexpr(f"prmt.b32 $0, $1, 0x47000000, {0x7604 | k << 4:#x};") for k in range(4))
# The low, or the high, halves of $1 and $2, or those that $3 names; two fp32 numbers as bf16.
LOW_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, 0x5410;")
HIGH_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, 0x7632;")
CHOSEN_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
TWO_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@triton.jit
def one_input(block: tl.constexpr, x):
    """The 32-bit word that a block of PTX makes of a word."""
    return tl.inline_asm_elementwise(block, "=r,r", [x], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def two_inputs(block: tl.constexpr, x, y):
    """The 32-bit word that a block of PTX makes of two words."""
    return tl.inline_asm_elementwise(block, "=r,r,r", [x, y], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def scaled(block: tl.constexpr, w, scale, low):
    """Two values in one word: what a block of PTX makes of the codes of w."""
    return tl.inline_asm_elementwise(block, "=r,r,r,r", [w, scale, low], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def neighbours(x):
    """(rows 0, 2, ..., rows 1, 3, ...) of x [B, T, W]."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2, x.shape[2])), (0, 1, 3, 2)))


@triton.jit
def key_order(w):
    """Words [B, 16, W] as the product with K takes them: threads find neighbours in memory.

    Position 8 f + 4 e + c of a warp, bits f, e and two bits c, is in column 8 f + 2 c + e of the scores.
    """
    B: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[2]
    w = tl.permute(tl.reshape(w, (B, 2, 2, 4, 4, W // 8, 2)), (0, 1, 3, 2, 5, 4, 6))
    return tl.reshape(w, (B, 16, W))


@triton.jit
def score_order(x):
    """Numbers of positions and groups [B, 16, groups] as [B, groups, 16] in the order of the scores."""
    B: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[2]
    return tl.reshape(tl.permute(tl.reshape(x, (B, 2, 2, 4, G)), (0, 4, 1, 3, 2)), (B, G, 16))


@triton.jit
def even_first(x):
    """[B, groups, 1, 16] with groups 0, 2, ... before groups 1, 3, ..., of x [B, groups, 16]."""
    B: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    if G > 1:
        x = tl.permute(tl.reshape(x, (B, G // 2, 2, 16)), (0, 2, 1, 3))
    return tl.reshape(x, (B, G, 1, 16))


@triton.jit
def value_order(x, THREADS: tl.constexpr):
    """[B, 16, W] in the order in which the product with V takes positions; THREADS find neighbours along W."""
    B: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[2]
    return tl.reshape(tl.permute(tl.reshape(x, (B, 4, 4, THREADS, W // THREADS)), (0, 2, 1, 4, 3)), (B, 16, W))


@triton.jit
def per_word(x, W: tl.constexpr):
    """x [B, T, groups] for each of W words in value_order."""
    B: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[1]
    G: tl.constexpr = x.shape[2]
    x = tl.reshape(tl.broadcast_to(x[:, :, :, None], (B, T, G, W // G)), (B, T, 8, W // 8))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2)), (B, T, W))


@triton.jit
def key_codes(w, PART: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """fp16 [B, T, 2 W] of elements PART and PART + 16 / BITS of each word of w [B, T, W].

    With PTX they come plus 1024, or in the odd parts of 4 bits plus 64.
    """
    if PTX:
        if BITS == 4:
            pair = one_input(KEY4_EVEN if PART % 2 == 0 else KEY4_ODD, w >> (PART // 2 * 8))
        else:
            pair = one_input(KEY8_EVEN if PART == 0 else KEY8_ODD, w)
        first = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        second = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        first = code_of(w, PART, 0, BITS).to(tl.float16)
        second = code_of(w, PART, 1, BITS).to(tl.float16)
    return tl.reshape(tl.join(first, second), (w.shape[0], w.shape[1], 2 * w.shape[2]))


@triton.jit
def key_factors(scale, low, KIND: tl.constexpr):
    """(scale, low) [B, groups, 1, 16] in fp32, groups with even_first, positions in score_order, of load_codes."""
    if KIND == HALVES:
        scale, low = score_order(scale), score_order(low)
        scale = tl.permute(tl.join(from_half(scale), from_half(scale >> 16)), (0, 3, 1, 2))
        low = tl.permute(tl.join(from_half(low), from_half(low >> 16)), (0, 3, 1, 2))
        shape: tl.constexpr = (scale.shape[0], 2 * scale.shape[2], 1, 16)
        scale, low = tl.reshape(scale, shape), tl.reshape(low, shape)
    else:
        if KIND == PAIRS:
            scale, low = from_half(scale), from_half(scale >> 16)
        scale, low = even_first(score_order(scale)), even_first(score_order(low))
    return scale, low


@triton.jit
def byte_as_float(w, K: tl.constexpr):
    """Byte K of each word, plus 32768, in fp32."""
    word = one_input(BYTE_0 if K == 0 else (BYTE_1 if K == 1 else (BYTE_2 if K == 2 else BYTE_3)), w)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def value_part(
    even, odd, even_scale, odd_scale, even_low, odd_low,
    PART: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """V [B, T, W] of element PART + HALF * (16 / BITS) of each word, from the words of even and of odd rows.

    Scales and lows are in fp32, those of bytes in bf16 with 32768 * scale taken from low; or for PTX elsewhere one word
    of both rows in DTYPE, given as those of even rows.
    """
    B: tl.constexpr = even.shape[0]
    T: tl.constexpr = even.shape[1] * 2
    W: tl.constexpr = even.shape[2]
    if PTX and (BITS == 4 or DTYPE.is_fp16()):
        u = two_inputs(LOW_HALVES if HALF == 0 else HIGH_HALVES, even, odd)
        if BITS == 8:
            pair = scaled(VALUE8_EVEN if PART == 0 else VALUE8_ODD, u, even_scale, even_low)
        elif DTYPE.is_bf16():
            pair = scaled(W4_BF16, u >> (4 * PART), even_scale, even_low)
        else:
            pair = scaled(W4_FP16 if PART % 2 == 0 else W4_FP16_HIGH, u >> (PART // 2 * 8), even_scale, even_low)
        first = (pair & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
        second = (pair >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    else:
        if PTX:
            first, second = byte_as_float(even, PART + 2 * HALF), byte_as_float(odd, PART + 2 * HALF)
        else:
            first, second = code_of(even, PART, HALF, BITS), code_of(odd, PART, HALF, BITS)
        first = round_to(first * even_scale + even_low, DTYPE)
        second = round_to(second * odd_scale + odd_low, DTYPE)
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), (B, T, W))


@triton.jit
def chosen_halves(even, odd, PTX: tl.constexpr):
    """(of even rows, of odd rows) in fp32 and for each group, of words [B, T, groups / 2] of two groups each."""
    B: tl.constexpr = even.shape[0]
    T: tl.constexpr = even.shape[1]
    G: tl.constexpr = 2 * even.shape[2]
    even = tl.reshape(tl.broadcast_to(even[:, :, :, None], (B, T, G // 2, 2)), (B, T, G))
    odd = tl.reshape(tl.broadcast_to(odd[:, :, :, None], (B, T, G // 2, 2)), (B, T, G))
    second = (tl.arange(0, G) % 2)[None, None, :]
    if PTX:
        pair = tl.inline_asm_elementwise(
            CHOSEN_HALVES, "=r,r,r,r", [even, odd, 0x5410 + second * 0x2222], dtype=tl.int32, is_pure=True, pack=1
        )
        return from_half(pair), from_half(pair >> 16)
    else:
        return from_half(even >> (second * 16)), from_half(odd >> (second * 16))


@triton.jit
def both_halves(first, second, DTYPE: tl.constexpr):
    """Words of two fp32 numbers in DTYPE, the first in the low half."""
    if DTYPE.is_bf16():
        word = tl.inline_asm_elementwise(TWO_BF16, "=r,f,f", [first, second], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        low = first.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        word = low | (second.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return word


@triton.jit
def value_factors(
    scale, low, KIND: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(scales of even and of odd rows, lows of even and of odd rows) as value_part takes them, of load_codes."""
    es, os = neighbours(value_order(scale, 1))
    el, ol = neighbours(value_order(low, 1))
    WORDS: tl.constexpr = PTX and (BITS == 4 or DTYPE.is_fp16())
    if WORDS and KIND == PAIRS and DTYPE.is_fp16():
        s, b = two_inputs(LOW_HALVES, es, os), two_inputs(HIGH_HALVES, el, ol)
    else:
        if KIND == PAIRS:
            es, el = from_half(es), from_half(es >> 16)
            os, ol = from_half(os), from_half(os >> 16)
        elif KIND == HALVES:
            es, os = chosen_halves(es, os, PTX)
            el, ol = chosen_halves(el, ol, PTX)
        if WORDS:
            s, b = both_halves(es, os, DTYPE), both_halves(el, ol, DTYPE)
    if WORDS:
        s, b = per_word(s, W), per_word(b, W)
        return s, s, b, b
    else:
        if PTX:
            el -= 32768.0 * es
            ol -= 32768.0 * os
        return per_word(es, W), per_word(os, W), per_word(el, W), per_word(ol, W)


@triton.jit
def values_of_codes(
    w, scale, low, BITS: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """V [B, T, DP] of words w [B, T, W]: columns in the order (element of a word, word in value_order)."""
    B: tl.constexpr = w.shape[0]
    T: tl.constexpr = w.shape[1]
    W: tl.constexpr = w.shape[2]
    es, os, el, ol = value_factors(scale, low, KIND, W, BITS, DTYPE, PTX)
    even, odd = neighbours(value_order(w, 8))
    a = value_part(even, odd, es, os, el, ol, 0, 0, BITS, DTYPE, PTX)
    b = value_part(even, odd, es, os, el, ol, 1, 0, BITS, DTYPE, PTX)
    e = value_part(even, odd, es, os, el, ol, 0, 1, BITS, DTYPE, PTX)
    f = value_part(even, odd, es, os, el, ol, 1, 1, BITS, DTYPE, PTX)
    if BITS == 8:
        v = tl.permute(tl.join(tl.join(a, b), tl.join(e, f)), (0, 1, 4, 3, 2))
    else:
        c = value_part(even, odd, es, os, el, ol, 2, 0, BITS, DTYPE, PTX)
        d = value_part(even, odd, es, os, el, ol, 3, 0, BITS, DTYPE, PTX)
        g = value_part(even, odd, es, os, el, ol, 2, 1, BITS, DTYPE, PTX)
        h = value_part(even, odd, es, os, el, ol, 3, 1, BITS, DTYPE, PTX)
        first, second = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
        v = tl.permute(tl.join(first, second), (0, 1, 5, 4, 3, 2))
    return tl.reshape(v, (B, T, W * (32 // BITS)))


def _four_bytes(bits: int, dtype: str) -> tl.constexpr:
    """PTX for a word of four bytes of codes: each code comes as fp32 over 32768, whose mantissa has it in bits 8 to 15,
    is multiplied and added to in fp32 and rounded. Words $0, $1 of two values each, or of 4 bits $0 to $3."""
    words = 2 if bits == 8 else 4
    code, scale, low = words, words + 1, words + 5
    lines = [".reg .b32 l, h, a, b;", f"mov.b32 l, ${code};"]
    if bits == 4:
        lines += ["shr.b32 h, l, 0x4; and.b32 h, h, 0x0F0F0F0F; and.b32 l, l, 0x0F0F0F0F;"]
    for word in range(words):
        first, second = (2 * word, 2 * word + 1) if bits == 8 else (word, word)
        for name, source, byte in (("a", "l", first), ("b", "l" if bits == 8 else "h", second)):
            lines += [f"prmt.b32 {name}, {source}, 0x47000000, {0x7604 | byte << 4:#x};",
                      f"fma.rn.f32 {name}, {name}, ${scale + byte}, ${low + byte};"]  # fmt: skip
        lines += [f"cvt.rn.{dtype}x2.f32 ${word}, b, a;"]
    return tl.constexpr(f"{{ {' '.join(lines)} }}")


BYTES_BF16, BYTES_FP16 = _four_bytes(8, "bf16"), _four_bytes(8, "f16")
NIBBLES_BF16, NIBBLES_FP16 = _four_bytes(4, "bf16"), _four_bytes(4, "f16")


@triton.jit
def values_of_bytes(code, scale, low, dtype: tl.constexpr, BITS: tl.constexpr):
    """[T, W * 8 / BITS] of dtype, code * scale + low, of bytes of codes [T, W], and scales and lows of each byte."""
    T: tl.constexpr = code.shape[0]
    low -= 32768.0 * scale
    if BITS == 8:
        x = tl.inline_asm_elementwise(
            BYTES_BF16 if dtype.is_bf16() else BYTES_FP16, "=r,=r,r,f,f,f,f,f,f,f,f", [code, scale, low],
            dtype=tl.uint16, is_pure=True, pack=4,
        ).to(dtype, bitcast=True)  # fmt: skip
    else:
        pair = tl.inline_asm_elementwise(
            NIBBLES_BF16 if dtype.is_bf16() else NIBBLES_FP16, "=r,=r,=r,=r,r,f,f,f,f,f,f,f,f", [code, scale, low],
            dtype=tl.uint32, is_pure=True, pack=4,
        )  # fmt: skip
        first = (pair & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        second = (pair >> 16).to(tl.uint16).to(dtype, bitcast=True)
        x = tl.reshape(tl.join(first, second), (T, 2 * code.shape[1]))
    return x


@triton.jit
def per_lane(x, LANES: tl.constexpr):
    """x [T, groups] for each of LANES lanes, [T, LANES]."""
    T: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], (T, G, LANES // G)), (T, LANES))
