// Few rows of x as integers (vnni_rows.h) times packed rows, which are read in order: AVX-512 and its VNNI instructions.
#pragma once

#include "ahead.h"
#include "vnni_rows.h"
#include "wide.h"

#if FB_VNNI

namespace forebay {
namespace vnni {

// The codes of one unit, of which `left` elements are there, and their products with a row of x. With a BOOK they are
// places in a table of whole numbers.
template <int BITS, int NBYTES, bool BOOK> struct Codes;

FB_INLINE __m512i words_of(const uint8_t* p, int64_t left) {  // 32 bytes, each in 16 bits
  return _mm512_cvtepu8_epi16(left >= 64 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                         : _mm256_maskz_loadu_epi8(__mmask32((1ull << left / 2) - 1), p));
}

FB_INLINE __m512i bytes_of(const uint8_t* p, int64_t left) {
  return left >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((1ull << left) - 1, p);
}

template <int BITS, bool BOOK> struct Codes<BITS, 2, BOOK> {
  __m512i even, odd;
  FB_METHOD Codes(const uint8_t* p, int64_t left, __m512i table) {
    const __m512i both = BITS == 4 ? words_of(p, left) : bytes_of(p, left);
    even = BOOK ? _mm512_permutexvar_epi16(both, table) : _mm512_and_si512(both, _mm512_set1_epi16((1 << BITS) - 1));
    odd = _mm512_srli_epi16(both, BITS);
    if (BOOK) odd = _mm512_permutexvar_epi16(odd, table);
  }
  FB_METHOD __m512i dot(const uint8_t* x) const {
    return _mm512_dpwssd_epi32(_mm512_madd_epi16(even, _mm512_loadu_si512(x)), odd, _mm512_loadu_si512(x + 64));
  }
};

template <int BITS> struct Codes<BITS, 1, false> {
  __m512i all;
  FB_METHOD Codes(const uint8_t* p, int64_t left, __m512i) {
    all = BITS == 4 ? words_of(p, left) : bytes_of(p, left);
    if (BITS == 4) all = _mm512_and_si512(_mm512_or_si512(all, _mm512_slli_epi16(all, 4)), _mm512_set1_epi8(15));
  }
  FB_METHOD __m512i dot(const uint8_t* x) const {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), all, _mm512_loadu_si512(x));
  }
};

// The scales of a unit's groups, each in the lanes of its elements: four groups of 16, two of 32, or one.
template <int GROUP> FB_INLINE __m512 scales_of(const float* scales, int64_t unit, int shift) {
  if (GROUP == 16) {
    const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(scales + 4 * unit));
    return _mm512_permutevar_ps(four, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
  }
  if (GROUP == 32) {
    double two;
    std::memcpy(&two, scales + 2 * unit, 8);
    return _mm512_permutevar_ps(_mm512_castpd_ps(_mm512_set1_pd(two)),
                                _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
  }
  return _mm512_set1_ps(scales[unit >> shift]);
}

FB_INLINE __m512 halves_of(const uint8_t* at, int32_t dtype, int64_t left) {  // 16 scales or lows, zeros from `left` on
  const __m256i v = left >= 16 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))
                               : _mm256_maskz_loadu_epi16(__mmask16((1 << left) - 1), at);
  return dtype == F16 ? _mm512_cvtph_ps(v)
                      : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

// 16 scales of a row with a codebook, in whole numbers of it.
FB_INLINE __m512 sixteen_coded_scales(const uint8_t* at, const GroupFormat& f, int64_t left) {
  __m512 s = halves_of(at, f.scale_dtype, left);
  if (!f.symmetric) {  // upper halves are bf16, and lower ones lie where lows do
    const __mmask16 lanes = left >= 16 ? 0xffff : __mmask16((1 << left) - 1);
    const __m512i lower = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, at + f.scales_nbytes()));
    s = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(s), lower));
  }
  return _mm512_mul_ps(s, _mm512_set1_ps(WORTH[f.codebook - E2M1]));
}

// c[m, n] += a block of MB rows of x times NB packed rows, at most STEP groups at a time. Beside each unit as many bytes
// further on are called in, in the order in which they lie.
template <int BITS, int NBYTES, int GROUP, int MB, int NB, bool BOOK>
FB_INLINE void block(const Integers& x, const uint8_t* values, const float* x_scale, const float* x_sum,
                     const uint8_t* rows, int64_t stride, const GroupFormat& f, float* c, int64_t cs) {
  constexpr int64_t STEP = 64, GROUPS = UNIT / std::min(GROUP, 64), UNIT_NBYTES = NB * (UNIT * BITS / 8 + 4 * GROUPS);
  const int64_t unit_nbytes = NB * (UNIT * BITS / 8 + f.factors_nbytes() * GROUPS);
  alignas(64) float scales[NB][MB][STEP];
  const uint8_t* read = rows;
  __m512 acc[NB][MB];
  FB_UNROLL for (int n = 0; n < NB; ++n)
    FB_UNROLL for (int i = 0; i < MB; ++i) acc[n][i] = _mm512_setzero_ps();
  const __m512i table = BOOK ? _mm512_load_si512(WHOLE_NUMBERS.at[f.codebook - E2M1]) : _mm512_setzero_si512();
  const int shift = GROUP < 64 ? 0 : __builtin_ctzll(uint64_t(f.group / 64));
  const int64_t units = x.k / UNIT, step = GROUP < 64 ? STEP * GROUP / 64 : STEP << shift, elements = f.count * f.group;
  for (int64_t u0 = 0; u0 < units; u0 += step) {
    const int64_t u1 = std::min(units, u0 + step), g0 = GROUP < 64 ? u0 * 64 / GROUP : u0 >> shift,
                  g1 = std::min(f.count, g0 + STEP);
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      const uint8_t* at = rows + n * stride + f.codes_nbytes();
      for (int64_t g = g0; g < g1; g += LANES) {
        const __m512 s = BOOK ? sixteen_coded_scales(at + 2 * g, f, f.count - g)
                              : halves_of(at + 2 * g, f.scale_dtype, f.count - g);
        FB_UNROLL for (int i = 0; i < MB; ++i)
          _mm512_store_ps(scales[n][i] + (g - g0), _mm512_mul_ps(s, _mm512_loadu_ps(x_scale + i * x.groups + g)));
        if (BOOK) continue;
        const __m512 l = f.symmetric ? _mm512_mul_ps(s, _mm512_set1_ps(symmetric_low(BITS)))
                                     : halves_of(at + f.scales_nbytes() + 2 * g, f.scale_dtype, f.count - g);
        FB_UNROLL for (int i = 0; i < MB; ++i)
          acc[n][i] = _mm512_fmadd_ps(l, _mm512_loadu_ps(x_sum + i * x.groups + g), acc[n][i]);
      }
    }
    const auto unit = [&](int64_t u, int64_t left) __attribute__((always_inline)) {
      const uint8_t* codes_at = rows + u * (UNIT * BITS / 8);
      const uint8_t* x_at = values + u * (MB * UNIT * NBYTES);
      call_ahead(read, UNIT_NBYTES);
      read += unit_nbytes;
      FB_UNROLL for (int n = 0; n < NB; ++n) {
        const Codes<BITS, NBYTES, BOOK> codes(codes_at + n * stride, left, table);
        FB_UNROLL for (int i = 0; i < MB; ++i)
          acc[n][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes.dot(x_at + i * UNIT * NBYTES)),
                                      scales_of<GROUP>(scales[n][i], u - u0, shift), acc[n][i]);
      }
    };
    const int64_t full = std::min(u1, elements / UNIT);
    for (int64_t u = u0; u < full; ++u) unit(u, UNIT);
    if (full < u1) unit(full, elements - full * UNIT);
  }
  FB_UNROLL for (int i = 0; i < MB; ++i) {
    if (NB == 4) {
      const __m128 sums = sum16(acc[0][i], acc[1 % NB][i], acc[2 % NB][i], acc[3 % NB][i]);
      _mm_storeu_ps(c + i * cs, _mm_add_ps(_mm_loadu_ps(c + i * cs), sums));
    } else {
      FB_UNROLL for (int n = 0; n < NB; ++n) c[i * cs + n] += sum16(acc[n][i]);
    }
  }
}

template <int BITS, int NBYTES, int GROUP, int MB, int NB, bool BOOK>
static void block_rows(const Integers& x, int64_t m, const uint8_t* rows, int64_t stride, int64_t n,
                       const GroupFormat& f, float* c, int64_t cs) {
  const uint8_t* values = x.values + m * x.k * NBYTES;
  const float *scale = x.scale + m * x.groups, *sum = x.sum + m * x.groups;
  c += m * cs;
  begin_reading(rows, n * stride);
  int64_t j = 0;
  for (; j + NB <= n; j += NB)
    block<BITS, NBYTES, GROUP, MB, NB, BOOK>(x, values, scale, sum, rows + j * stride, stride, f, c + j, cs);
  for (; j < n; ++j)
    block<BITS, NBYTES, GROUP, MB, 1, BOOK>(x, values, scale, sum, rows + j * stride, stride, f, c + j, cs);
}

// c[m, n] += x[0, m) times n packed rows, transposed; m up to FEW_ROWS.
template <int BITS, int NBYTES, int GROUP, bool BOOK = false>
static void dot_product(const Integers& x, int64_t m, const uint8_t* rows, int64_t stride, int64_t n,
                        const GroupFormat& f, float* c, int64_t cs) {
  for (int64_t i = 0; i < m;) {
    const int64_t count = block_of<MOST_TOGETHER>(i, m).rows;
    switch (count) {
      case 4: block_rows<BITS, NBYTES, GROUP, 4, 2, BOOK>(x, i, rows, stride, n, f, c, cs); break;
      case 2: block_rows<BITS, NBYTES, GROUP, 2, 2, BOOK>(x, i, rows, stride, n, f, c, cs); break;
      default: block_rows<BITS, NBYTES, GROUP, 1, 4, BOOK>(x, i, rows, stride, n, f, c, cs);
    }
    i += count;
  }
}

}  // namespace vnni
}  // namespace forebay
#endif
