// Products of packed codes with integer rows of x (integer_dot.h) by the instructions of every 64-bit ARM processor, and
// by those for dot products of bytes where the library is compiled for one that has them.
#pragma once

#include "ahead.h"
#include "groups.h"

namespace forebay {

// As for AVX2 (integer_dot.h), but that rows in groups of 16 too stand in order: their sums are of whole vectors.
template <int BYTES, class T>
FB_INLINE bool round_group(const T* x, int64_t n, int64_t group, bool interleave, bool halves, uint8_t* to,
                           int64_t sub, int64_t sub_stride, float* scale, float* sum) {
  vf most = {};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    const vf v = absolute(load(x + i));
    most = v > most ? v : most;
  }
  if (i < n) {
    const vf v = absolute(load_partial(x + i, int(n - i)));
    most = v > most ? v : most;
  }
  const float largest = vmaxvq_f32((float32x4_t)most);
  constexpr float top = BYTES == 2 ? 32767.0f : 127.0f;
  const bool usable = largest == 0.0f || (largest > 1e-30f && largest < 1e38f);
  const float inverse = largest > 0.0f && usable ? top / largest : 0.0f;
  *scale = usable ? largest / top : 0.0f;
  int32x4_t first = vdupq_n_s32(0), total = first;  // of every second 16 elements; of all
  uint32x4_t ordered = vdupq_n_u32(~0u);
  for (i = 0; i < group; i += 32) {
    int16x8_t q[4];
    FB_UNROLL for (int j = 0; j < 8; ++j) {
      const int64_t at = i + 4 * j;
      const int left = int(std::clamp<int64_t>(n - at, 0, VL));
      const auto v = (float32x4_t)(left == VL ? load(x + at) : load_partial(x + at, left));
      ordered = vandq_u32(ordered, vceqq_f32(v, v));
      const int32x4_t whole = vcvtnq_s32_f32(vmulq_n_f32(v, inverse));
      total = vaddq_s32(total, whole);
      if (j < 4) first = vaddq_s32(first, whole);
      if (j & 1) q[j / 2] = vqmovn_high_s32(vget_low_s16(q[j / 2]), whole);
      else q[j / 2] = vcombine_s16(vqmovn_s32(whole), vdup_n_s16(0));
    }
    uint8_t* at = to + i / sub * sub_stride + i % sub * BYTES;
    if (BYTES == 2) {
      auto* words = reinterpret_cast<int16_t*>(at);
      FB_UNROLL for (int j = 0; j < 4; ++j) {
        const int16x8_t a = q[j % 2 * 2], b = q[j % 2 * 2 + 1];
        vst1q_s16(words + 8 * j, !interleave ? q[j] : j < 2 ? vuzp1q_s16(a, b) : vuzp2q_s16(a, b));
      }
    } else {
      const int8x16_t a = vqmovn_high_s16(vqmovn_s16(q[0]), q[1]), b = vqmovn_high_s16(vqmovn_s16(q[2]), q[3]);
      auto* bytes = reinterpret_cast<int8_t*>(at);
      vst1q_s8(bytes, interleave ? vuzp1q_s8(a, b) : a);
      vst1q_s8(bytes + 16, interleave ? vuzp2q_s8(a, b) : b);
    }
  }
  const int64_t whole = vaddlvq_s32(total), half = vaddlvq_s32(first);
  sum[0] = *scale * float(halves ? half : whole);
  if (halves) {
    scale[1] = *scale;
    sum[1] = *scale * float(whole - half);
  }
  return usable && vminvq_u32(ordered);
}

// Scales (or lows) [g, g + 4) of a row of `count`, in fp32: zeros from `count` on. Nothing beyond is read; before the
// scales lie codes, of 16 bytes at least.
FB_INLINE float32x4_t load_scales(const uint8_t* at, int32_t dtype, int64_t g, int64_t count) {
  const int64_t from = std::min(g, count - 4);
  uint64_t bits;
  std::memcpy(&bits, at + 2 * from, sizeof bits);
  const uint16x4_t v = vcreate_u16(bits >> (16 * (g - from)));
  return dtype == F16 ? vcvt_f32_f16(vreinterpret_f16_u16(v)) : vreinterpretq_f32_u32(vshll_n_u16(v, 16));
}

// Products of 32 elements, those of the first 16 and the others apart where a group may be so short.
struct Sums {
  int32x4_t low, high;
  int32x4_t all() const { return vaddq_s32(low, high); }
};

// 32 codes of one weight row as 16 (BYTES 2) or 8 bits, in the order in which x stands.
template <int BITS, int BYTES> struct Codes;

template <> struct Codes<4, 2> {
  int16x8_t w[4];  // even elements of the first 16, of the others; odd ones
  FB_METHOD explicit Codes(const uint8_t* p) {
    const uint8x16_t b = vld1q_u8(p), even = vandq_u8(b, vdupq_n_u8(15)), odd = vshrq_n_u8(b, 4);
    w[0] = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(even)));
    w[1] = vreinterpretq_s16_u16(vmovl_high_u8(even));
    w[2] = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(odd)));
    w[3] = vreinterpretq_s16_u16(vmovl_high_u8(odd));
  }
  static constexpr int SECOND = 2;  // of the first 16 are w[0] and this
};

template <> struct Codes<8, 2> {
  int16x8_t w[4];
  FB_METHOD explicit Codes(const uint8_t* p) {
    FB_UNROLL for (int i = 0; i < 4; ++i) w[i] = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8 * i)));
  }
  static constexpr int SECOND = 1;
};

template <> struct Codes<4, 1> {
  int8x16_t w[2];
  FB_METHOD explicit Codes(const uint8_t* p) {
    const uint8x16_t b = vld1q_u8(p);
    w[0] = vreinterpretq_s8_u8(vandq_u8(b, vdupq_n_u8(15)));
    w[1] = vreinterpretq_s8_u8(vshrq_n_u8(b, 4));
  }
};

// sum + the products of 8 elements.
FB_INLINE int32x4_t add_products(int32x4_t sum, int16x8_t w, const int16_t* x) {
  const int16x8_t v = vld1q_s16(x);
  return vmlal_high_s16(vmlal_s16(sum, vget_low_s16(w), vget_low_s16(v)), w, v);
}

template <int BITS> FB_INLINE Sums products_of(const Codes<BITS, 2>& codes, const uint8_t* x, Sums sums) {
  constexpr int SECOND = Codes<BITS, 2>::SECOND, THIRD = 3 - SECOND;
  const auto* v = reinterpret_cast<const int16_t*>(x);
  sums.low = add_products(add_products(sums.low, codes.w[0], v), codes.w[SECOND], v + 8 * SECOND);
  sums.high = add_products(add_products(sums.high, codes.w[THIRD], v + 8 * THIRD), codes.w[3], v + 24);
  return sums;
}

FB_INLINE Sums products_of(const Codes<4, 1>& codes, const uint8_t* x, Sums sums) {
  const auto* v = reinterpret_cast<const int8_t*>(x);
  const int8x16_t a = vld1q_s8(v), b = vld1q_s8(v + 16);
#if defined(__ARM_FEATURE_DOTPROD)
  sums.low = vdotq_s32(sums.low, codes.w[0], a);
  sums.high = vdotq_s32(sums.high, codes.w[1], b);
#else
  const int16x8_t even = vmull_s8(vget_low_s8(codes.w[0]), vget_low_s8(a)), odd = vmull_high_s8(codes.w[1], b);
  sums.low = vpadalq_s16(sums.low, vmlal_high_s8(even, codes.w[0], a));  // 2 * 15 * 127 fits 16 bits
  sums.high = vpadalq_s16(sums.high, vmlal_s8(odd, vget_low_s8(codes.w[1]), vget_low_s8(b)));
#endif
  return sums;
}

// As for AVX2: c[m, n] += the product of a block of MB rows of x with NB packed rows, groups [g0, g1).
template <int BITS, int BYTES, int SUB, int MB, int NB, int STEP, bool BOOK>
FB_INLINE void integer_block(const uint8_t* x, const float* x_scale, const float* x_sum, int64_t g8,
                             const uint8_t* rows, int64_t stride, const GroupFormat& f, int64_t g0, int64_t g1,
                             bool first, float* c, int64_t cs) {
  alignas(16) float scales[NB][MB][STEP];
  float32x4_t acc[NB][MB];
  FB_UNROLL for (int n = 0; n < NB; ++n) {
    const uint8_t* at = rows + n * stride + f.codes_nbytes();
    FB_UNROLL for (int i = 0; i < MB; ++i) acc[n][i] = vdupq_n_f32(0.0f);
    for (int64_t g = g0; g < g1; g += 4) {
      const float32x4_t s = load_scales(at, f.scale_dtype, g, f.count),
                        l = f.symmetric ? vmulq_n_f32(s, symmetric_low(BITS))
                                        : load_scales(at + f.scales_nbytes(), f.scale_dtype, g, f.count);
      FB_UNROLL for (int i = 0; i < MB; ++i) {
        vst1q_f32(scales[n][i] + (g - g0), vmulq_f32(s, vld1q_f32(x_scale + i * g8 + g)));
        acc[n][i] = vfmaq_f32(acc[n][i], l, vld1q_f32(x_sum + i * g8 + g));
      }
    }
  }
  constexpr int UNIT = unit_of(SUB);
  constexpr int64_t UNIT_NBYTES = NB * (UNIT * BITS / 8 + 4 * UNIT / SUB);
  const Units units = units_of<BITS, SUB>(f, g0, g1);
  const uint8_t* values = x + units.begin * MB * UNIT * BYTES;
  const uint8_t* codes_at = rows + units.begin * UNIT * BITS / 8;
  int64_t g = 0, left = units.each;
  for (int64_t u = units.begin; u < units.end; ++u, values += MB * UNIT * BYTES, codes_at += UNIT * BITS / 8) {
    if (first) call_ahead(rows + u * NB * units.nbytes, UNIT_NBYTES);
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      Sums sums[MB];
      FB_UNROLL for (int i = 0; i < MB; ++i) sums[i].low = sums[i].high = vdupq_n_s32(0);
      FB_UNROLL for (int part = 0; part < UNIT / 32; ++part) {
        const Codes<BITS, BYTES> codes(codes_at + n * stride + part * 4 * BITS);
        FB_UNROLL for (int i = 0; i < MB; ++i)
          sums[i] = products_of(codes, values + (i * UNIT + part * 32) * BYTES, sums[i]);
      }
      FB_UNROLL for (int i = 0; i < MB; ++i) {
        const float* by = scales[n][i] + g;
        if (SUB == 16) {
          acc[n][i] = vfmaq_n_f32(acc[n][i], vcvtq_f32_s32(sums[i].low), by[0]);
          acc[n][i] = vfmaq_n_f32(acc[n][i], vcvtq_f32_s32(sums[i].high), by[1]);
        } else {
          acc[n][i] = vfmaq_n_f32(acc[n][i], vcvtq_f32_s32(sums[i].all()), by[0]);
        }
      }
    }
    if (SUB == 16) g += 2;
    else if (--left == 0) left = units.each, ++g;
  }
  FB_UNROLL for (int i = 0; i < MB; ++i) {
    if (NB == 4) {
      const float32x4_t a = vpaddq_f32(acc[0][i], acc[1 % NB][i]), b = vpaddq_f32(acc[2 % NB][i], acc[3 % NB][i]);
      vst1q_f32(c + i * cs, vaddq_f32(vld1q_f32(c + i * cs), vpaddq_f32(a, b)));
    } else {
      FB_UNROLL for (int n = 0; n < NB; ++n) c[i * cs + n] += vaddvq_f32(acc[n][i]);  // in the order of vpaddq_f32
    }
  }
}

}  // namespace forebay
