// Rows of quantized groups (see packing.py): where codes, scales and lows lie, and how a group is made and read back.
#pragma once

#include <algorithm>
#include <limits>

#include "codebooks.h"
#include "vector_math.h"

namespace forebay {

// The low of a symmetric group over its scale.
FB_INLINE constexpr float symmetric_low(int32_t bits) { return -float(1 << (bits - 1)); }

// One packed row of `count` groups: codes, then scales, then lows, unless it is symmetric. Scales are of type S, at any
// even address.
struct GroupFormat {
  int64_t group, count;  // elements per group, groups per row
  int32_t bits, scale_dtype, symmetric, codebook = WHOLE;
  int64_t codes_nbytes() const { return count * group * bits / 8; }
  int64_t scales_nbytes() const { return count * 2; }
  int64_t factors_nbytes() const { return symmetric ? 2 : 4; }  // a group's scale, and low
};

FB_INLINE float scale_at(const uint8_t* scales, int32_t dtype, int64_t g) {
  return dtype == F16 ? load_one(reinterpret_cast<const f16*>(scales) + g)
                      : load_one(reinterpret_cast<const bf16*>(scales) + g);
}

// The low of group g of a row whose scales are there.
FB_INLINE float low_at(const uint8_t* scales, const GroupFormat& f, int64_t g) {
  return f.symmetric ? symmetric_low(f.bits) * scale_at(scales, f.scale_dtype, g)
                     : scale_at(scales + f.scales_nbytes(), f.scale_dtype, g);
}

// Elements [0, n) of the group whose codes begin at `codes`: q * scale + low, one rounding (the product is exact).
FB_INLINE void dequantize_group(const uint8_t* codes, int32_t bits, float scale, float low, int64_t n, float* to) {
  int64_t i = 0;
#if defined(__AVX2__)
  const __m256 s = _mm256_set1_ps(scale), l = _mm256_set1_ps(low);
  auto store8 = [&](float* at, __m128i bytes) {
    const __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    _mm256_storeu_ps(at, _mm256_add_ps(_mm256_mul_ps(q, s), l));
  };
  if (bits == 4) {
    const __m128i nibble = _mm_set1_epi8(15);
    for (; i + 32 <= n; i += 32) {
      const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
      const __m128i even = _mm_and_si128(packed, nibble), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
      const __m128i first = _mm_unpacklo_epi8(even, odd), second = _mm_unpackhi_epi8(even, odd);
      store8(to + i, first);
      store8(to + i + 8, _mm_unpackhi_epi64(first, first));
      store8(to + i + 16, second);
      store8(to + i + 24, _mm_unpackhi_epi64(second, second));
    }
    for (; i + 16 <= n; i += 16) {
      const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i / 2));
      const __m128i both = _mm_unpacklo_epi8(_mm_and_si128(packed, nibble),
                                             _mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
      store8(to + i, both);
      store8(to + i + 8, _mm_unpackhi_epi64(both, both));
    }
    if (i + 8 <= n) {
      int32_t bytes;
      std::memcpy(&bytes, codes + i / 2, 4);
      const __m128i packed = _mm_cvtsi32_si128(bytes);
      store8(to + i, _mm_unpacklo_epi8(_mm_and_si128(packed, nibble),
                                       _mm_and_si128(_mm_srli_epi16(packed, 4), nibble)));
      i += 8;
    }
  } else {
    for (; i + 8 <= n; i += 8) store8(to + i, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
  }
#elif defined(__aarch64__)
  const float32x4_t s = vdupq_n_f32(scale), l = vdupq_n_f32(low);
  auto store8 = [&](float* at, uint8x8_t bytes) {
    const uint16x8_t q = vmovl_u8(bytes);
    vst1q_f32(at, vfmaq_f32(l, vcvtq_f32_u32(vmovl_u16(vget_low_u16(q))), s));
    vst1q_f32(at + 4, vfmaq_f32(l, vcvtq_f32_u32(vmovl_high_u16(q)), s));
  };
  if (bits == 4) {
    for (; i + 16 <= n; i += 16) {
      const uint8x8_t packed = vld1_u8(codes + i / 2);
      const uint8x8_t even = vand_u8(packed, vdup_n_u8(15)), odd = vshr_n_u8(packed, 4);
      store8(to + i, vzip1_u8(even, odd));
      store8(to + i + 8, vzip2_u8(even, odd));
    }
  } else {
    for (; i + 8 <= n; i += 8) store8(to + i, vld1_u8(codes + i));
  }
#endif
  for (; i < n; ++i) {
    const int q = bits == 8 ? codes[i] : (codes[i / 2] >> (4 * (i & 1))) & 15;
    to[i] = float(q) * scale + low;
  }
}

// The scale of group g of a row with a codebook: halves of its bits lie where scales and lows do, unless symmetric.
FB_INLINE float coded_scale(const uint8_t* scales, const uint8_t* lows, int32_t dtype, int64_t g) {
  if (!lows) return scale_at(scales, dtype, g);
  uint16_t upper, lower;
  std::memcpy(&upper, scales + 2 * g, 2);
  std::memcpy(&lower, lows + 2 * g, 2);
  return bits_to_float(uint32_t(upper) << 16 | lower);
}

// Elements [from, from + n) of group g of a packed row.
FB_INLINE void dequantize_part(const uint8_t* row, const GroupFormat& f, int64_t g, int64_t from, int64_t n, float* to) {
  const uint8_t *scales = row + f.codes_nbytes(), *codes = row + (g * f.group + from) * f.bits / 8;
  if (f.codebook)
    look_up_group(codes, f.codebook, coded_scale(scales, f.symmetric ? nullptr : scales + f.scales_nbytes(),
                                                 f.scale_dtype, g), n, to);
  else dequantize_group(codes, f.bits, scale_at(scales, f.scale_dtype, g), low_at(scales, f, g), n, to);
}

// Elements [begin, begin + n) of a packed row, begin at a group's start.
FB_INLINE void dequantize_row(const uint8_t* row, const GroupFormat& f, int64_t begin, int64_t n, float* to) {
  for (int64_t g = begin / f.group, i = 0; i < n; ++g, i += f.group)
    dequantize_part(row, f, g, 0, std::min(f.group, n - i), to + i);
}

// The number next to a finite v, upward or downward, in the storage type of its bits.
FB_INLINE uint16_t next_bits(uint16_t bits, bool up) {
  if ((bits & 0x7fff) == 0) return up ? 0x0001 : 0x8001;
  const bool negative = bits & 0x8000;
  return up != negative ? uint16_t(bits + 1) : uint16_t(bits - 1);
}

template <class S> FB_INLINE void store_bits(S* to, S value) { std::memcpy(to, &value, sizeof value); }

template <class S> struct Range { S scale, low; float step, base; };

// The range of least and most rounded outward to S; its scale is NaN where S cannot hold it.
template <class S> FB_INLINE Range<S> min_max_range(float least, float most, int32_t bits) {
  const float top = float((1 << bits) - 1);
  Range<S> r;
  from_float(least + 0.0f, &r.low);  // -0 becomes 0
  if (to_float(r.low) > least) r.low.bits = next_bits(r.low.bits, false);
  r.base = to_float(r.low);
  const float span = most - r.base + 0.0f;
  from_float(span / top, &r.scale);
  if (to_float(r.scale) * top < span) r.scale.bits = next_bits(r.scale.bits, true);
  r.step = to_float(r.scale);
  const float limit = std::numeric_limits<float>::max();
  if (!(r.step * top <= limit && r.base <= limit && r.base >= -limit && span <= limit)) {
    r.scale.bits = 0x7fc0;  // NaN in bf16 and in fp16
    r.step = to_float(r.scale);
  }
  return r;
}

// Codes of x[0, n) in a range of step > 0 into group bytes at `codes`; those from n to `group` are 0.
FB_INLINE void encode_group(const float* x, int64_t n, int64_t group, int32_t bits, float base, float step,
                            uint8_t* codes) {
  std::memset(codes, 0, size_t(group * bits / 8));
  const float top = float((1 << bits) - 1);
  for (int64_t i = 0; i < n; i += VL) {
    const int left = int(std::min<int64_t>(VL, n - i));
    vf t = ((left == VL ? load(x + i) : load_partial(x + i, left)) - base) / step;
    t = t < 0.0f ? vf{} : t;
    t = t > top ? vf{} + top : t;
    const vf magic = vf{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    vu code = (vu)(t + magic);
    if (bits == 8) {
      for (int j = 0; j < left; ++j) codes[i + j] = uint8_t(code[j]);
      continue;
    }
    if (left & 1) code[left] = 0;
    for (int j = 0; j < left; j += 2) codes[(i + j) / 2] = uint8_t((code[j] & 15) | code[j + 1] << 4);
  }
}

// Codes of x[0, n) into group bytes at `codes`; those from n to `group` are 0. False where the range cannot be held.
template <class S>
FB_INLINE bool quantize_group(const float* x, int64_t n, int64_t group, int32_t bits, uint8_t* codes, S* scale,
                              S* low) {
  float least = x[0], most = x[0];
  bool whole = true;
  int64_t i = 0;
  if (n >= VL) {
    vf a = load(x), b = a, bad = a - a;  // NaN stays NaN and infinity becomes NaN
    for (i = VL; i + VL <= n; i += VL) {
      const vf v = load(x + i);
      a = v < a ? v : a;
      b = v > b ? v : b;
      bad += v - v;
    }
    for (int j = 0; j < VL; ++j) {
      least = a[j] < least ? a[j] : least;
      most = b[j] > most ? b[j] : most;
    }
    whole = lane_sum(bad) == 0.0f;
  }
  for (; i < n; ++i) {
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
    whole = whole && x[i] - x[i] == 0.0f;
  }
  whole = whole && least - least == 0.0f;
  Range<S> r = min_max_range<S>(whole ? least : std::numeric_limits<float>::infinity(), most, bits);
  store_bits(scale, r.scale);
  store_bits(low, r.low);
  if (!(r.step > 0)) {
    std::memset(codes, 0, size_t(group * bits / 8));
    return r.step == 0;
  }
  encode_group(x, n, group, bits, r.base, r.step, codes);
  return true;
}

}  // namespace forebay
