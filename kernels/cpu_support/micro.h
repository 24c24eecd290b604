// Register-blocked inner kernels over one portable vector type; fp32 accumulation, weights upcast in registers.
// Every load is unaligned (memcpy): streamed weights start at any even file offset.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace forebay {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

#define FB_INLINE static inline __attribute__((always_inline))
#define FB_APART static __attribute__((noinline))  // once in the code, however often it is called
#define FB_UNROLL _Pragma("GCC unroll 16")

enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2 };
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

FB_INLINE float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
FB_INLINE uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

FB_INLINE float to_float(float v) { return v; }
FB_INLINE float to_float(bf16 v) { return bits_to_float(uint32_t(v.bits) << 16); }
FB_INLINE float to_float(f16 v) {
#if defined(__F16C__)
  return _cvtsh_ss(v.bits);
#elif defined(__aarch64__)
  __fp16 h;
  std::memcpy(&h, &v, sizeof h);
  return h;
#else
  const uint32_t sign = uint32_t(v.bits & 0x8000) << 16, exponent = (v.bits >> 10) & 31, mantissa = v.bits & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float subnormal = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -subnormal : subnormal;
#endif
}

FB_INLINE void from_float(float v, float* to) { *to = v; }
FB_INLINE void from_float(float v, bf16* to) {
  const uint32_t u = float_to_bits(v);
  to->bits = v != v ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
FB_INLINE void from_float(float v, f16* to) {
#if defined(__F16C__)
  to->bits = uint16_t(_cvtss_sh(v, 0));
#elif defined(__aarch64__)
  const auto h = static_cast<__fp16>(v);
  std::memcpy(to, &h, sizeof h);
#else
  const uint32_t u = float_to_bits(v), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) { to->bits = uint16_t(sign | 0x7e00); return; }
  if (magnitude >= 0x477ff000u) { to->bits = uint16_t(sign | 0x7c00); return; }  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves units of 2^-24 in the mantissa, rounded to even
    to->bits = uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
    return;
  }
  to->bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13));
#endif
}

FB_INLINE vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
FB_INLINE vf load(const bf16* p) {
#if defined(__aarch64__)  // gcc 12 takes every lane of __builtin_convertvector through a register of integers
  uint16x4_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return (vf)vshll_n_u16(bits, 16);
#else
#if defined(__AVX512F__)
  __m256i h;
  std::memcpy(&h, p, sizeof h);
  const vu u = (vu)_mm512_cvtepu16_epi32(h);
#elif defined(__AVX2__)  // gcc 12 makes four instructions of __builtin_convertvector here
  __m128i h;
  std::memcpy(&h, p, sizeof h);
  const vu u = (vu)_mm256_cvtepu16_epi32(h);
#else
  vh h;
  std::memcpy(&h, p, sizeof h);
  const vu u = __builtin_convertvector(h, vu);
#endif
  return (vf)(u << 16);
#endif
}
FB_INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  __m256i h;
  std::memcpy(&h, p, sizeof h);
  return (vf)_mm512_cvtph_ps(h);
#elif defined(__F16C__)
  __m128i h;
  std::memcpy(&h, p, sizeof h);
  return (vf)_mm256_cvtph_ps(h);
#elif defined(__aarch64__)
  float16x4_t h;
  std::memcpy(&h, p, sizeof h);
  return (vf)vcvt_f32_f16(h);
#else
  vf v;
  for (int i = 0; i < VL; ++i) { f16 h; std::memcpy(&h, p + i, 2); v[i] = to_float(h); }
  return v;
#endif
}
FB_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// Keeps v in a register: gcc otherwise loads it again for every use, and two loads a cycle become the limit.
FB_INLINE void keep(vf& v) {
#if defined(__AVX__)
  asm("" : "+x"(v));
#else
  (void)v;
#endif
}

// Settles v: what follows is not contracted with what made it.
FB_INLINE void settle(vf& v) {
#if defined(__aarch64__)
  asm("" : "+w"(v));
#else
  keep(v);
#endif
}

template <class T> FB_INLINE float load_one(const T* p) { T v; std::memcpy(&v, p, sizeof v); return to_float(v); }
template <class T> FB_INLINE void store_one(T* p, float v) { T t; from_float(v, &t); std::memcpy(p, &t, sizeof t); }

// Only the first n lanes are read; the others are zero.
template <class T> FB_INLINE vf load_partial(const T* p, int n) {
  vf v = {};
  for (int i = 0; i < n; ++i) v[i] = load_one(p + i);
  return v;
}

FB_INLINE float lane_sum(vf v) {
#if defined(__AVX512F__)  // in the order of sums_of
  const __m512 a = (__m512)v, b = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e)),
               c = _mm512_add_ps(b, _mm512_permute_ps(b, 0xb1)), d = _mm512_add_ps(c, _mm512_shuffle_f32x4(c, c, 0xb1));
  return _mm512_cvtss_f32(_mm512_add_ps(d, _mm512_shuffle_f32x4(d, d, 0x4e)));
#elif defined(__AVX__)
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#elif defined(__aarch64__)
  return vaddvq_f32((float32x4_t)v);
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Converts n elements to fp32.
template <class T> FB_INLINE void upcast(const T* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = load_one(from + i);
}

// sum + x[0, k) * w[0, k), in order: what is left of a row after its whole vectors.
template <class W> FB_APART float rest_of(float sum, const float* x, const W* w, int64_t k) {
  for (int64_t i = 0; i < k; ++i) sum += x[i] * load_one(w + i);
  return sum;
}

// c[m, n] += sum_k x[m, k] * w[n, k]: both operands run along k. MB * NB accumulators stay in registers.
template <class W, int MB, int NB>
FB_INLINE void dot_block(const float* x, int64_t xs, const W* w, int64_t ws, int64_t k, float* c, int64_t cs) {
  vf acc[MB][NB] = {};
  int64_t i = 0;
  for (; i + VL <= k; i += VL) {
    vf wv[NB];
    FB_UNROLL for (int n = 0; n < NB; ++n) wv[n] = load(w + n * ws + i);
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      vf xv = load(x + m * xs + i);
      keep(xv);
      FB_UNROLL for (int n = 0; n < NB; ++n) acc[m][n] += xv * wv[n];
    }
  }
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      const float sum = lane_sum(acc[m][n]);
      c[m * cs + n] += i < k ? rest_of(sum, x + m * xs + i, w + n * ws + i, k - i) : sum;
    }
}

// c[m, n] += sum_k x[m, k] * w[k, n] for NV vectors of columns. c holds whole vectors; w is read for `columns` only.
template <class W, int MB, int NV, bool PARTIAL>
FB_INLINE void outer_block(const float* x, int64_t xs, const W* w, int64_t ws, int64_t k, float* c, int64_t cs,
                           int columns) {
  vf acc[MB][NV];
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < NV; ++n) acc[m][n] = load(c + m * cs + n * VL);
  for (int64_t i = 0; i < k; ++i) {
    vf wv[NV];
    FB_UNROLL for (int n = 0; n < NV; ++n)
      wv[n] = PARTIAL ? load_partial(w + i * ws + n * VL, columns) : load(w + i * ws + n * VL);
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      vf xv = x[m * xs + i] - vf{};
      keep(xv);
      FB_UNROLL for (int n = 0; n < NV; ++n) acc[m][n] += xv * wv[n];
    }
  }
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < NV; ++n) store(c + m * cs + n * VL, acc[m][n]);
}

#if defined(__AVX512F__)
// Lane j: the sum of the lanes of a[j].
FB_INLINE __m512 sums_of(const __m512 (&a)[16]) {
  __m512 t[8], u[4], v[2];
  FB_UNROLL for (int i = 0; i < 8; ++i)
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  FB_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(t[2 * i]), high = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  FB_UNROLL for (int i = 0; i < 2; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

// c[m, n] += the sums of acc[m * NB + n]; MB * NB is 16, or 12 where what follows is zero.
template <int MB, int NB> FB_INLINE void add_sums(const __m512 (&acc)[16], float* c, int64_t cs) {
  const __m512 sums = sums_of(acc);
  if constexpr (NB == 16) {
    _mm512_storeu_ps(c, _mm512_add_ps(_mm512_loadu_ps(c), sums));
  } else if constexpr (NB == 8) {
    _mm256_storeu_ps(c, _mm256_add_ps(_mm256_loadu_ps(c), _mm512_castps512_ps256(sums)));
    _mm256_storeu_ps(c + cs, _mm256_add_ps(_mm256_loadu_ps(c + cs),
                                           _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums), 1))));
  } else {
    const __m128 rows[4] = {_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps(sums, 1),
                            _mm512_extractf32x4_ps(sums, 2), _mm512_extractf32x4_ps(sums, 3)};
    FB_UNROLL for (int m = 0; m < MB; ++m) _mm_storeu_ps(c + m * cs, _mm_add_ps(_mm_loadu_ps(c + m * cs), rows[m]));
  }
}

constexpr int64_t SHORT = 512;  // elements of rows whose sums over lanes cost as much as their products

// dot_block for MB rows and as many of w as give 16 sums, which are then taken together: rows of 64 elements have as many
// lanes to add up as products.
template <class W, int MB>
FB_INLINE void dot_block16(const float* x, int64_t xs, const W* w, int64_t ws, int64_t k, float* c, int64_t cs) {
  constexpr int NB = 16 / (MB == 3 ? 4 : MB);
  __m512 acc[16];
  FB_UNROLL for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + VL <= k; i += VL) {
    __m512 xv[MB];
    FB_UNROLL for (int m = 0; m < MB; ++m) xv[m] = _mm512_loadu_ps(x + m * xs + i);
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      const __m512 wv = (__m512)load(w + n * ws + i);
      FB_UNROLL for (int m = 0; m < MB; ++m) acc[m * NB + n] = _mm512_fmadd_ps(xv[m], wv, acc[m * NB + n]);
    }
  }
  add_sums<MB, NB>(acc, c, cs);
  for (int m = 0; i < k && m < MB; ++m)
    for (int n = 0; n < NB; ++n) c[m * cs + n] = rest_of(c[m * cs + n], x + m * xs + i, w + n * ws + i, k - i);
}
#endif

template <class W, int MB, int NB>
static void dot_rows(const float* x, int64_t xs, const W* w, int64_t ws, int64_t n, int64_t k, float* c, int64_t cs) {
  int64_t j = 0;
#if defined(__AVX512F__)
  constexpr int TOGETHER = 16 / (MB == 3 ? 4 : MB);
  if (k <= SHORT)
    for (; j + TOGETHER <= n; j += TOGETHER) dot_block16<W, MB>(x, xs, w + j * ws, ws, k, c + j, cs);
#endif
  for (; j + NB <= n; j += NB) dot_block<W, MB, NB>(x, xs, w + j * ws, ws, k, c + j, cs);
  if (NB > 4 && j + 4 <= n) dot_block<W, MB, 4>(x, xs, w + j * ws, ws, k, c + j, cs), j += 4;
  if (NB > 2 && j + 2 <= n) dot_block<W, MB, 2>(x, xs, w + j * ws, ws, k, c + j, cs), j += 2;
  for (; j < n; ++j) dot_block<W, MB, 1>(x, xs, w + j * ws, ws, k, c + j, cs);
}

// c[m, n] += x[m, k] w[n, k]^T, with 8 to 12 accumulators whatever m is (FMA latency 4, two per cycle: 8 hide it). FEW:
// m is 1 or 2.
template <bool FEW = false, class W>
static void multiply_dot(const float* x, int64_t xs, const W* w, int64_t ws, int64_t m, int64_t n, int64_t k, float* c,
                         int64_t cs) {
  int64_t i = 0;
  if constexpr (!FEW) for (; i + 4 <= m; i += 4) dot_rows<W, 4, 3>(x + i * xs, xs, w, ws, n, k, c + i * cs, cs);
  switch (m - i) {
    case 3: if constexpr (!FEW) dot_rows<W, 3, 4>(x + i * xs, xs, w, ws, n, k, c + i * cs, cs); break;
    case 2: dot_rows<W, 2, 6>(x + i * xs, xs, w, ws, n, k, c + i * cs, cs); break;
    case 1: dot_rows<W, 1, 8>(x + i * xs, xs, w, ws, n, k, c + i * cs, cs); break;
  }
}

template <class W, int MB, int NV>
static void outer_columns(const float* x, int64_t xs, const W* w, int64_t ws, int64_t n, int64_t k, float* c,
                          int64_t cs) {
  int64_t j = 0;
  for (; j + NV * VL <= n; j += NV * VL) outer_block<W, MB, NV, false>(x, xs, w + j, ws, k, c + j, cs, 0);
  if (NV > 4 && j + 4 * VL <= n) outer_block<W, MB, 4, false>(x, xs, w + j, ws, k, c + j, cs, 0), j += 4 * VL;
  if (NV > 2 && j + 2 * VL <= n) outer_block<W, MB, 2, false>(x, xs, w + j, ws, k, c + j, cs, 0), j += 2 * VL;
  for (; j + VL <= n; j += VL) outer_block<W, MB, 1, false>(x, xs, w + j, ws, k, c + j, cs, 0);
  if (j < n) outer_block<W, MB, 1, true>(x, xs, w + j, ws, k, c + j, cs, int(n - j));
}

// c[m, n] += x[m, k] w[k, n]; rows of c hold n rounded up to whole vectors.
template <class W>
static void multiply_outer(const float* x, int64_t xs, const W* w, int64_t ws, int64_t m, int64_t n, int64_t k,
                           float* c, int64_t cs) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) outer_columns<W, 4, 3>(x + i * xs, xs, w, ws, n, k, c + i * cs, cs);
  switch (m - i) {
    case 3: outer_columns<W, 3, 4>(x + i * xs, xs, w, ws, n, k, c + i * cs, cs); break;
    case 2: outer_columns<W, 2, 6>(x + i * xs, xs, w, ws, n, k, c + i * cs, cs); break;
    case 1: outer_columns<W, 1, 8>(x + i * xs, xs, w, ws, n, k, c + i * cs, cs); break;
  }
}

}  // namespace forebay
