// Numbers that codes stand for by a codebook (codebooks.py): fp8, and sixteen numbers that codes of 4 bits are places of.
#pragma once

#include "ahead.h"
#include "vector_math.h"

namespace forebay {

enum Codebook : int32_t { WHOLE, E4M3, E2M1, NF4, FP4, IQ1, IQ2, IQ3 };

alignas(64) static constexpr float SIXTEEN[6][16] = {
    {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6},
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0.0f, 0.005208333333333333f, 0.6666666666666666f, 1.0f, 0.3333333333333333f, 0.5f, 0.16666666666666666f, 0.25f,
     -0.0f, -0.005208333333333333f, -0.6666666666666666f, -1.0f, -0.3333333333333333f, -0.5f, -0.16666666666666666f,
     -0.25f},
    {0.0625f, 0.1875f, 0.3125f, 0.4375f, 0.5625f, 0.6875f, 0.8125f, 0.9375f, -0.0625f, -0.1875f, -0.3125f, -0.4375f,
     -0.5625f, -0.6875f, -0.8125f, -0.9375f},
    {0.125f, 0.390625f, 0.671875f, 0, 0, 0, 0, 0, -0.125f, -0.390625f, -0.671875f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f},
    {0.0625f, 0.1875f, 0.3125f, 0.4375f, 0.5625f, 0.6875f, 0.8125f, 0.96875f, -0.0625f, -0.1875f, -0.3125f, -0.4375f,
     -0.5625f, -0.6875f, -0.8125f, -0.96875f}};

// The same as whole numbers, each worth so much: exact but for nf4, whose numbers are off by 3e-5. Four products with x of
// 15 bits and a sign fit 32 bits.
static constexpr float WORTH[6] = {0.5f, 1.0f / 16383, 1.0f / 192, 1.0f / 16, 1.0f / 64, 1.0f / 64};
struct WholeNumbers {
  alignas(64) int16_t at[6][32] = {};  // all twice: the place in a table of 32 needs no mask
  constexpr WholeNumbers() {
    for (int book = 0; book < 6; ++book)
      for (int i = 0; i < 32; ++i) {
        const float v = SIXTEEN[book][i % 16] / WORTH[book];
        at[book][i] = int16_t(v < 0 ? v - 0.5f : v + 0.5f);
      }
  }
};
static constexpr WholeNumbers WHOLE_NUMBERS;
FB_INLINE bool in_bytes(int32_t codebook) { return codebook == E2M1 || codebook >= IQ1; }  // its whole numbers fit them

// fp8 has the exponents of fp16 but for the bias, so a code moved into its place is the number over 2^8.
constexpr float E4M3_UNIT = 256.0f;
FB_INLINE float e4m3_over_unit(uint8_t code) {
  return to_float(f16{uint16_t((code & 0x7f) << 7 | (code & 0x80) << 8)});
}
FB_INLINE vf e4m3_over_unit(const uint8_t* codes) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i low = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(-0x8000));
  return (vf)_mm512_cvtph_ps(_mm256_or_si256(low, sign));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const __m128i low = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
  const __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(-0x8000));
  return (vf)_mm256_cvtph_ps(_mm_or_si128(low, sign));
#else
  vf v;
  for (int i = 0; i < VL; ++i) v[i] = e4m3_over_unit(codes[i]);
  return v;
#endif
}

// 64 codes as four vectors of numbers over E4M3_UNIT_64, in the order of `place_in_64`.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define FB_E4M3_BY_64 1
#if defined(__AVX512VBMI__)
// Two tables of 128 bytes give the bits of bf16, which holds each number: half of the operations of numbers by fp16.
constexpr float E4M3_UNIT_64 = 1.0f;
struct Bf16Bytes {
  alignas(64) uint8_t upper[128] = {}, lower[128] = {};
  constexpr Bf16Bytes() {
    for (int code = 1; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      if (!exponent)  // below the normal numbers of e4m3, not of bf16
        for (exponent = 1; mantissa < 8; --exponent) mantissa *= 2;
      const int bits = (exponent + 120) << 7 | (mantissa & 7) << 4;
      upper[code] = uint8_t(bits >> 8), lower[code] = uint8_t(bits);
    }
  }
};
static constexpr Bf16Bytes BF16_BYTES;
FB_INLINE void e4m3_64(const uint8_t* codes, vf* to) {
  const __m512i at = _mm512_loadu_si512(codes);
  const auto look_up = [&](const uint8_t* table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), at, _mm512_load_si512(table + 64));
  };
  const __m512i upper = _mm512_ternarylogic_epi64(look_up(BF16_BYTES.upper), at, _mm512_set1_epi8(-128), 0xf8);  // | sign
  const __m512i lower = look_up(BF16_BYTES.lower), odd = _mm512_set1_epi32(-65536);
  FB_UNROLL for (int h = 0; h < 2; ++h) {
    const __m512i pairs = h ? _mm512_unpackhi_epi8(lower, upper) : _mm512_unpacklo_epi8(lower, upper);
    to[2 * h] = (vf)_mm512_slli_epi32(pairs, 16);
    to[2 * h + 1] = (vf)_mm512_and_si512(pairs, odd);
  }
}
constexpr int64_t place_in_64(int64_t i) { return (i % 16 / 8) * 32 + (i & 1) * 16 + i / 16 * 4 + i % 8 / 2; }
#else
constexpr float E4M3_UNIT_64 = E4M3_UNIT;
FB_INLINE void e4m3_64(const uint8_t* codes, vf* to) {
  const __m512i bytes = _mm512_loadu_si512(codes), zero = _mm512_setzero_si512();
  FB_UNROLL for (int h = 0; h < 2; ++h) {  // a byte in the upper half of a word needs one shift
    const __m512i words = h ? _mm512_unpackhi_epi8(zero, bytes) : _mm512_unpacklo_epi8(zero, bytes);
    const __m512i halves = _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(int16_t(0xbfff)));
    to[2 * h] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    to[2 * h + 1] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }
}
constexpr int64_t place_in_64(int64_t i) { return (i % 16 / 8) * 32 + i / 16 * 8 + i % 8; }
#endif
#else
constexpr int64_t place_in_64(int64_t i) { return i; }
#endif
FB_INLINE bool by_64(int32_t codebook, int64_t group) {
#if FB_E4M3_BY_64
  return codebook == E4M3 && group % 64 == 0;
#else
  return false;
#endif
}

// The numbers of the low nibbles of VL bytes, and of the high ones.
struct Pair { vf low, high; };
FB_INLINE Pair sixteenths(const uint8_t* codes, const float* numbers) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_load_ps(numbers);
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return {(vf)_mm512_permutexvar_ps(wide, table), (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table)};
#elif defined(__AVX2__)
  const __m256 first = _mm256_load_ps(numbers), second = _mm256_load_ps(numbers + 8);
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  auto look_up = [&](__m256i at) {  // bit 3 says which half
    return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(first, at), _mm256_permutevar8x32_ps(second, at),
                                _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
  };
  return {look_up(wide), look_up(_mm256_srli_epi32(wide, 4))};
#else
  Pair p;
  for (int i = 0; i < VL; ++i) p.low[i] = numbers[codes[i] & 15], p.high[i] = numbers[codes[i] >> 4];
  return p;
#endif
}

// Elements [0, n) of a group with a codebook: its number times scale, one rounding.
FB_INLINE void look_up_group(const uint8_t* codes, int32_t codebook, float scale, int64_t n, float* to) {
  int64_t i = 0;
  if (codebook == E4M3) {
    const float wide = scale * E4M3_UNIT;
    for (; i + VL <= n; i += VL) store(to + i, e4m3_over_unit(codes + i) * wide);
    for (; i < n; ++i) to[i] = e4m3_over_unit(codes[i]) * wide;
    return;
  }
  const float* numbers = SIXTEEN[codebook - E2M1];
  for (; i + 2 * VL <= n; i += 2 * VL) {
    const Pair p = sixteenths(codes + i / 2, numbers);
    alignas(64) float low[VL], high[VL];
    store(low, p.low * scale), store(high, p.high * scale);
    for (int j = 0; j < VL; ++j) to[i + 2 * j] = low[j], to[i + 2 * j + 1] = high[j];
  }
  for (; i < n; ++i) to[i] = numbers[(codes[i / 2] >> (4 * (i & 1))) & 15] * scale;
}

constexpr int64_t FEW_CODED_ROWS = 4;  // rows of x that meet codes in registers

// Whether look_up_product takes rows in such groups.
FB_INLINE bool looks_up(int32_t codebook, int64_t group) { return group % (codebook == E4M3 ? VL : 2 * VL) == 0; }

// k values of a row of x as look_up_product wants them, whole groups: for codes of 4 bits VL even elements, then VL odd
// ones; for fp8 as they are, or as 64 codes become numbers.
template <class T>
FB_INLINE void arrange_row(const T* x, int64_t k, int64_t group, int32_t codebook, float* to) {
  const bool wide = by_64(codebook, group), plain = codebook == E4M3 && !wide;
  for (int64_t i = 0, whole = (k + group - 1) / group * group; i < whole; ++i) {
    const int64_t within = wide ? i % 64 : i % (2 * VL);
    const int64_t at = plain ? i : i - within + (wide ? place_in_64(within) : (within & 1) * VL + within / 2);
    to[at] = i < k ? load_one(x + i) : 0.0f;
  }
}

#if FB_E4M3_BY_64
// c[M, R] += x[M, k] times R rows of fp8 in groups of whole 64s. Each group of a row has one chain of sums: those of other
// rows and groups run meanwhile. Results are the same for any R.
template <int M, int R, class Scale>
FB_INLINE void e4m3_rows(const float* x, int64_t xs, const uint8_t* rows, int64_t stride, int64_t group, int64_t groups,
                         const Scale& scale_of, float* c, int64_t cs) {
  vf total[R][M] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* codes = rows + g * group;
    const float* at = x + g * group;
    FB_UNROLL for (int r = 0; r < R; ++r) call_ahead(codes + r * stride, group);
    vf sum[R][M] = {};
    for (int64_t i = 0; i < group; i += 64)
      FB_UNROLL for (int r = 0; r < R; ++r) {
        vf w[4];
        e4m3_64(codes + r * stride + i, w);
        FB_UNROLL for (int p = 0; p < 4; ++p)
          FB_UNROLL for (int m = 0; m < M; ++m) sum[r][m] += w[p] * load(at + m * xs + i + p * VL);
      }
    FB_UNROLL for (int r = 0; r < R; ++r) {
      const float scale = scale_of(rows + r * stride, g) * E4M3_UNIT_64;
      FB_UNROLL for (int m = 0; m < M; ++m) total[r][m] += sum[r][m] * scale;
    }
  }
  FB_UNROLL for (int r = 0; r < R; ++r)
    FB_UNROLL for (int m = 0; m < M; ++m) c[m * cs + r] += lane_sum(total[r][m]);
}
#endif

// c[M, n] += x[M, k] times packed rows whose group g has scale_of(row, g), codes in registers.
template <int M, bool EIGHT, class Scale>
static void look_up_product(const float* x, int64_t xs, const uint8_t* rows, int64_t stride, int64_t n, int64_t group,
                            int64_t groups, int32_t codebook, const Scale& scale_of, float* c, int64_t cs) {
  const float* numbers = SIXTEEN[EIGHT ? 0 : codebook - E2M1];
  const int64_t nbytes = EIGHT ? group : group / 2;
  begin_reading(rows, n * stride);
  int64_t j = 0;
#if FB_E4M3_BY_64
  if (EIGHT && group % 64 == 0) {
    constexpr int R = M == 1 ? 4 : M == 2 ? 2 : 1;
    for (; j + R <= n; j += R) e4m3_rows<M, R>(x, xs, rows + j * stride, stride, group, groups, scale_of, c + j, cs);
    for (; j < n; ++j) e4m3_rows<M, 1>(x, xs, rows + j * stride, stride, group, groups, scale_of, c + j, cs);
  }
#endif
  for (; j < n; ++j) {
    const uint8_t* row = rows + j * stride;
    vf total[M] = {};
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* codes = row + g * nbytes;
      const float *at = x + g * group, scale = scale_of(row, g) * (EIGHT ? E4M3_UNIT : 1.0f);
      call_ahead(codes, nbytes);
      vf sum[M] = {};
      for (int64_t i = 0; i < nbytes; i += VL) {
        if (EIGHT) {
          const vf w = e4m3_over_unit(codes + i);
          FB_UNROLL for (int m = 0; m < M; ++m) sum[m] += w * load(at + m * xs + i);
        } else {
          const Pair w = sixteenths(codes + i, numbers);
          FB_UNROLL for (int m = 0; m < M; ++m)
            sum[m] += w.low * load(at + m * xs + 2 * i) + w.high * load(at + m * xs + 2 * i + VL);
        }
      }
      FB_UNROLL for (int m = 0; m < M; ++m) total[m] += sum[m] * scale;
    }
    FB_UNROLL for (int m = 0; m < M; ++m) c[m * cs + j] += lane_sum(total[m]);
  }
}

}  // namespace forebay
