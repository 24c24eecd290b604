// Functions of vectors: rounding to a storage type, sums of rows, exp, tanh, erf, and the activations of networks.
#pragma once

#include "micro.h"

namespace forebay {

// The bits of v rounded to bf16, one lane each.
FB_INLINE vu bf16_bits(vf v) {
  const vu u = (vu)v;
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return v != v ? vu{} + 0x7fc0u : rounded;
}

// Every lane as the type pointed to holds it, nearest and ties to even. fp32 too passes through a register, so that
// what follows is not contracted with what made v.
FB_INLINE vf rounded(const float*, vf v) { settle(v); return v; }
FB_INLINE vf rounded(const bf16*, vf v) { return (vf)(bf16_bits(v) << 16); }
FB_INLINE vf rounded(const f16*, vf v) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, 0));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)v));
#else
  for (int i = 0; i < VL; ++i) { f16 h; from_float(v[i], &h); v[i] = to_float(h); }
  return v;
#endif
}

FB_INLINE void store_whole(float* p, vf v) { store(p, v); }
FB_INLINE void store_whole(bf16* p, vf v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i u = (__m256i)bf16_bits(v);
  const __m128i h = _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0xd8));
#else
  const vh h = __builtin_convertvector(bf16_bits(v), vh);
#endif
  std::memcpy(p, &h, sizeof h);
}
FB_INLINE void store_whole(f16* p, vf v) {
#if defined(__AVX512F__)
  const __m256i h = _mm512_cvtps_ph((__m512)v, 0);
  std::memcpy(p, &h, sizeof h);
#elif defined(__F16C__)
  const __m128i h = _mm256_cvtps_ph((__m256)v, 0);
  std::memcpy(p, &h, sizeof h);
#elif defined(__aarch64__)
  const float16x4_t h = vcvt_f16_f32((float32x4_t)v);
  std::memcpy(p, &h, sizeof h);
#else
  for (int i = 0; i < VL; ++i) store_one(p + i, v[i]);
#endif
}
template <class T> FB_INLINE void store_partial(T* p, vf v, int n) {
  for (int i = 0; i < n; ++i) store_one(p + i, v[i]);
}

// The sum of f over the elements of a row; what f makes of lanes beyond its end is left out.
template <class T, class F> FB_INLINE float row_sum(const T* x, int64_t n, F f) {
  constexpr int SUMS = VL < 8 ? 8 : 4;  // of at least 32 lanes: the fewer, the more each rounds
  vf sum[SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS * VL <= n; i += SUMS * VL)
    FB_UNROLL for (int j = 0; j < SUMS; ++j) sum[j] += f(load(x + i + j * VL));
  for (; i + VL <= n; i += VL) sum[0] += f(load(x + i));
  if (i < n) {
    vf v = f(load_partial(x + i, int(n - i)));
    for (int j = int(n - i); j < VL; ++j) v[j] = 0.0f;
    sum[1] += v;
  }
  if constexpr (SUMS == 8)
    FB_UNROLL for (int j = 0; j < 4; ++j) sum[j] += sum[j + 4];
  return lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// Lane j: the sum of the lanes of v[j]. Vectors two by two keep the sums of two lanes each, of one lane that is of the
// first and one of the second; then those four by four, and so on.
FB_INLINE vf lane_sums(vf (&v)[VL]) {
#if defined(__AVX512F__)
  return (vf)sums_of(reinterpret_cast<const __m512(&)[16]>(v));
#else
  FB_UNROLL for (int step = 1; step < VL; step *= 2) {
    vi own, other;
    for (int i = 0; i < VL; ++i) own[i] = i & step ? VL + i : i, other[i] = own[i] ^ step;
    FB_UNROLL for (int j = 0; j < VL; j += 2 * step)
      v[j] = __builtin_shuffle(v[j], v[j + step], own) + __builtin_shuffle(v[j], v[j + step], other);
  }
  return v[0];
#endif
}

constexpr float LOG2_E = 1.44269502f, LOG2_E_REST = 1.92596299e-8f;

// 2^r times 2^n for |r| <= 0.5, relative error 2e-7 and none where r is 0: a minimax polynomial, and the exponent's bits
// of n + EXP_MAGIC, which must lie within those of normal numbers.
constexpr float EXP_MAGIC = 12583039.0f;  // 1.5 * 2^23: adding it rounds to an integer; and 127
FB_INLINE vf exp2_parts(vf r, vf shifted) {
  vf p = vf{} + 1.32647230e-3f;
  p = p * r + 9.67151327e-3f;
  p = p * r + 5.55073377e-2f;
  p = p * r + 2.40222421e-1f;
  p = p * r + 6.93146978e-1f;
  p = p * r + 1.0f;
  return p * (vf)((vu)shifted << 23);
}

// exp(x) for |x| <= 87, relative error 2e-7.
FB_INLINE vf exp_within(vf x) {
  const vf shifted = x * LOG2_E + EXP_MAGIC, n = shifted - EXP_MAGIC;
#if defined(__FMA__) || defined(__aarch64__)  // x * LOG2_E is not rounded before n is taken off
  return exp2_parts((x * LOG2_E - n) + x * LOG2_E_REST, shifted);
#else  // a Taylor polynomial of degree 7 on base e: |r| <= 0.347 leaves r^8 / 8! = 5e-9
  const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = vf{} + 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * (vf)((vu)shifted << 23);
#endif
}

// exp(x) for x <= 0; below -87 the result is 0.
FB_INLINE vf exp_nonpositive(vf x) {
  const vf y = exp_within(x);
  return x < -87.0f ? vf{} : y;
}

// 1 / x of a normal number; with AVX-512, whose division takes 16 cycles, relative error 1e-7.
FB_INLINE vf inverse(vf x) {
#if defined(__AVX512F__)
  const vf y = (vf)_mm512_rcp14_ps((__m512)x);
  return y * (2.0f - x * y);
#else
  return 1.0f / x;
#endif
}

FB_INLINE vf absolute(vf x) { return x < 0.0f ? -x : x; }

FB_INLINE vf tanh_of(vf x) {
  const vf e = exp_nonpositive(-2.0f * absolute(x));
  const vf y = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : y;
}

// Abramowitz and Stegun 7.1.26: absolute error 1.5e-7 and the rounding of fp32.
FB_INLINE vf erf_of(vf x) {
  const vf a = absolute(x), t = 1.0f / (1.0f + 0.3275911f * a);
  vf p = vf{} + 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const vf y = 1.0f - p * t * exp_nonpositive(-a * a);
  return x < 0.0f ? -y : y;
}

enum Activation : int32_t { NONE = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4 };

FB_INLINE vf activate(int32_t kind, vf x) {
  switch (kind) {
    case SILU: {
      const vf e = exp_within(-(x < 87.0f ? x : vf{} + 87.0f)), y = inverse(1.0f + e);
      return x * (x < -87.0f ? vf{} : y);
    }
    case GELU: return 0.5f * x * (1.0f + erf_of(x * 0.707106781f));
    case GELU_TANH: return 0.5f * x * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * x * x * x)));
    case RELU: return x < 0.0f ? vf{} : x;
    default: return x;
  }
}

}  // namespace forebay
