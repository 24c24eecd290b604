// Products of packed 4- and 8-bit codes with rows of x held as 16- or 8-bit integers: AVX2, or ARM's NEON (neon_dot.h).
//
// x is rounded to integers with one scale per group: to 16 bits the error is 1.5e-5 of the group's largest magnitude,
// far below that of a bf16 x; to 8 bits it is 0.4 %. Sums are exact: 64 products of 255 * 32767 fit 32 bits.
#pragma once

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FB_AVX2_DOT 1
#endif
#if FB_AVX2_DOT || defined(__aarch64__)
#define FB_INTEGER_DOT 1

#include "ahead.h"
#include "groups.h"

namespace forebay {

// Rows of x as integers: whole groups, padded with zeros. Rows are taken in blocks of 8, and what is left in one block
// each of 4, 2 and 1. A block holds SUB elements of each of its rows, then the next SUB of each: read in order, and
// with no power of two between rows, which would share one L1 set. Every 32 elements hold the even ones and then the
// odd ones for 4-bit codes, so that low and high nibbles meet theirs; for 8-bit codes they stand in order. Groups of 16
// (SUB is 16) are taken two at a time, 32 elements: their products add up in the low and the high half of a vector, and
// 8-bit codes meet elements 0 to 7 and 16 to 23, then the others. x then has one scale for both.
struct IntegerRows {
  uint8_t* values;  // int16 or int8
  float* scale;     // [m, g8]
  float* sum;       // [m, g8]: sum of the group's elements as rounded
  int64_t k, g8;    // whole groups; group count in whole vectors of 8
};

constexpr int64_t MOST_TOGETHER = 8;  // rows of a block

struct RowBlock { int64_t begin, rows; };

// The block that holds row i of m, of at most MOST.
template <int64_t MOST> FB_INLINE RowBlock block_of(int64_t i, int64_t m) {
  int64_t begin = i / MOST * MOST, left = m - begin;
  if (left >= MOST) return {begin, MOST};
  for (int64_t rows = MOST / 2;; rows /= 2) {
    if (!(left & rows)) continue;
    if (i < begin + rows) return {begin, rows};
    begin += rows;
  }
}

#define FB_METHOD inline __attribute__((always_inline))

// Elements that are multiplied together.
constexpr int unit_of(int sub) { return sub == 16 ? 32 : sub; }

// The units of groups [g0, g1): each group has `each`, but two of 16 share one; `nbytes` of a unit with its factors.
struct Units { int64_t begin, end, each, nbytes; };
template <int BITS, int SUB> FB_INLINE Units units_of(const GroupFormat& f, int64_t g0, int64_t g1) {
  constexpr int UNIT = unit_of(SUB);
  const int64_t each = SUB == 16 ? 1 : f.group / SUB, nbytes = UNIT * BITS / 8 + f.factors_nbytes() * UNIT / SUB;
  return {SUB == 16 ? g0 / 2 : g0 * each, SUB == 16 ? g1 / 2 : g1 * each, each, nbytes};
}

}  // namespace forebay

#if !FB_AVX2_DOT
#include "neon_dot.h"
#endif

namespace forebay {

#if FB_AVX2_DOT
FB_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
FB_INLINE __m256 load8(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
FB_INLINE __m256 load8(const bf16* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

// The sums of four vectors, and of one, in the same order.
FB_INLINE __m128 sum8(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
FB_INLINE float sum8(__m256 v) { return _mm_cvtss_f32(sum8(v, v, v, v)); }

// Elements [0, n) of a group of `group` (a multiple of 32) as integers of BYTES bytes. False where x is not finite, or
// so small that its scale would not be a normal number: such rows take the fp32 kernel.
// With `halves` a group is two of 16: both get the scale, and each its own sum.
template <int BYTES, class T>
FB_INLINE bool round_group(const T* x, int64_t n, int64_t group, bool interleave, bool halves, uint8_t* to,
                           int64_t sub, int64_t sub_stride, float* scale, float* sum) {
  alignas(32) float held[32];
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 most = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) most = _mm256_max_ps(_mm256_andnot_ps(sign, load8(x + i)), most);
  float largest = 0.0f;
  for (; i < n; ++i) largest = std::max(largest, bits_to_float(float_to_bits(load_one(x + i)) & 0x7fffffffu));
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, most);
  for (float v : lanes) largest = std::max(largest, v);
  constexpr float top = BYTES == 2 ? 32767.0f : 127.0f;
  const bool usable = largest == 0.0f || (largest > 1e-30f && largest < 1e38f);
  const float inverse = largest > 0.0f && usable ? top / largest : 0.0f;
  *scale = usable ? largest / top : 0.0f;
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i total = _mm256_setzero_si256(), first = total;
  bool ordered = true;
  for (i = 0; i < group; i += 32) {
    __m256 v[4];
    if (i + 32 <= n) {
      FB_UNROLL for (int j = 0; j < 4; ++j) v[j] = load8(x + i + 8 * j);
    } else {
      for (int64_t j = 0; j < 32; ++j) held[j] = i + j < n ? load_one(x + i + j) : 0.0f;
      FB_UNROLL for (int j = 0; j < 4; ++j) v[j] = _mm256_load_ps(held + 8 * j);
    }
    __m256 odd = _mm256_setzero_ps();
    FB_UNROLL for (int j = 0; j < 4; ++j) odd = _mm256_or_ps(odd, _mm256_cmp_ps(v[j], v[j], _CMP_UNORD_Q));
    ordered = ordered && _mm256_movemask_ps(odd) == 0;
    __m256i q[4];
    FB_UNROLL for (int j = 0; j < 4; ++j) {
      q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(v[j], factor));
      total = _mm256_add_epi32(total, q[j]);
    }
    first = _mm256_add_epi32(q[0], q[1]);
    __m256i a = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
    __m256i b = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[2], q[3]), 0xd8);
    if (interleave) {
      const __m256i low = _mm256_set1_epi32(0xffff);
      const __m256i even = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
      const __m256i odds = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
      a = _mm256_permute4x64_epi64(even, 0xd8);
      b = _mm256_permute4x64_epi64(odds, 0xd8);
    } else if (halves) {
      const __m256i low = _mm256_permute2x128_si256(a, b, 0x20);
      b = _mm256_permute2x128_si256(a, b, 0x31);
      a = low;
    }
    uint8_t* at = to + i / sub * sub_stride + i % sub * BYTES;
    if (BYTES == 2) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), a);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + 32), b);
    } else {
      const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bytes);
    }
  }
  // A sum of at most 2^11 elements of 2^15 stays below 2^31.
  alignas(32) int32_t parts[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), total);
  int64_t whole = 0;
  for (int32_t part : parts) whole += part;
  *sum = *scale * float(whole);
  if (halves) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(parts), first);
    int64_t half = 0;
    for (int32_t part : parts) half += part;
    scale[1] = *scale;
    sum[0] = *scale * float(half);
    sum[1] = *scale * float(whole - half);
  }
  return usable && ordered;
}
#endif

// Row i of m; false where it must take the fp32 kernel.
template <int BYTES, class T>
static bool round_row(const T* x, int64_t k, int64_t group, int32_t bits, const IntegerRows& rows, int64_t i,
                      int64_t m) {
  bool usable = true;
  const bool halves = group == 16;
  const int64_t count = rows.k / group, sub = group % 64 ? 32 : 64, together = halves ? 2 : 1, span = group * together;
  const RowBlock block = block_of<MOST_TOGETHER>(i, m);
  uint8_t* values = rows.values + (block.begin * rows.k + (i - block.begin) * sub) * BYTES;
  float *scale = rows.scale + i * rows.g8, *sum = rows.sum + i * rows.g8;
  for (int64_t g = 0; g < count; g += together)
    usable &= round_group<BYTES>(x + g * group, std::min(span, k - g * group), span, bits == 4, halves,
                                 values + g * group * block.rows * BYTES, sub, sub * block.rows * BYTES, scale + g,
                                 sum + g);
  for (int64_t g = count; g < rows.g8; ++g) scale[g] = sum[g] = 0.0f;
  return usable;
}

#if FB_AVX2_DOT
FB_INLINE __m256 load8(__m128i v, int32_t dtype) {
  return dtype == F16 ? _mm256_cvtph_ps(v) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

// Scales (or lows) [g, g + 8) of a row of `count`, in fp32: zeros from `count` on. Nothing beyond is read; before the
// scales lie codes, of 16 bytes at least.
FB_INLINE __m256 load_scales(const uint8_t* at, int32_t dtype, int64_t g, int64_t count) {
  const int64_t missing = g + 8 - count;
  if (missing <= 0) return load8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 2 * g)), dtype);
  alignas(16) static constexpr int8_t shift[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                   -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 2 * count - 16));
  return load8(_mm_shuffle_epi8(last, _mm_loadu_si128(reinterpret_cast<const __m128i*>(shift + 2 * missing))), dtype);
}

// The whole numbers of a codebook that fit bytes (codebooks.h).
FB_INLINE __m128i byte_table(int32_t codebook) {
  const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(WHOLE_NUMBERS.at[codebook - E2M1]));
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// The dot products of SUB elements (of 16: of two groups): Codes holds those of one weight row unpacked, `dot` meets them
// with a row of x. With a BOOK codes are places in a table of whole numbers.
template <int BITS, int BYTES, int SUB, bool BOOK> struct Codes;

template <int SUB, bool BOOK> struct Codes<4, 2, SUB, BOOK> {
  __m256i w[SUB / 16];
  FB_METHOD Codes(const uint8_t* p, __m128i table) {
    const __m256i nibble = _mm256_set1_epi16(15);
    FB_UNROLL for (int i = 0; i < SUB / 32; ++i) {
      if (BOOK) {
        const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)), low = _mm_set1_epi8(15);
        w[2 * i] = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, _mm_and_si128(both, low)));
        w[2 * i + 1] = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(both, 4), low)));
        continue;
      }
      const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
      w[2 * i] = _mm256_and_si256(b, nibble);
      w[2 * i + 1] = _mm256_srli_epi16(b, 4);
    }
  }
  FB_METHOD __m256i dot(const uint8_t* x) const {
    __m256i sum = _mm256_madd_epi16(w[0], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    FB_UNROLL for (int i = 1; i < SUB / 16; ++i)
      sum = _mm256_add_epi32(
          sum, _mm256_madd_epi16(w[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32 * i))));
    return sum;
  }
};

template <int SUB> struct Codes<8, 2, SUB, false> {
  __m256i w[SUB / 16];
  FB_METHOD Codes(const uint8_t* p, __m128i) {
    FB_UNROLL for (int i = 0; i < SUB / 16; ++i)
      w[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
  }
  FB_METHOD __m256i dot(const uint8_t* x) const {
    __m256i sum = _mm256_madd_epi16(w[0], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    FB_UNROLL for (int i = 1; i < SUB / 16; ++i)
      sum = _mm256_add_epi32(
          sum, _mm256_madd_epi16(w[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32 * i))));
    return sum;
  }
};

template <bool BOOK> struct Codes<4, 2, 16, BOOK> : Codes<4, 2, 32, BOOK> { using Codes<4, 2, 32, BOOK>::Codes; };

template <> struct Codes<8, 2, 16, false> : Codes<8, 2, 32, false> {
  FB_METHOD Codes(const uint8_t* p, __m128i table) : Codes<8, 2, 32, false>(p, table) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)),
                  b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
    w[0] = _mm256_cvtepu8_epi16(_mm_unpacklo_epi64(a, b));
    w[1] = _mm256_cvtepu8_epi16(_mm_unpackhi_epi64(a, b));
  }
};

template <int SUB> struct Codes<4, 1, SUB, false> {
  __m256i w[SUB / 32];
  FB_METHOD Codes(const uint8_t* p, __m128i) {
    const __m256i nibble = _mm256_set1_epi8(15), shift = _mm256_setr_epi64x(0, 0, 4, 4);
    FB_UNROLL for (int i = 0; i < SUB / 32; ++i) {
      const __m256i b = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
      w[i] = _mm256_and_si256(_mm256_srlv_epi64(b, shift), nibble);
    }
  }
  FB_METHOD __m256i dot(const uint8_t* x) const {  // 4 * 15 * 127 fits 16 bits
    __m256i sum = _mm256_maddubs_epi16(w[0], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    FB_UNROLL for (int i = 1; i < SUB / 32; ++i)
      sum = _mm256_add_epi16(
          sum, _mm256_maddubs_epi16(w[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32 * i))));
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
  }
};

// 8 scales of a row with a codebook, from group g on, in whole numbers of it.
FB_INLINE __m256 eight_coded_scales(const uint8_t* at, const GroupFormat& f, int64_t g) {
  __m256 s = load_scales(at, f.scale_dtype, g, f.count);
  if (!f.symmetric) {  // upper halves are bf16, and lower ones lie where lows do: read as bf16 they are 16 bits too high
    const __m256 lower = load_scales(at + f.scales_nbytes(), BF16, g, f.count);
    s = _mm256_or_ps(s, _mm256_castsi256_ps(_mm256_srli_epi32(_mm256_castps_si256(lower), 16)));
  }
  return _mm256_mul_ps(s, _mm256_set1_ps(WORTH[f.codebook - E2M1]));
}

// c[m, n] += the product of a block of MB rows of x with NB packed rows, groups [g0, g1): at most STEP, from a multiple
// of 8 on. Beside each unit as many bytes further on are called in, if the rows are read for the `first` time.
template <int BITS, int BYTES, int SUB, int MB, int NB, int STEP, bool BOOK>
FB_INLINE void integer_block(const uint8_t* x, const float* x_scale, const float* x_sum, int64_t g8,
                             const uint8_t* rows, int64_t stride, const GroupFormat& f, int64_t g0, int64_t g1,
                             bool first, float* c, int64_t cs) {
  alignas(32) float scales[NB][MB][STEP];
  __m256 acc[NB][MB];
  const __m128i table = BOOK ? byte_table(f.codebook) : _mm_setzero_si128();
  FB_UNROLL for (int n = 0; n < NB; ++n)
    FB_UNROLL for (int i = 0; i < MB; ++i) acc[n][i] = _mm256_setzero_ps();
  FB_UNROLL for (int n = 0; n < NB; ++n) {
    const uint8_t* at = rows + n * stride + f.codes_nbytes();
    for (int64_t g = g0; g < g1; g += 8) {
      const __m256 s = BOOK ? eight_coded_scales(at, f, g) : load_scales(at, f.scale_dtype, g, f.count);
      FB_UNROLL for (int i = 0; i < MB; ++i)
        _mm256_store_ps(scales[n][i] + (g - g0), _mm256_mul_ps(s, _mm256_loadu_ps(x_scale + i * g8 + g)));
      if (BOOK) continue;
      const __m256 l = f.symmetric ? _mm256_mul_ps(s, _mm256_set1_ps(symmetric_low(BITS)))
                                   : load_scales(at + f.scales_nbytes(), f.scale_dtype, g, f.count);
      FB_UNROLL for (int i = 0; i < MB; ++i)
        acc[n][i] = _mm256_fmadd_ps(l, _mm256_loadu_ps(x_sum + i * g8 + g), acc[n][i]);
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
      const Codes<BITS, BYTES, SUB, BOOK> codes(codes_at + n * stride, table);
      FB_UNROLL for (int i = 0; i < MB; ++i) {
        const __m256 sum = _mm256_cvtepi32_ps(codes.dot(values + i * UNIT * BYTES));
        __m256 scale;
        if constexpr (SUB == 16)
          scale = _mm256_setr_m128(_mm_broadcast_ss(scales[n][i] + g), _mm_broadcast_ss(scales[n][i] + g + 1));
        else
          scale = _mm256_broadcast_ss(scales[n][i] + g);
        acc[n][i] = _mm256_fmadd_ps(sum, scale, acc[n][i]);
      }
    }
    if (SUB == 16) g += 2;
    else if (--left == 0) left = units.each, ++g;
  }
  if (NB == 4) {
    FB_UNROLL for (int i = 0; i < MB; ++i) {
      const __m128 sums = sum8(acc[0][i], acc[1 % NB][i], acc[2 % NB][i], acc[3 % NB][i]);
      _mm_storeu_ps(c + i * cs, _mm_add_ps(_mm_loadu_ps(c + i * cs), sums));
    }
    return;
  }
  FB_UNROLL for (int n = 0; n < NB; ++n)
    FB_UNROLL for (int i = 0; i < MB; ++i) c[i * cs + n] += sum8(acc[n][i]);
}
#endif

template <int BITS, int BYTES, int SUB, int MB, int NB, bool BOOK>
static void integer_rows(const IntegerRows& x, int64_t m, const uint8_t* rows, int64_t stride, int64_t n,
                         const GroupFormat& f, float* c, int64_t cs) {
  constexpr int STEP = 128 / MB;  // 16 KiB of x in 16-bit groups of 64
  const uint8_t* values = x.values + m * x.k * BYTES;
  const float *scale = x.scale + m * x.g8, *sum = x.sum + m * x.g8;
  const bool first = m == 0;  // later blocks of x find the rows in the cache
  c += m * cs;
  if (first) begin_reading(rows, n * stride);
  for (int64_t g0 = 0; g0 < f.count; g0 += STEP) {
    const int64_t g1 = std::min<int64_t>(f.count, g0 + STEP);
    int64_t j = 0;
    for (; j + NB <= n; j += NB)
      integer_block<BITS, BYTES, SUB, MB, NB, STEP, BOOK>(values, scale, sum, x.g8, rows + j * stride, stride, f, g0, g1,
                                                    first, c + j, cs);
    for (; j < n; ++j)
      integer_block<BITS, BYTES, SUB, MB, 1, STEP, BOOK>(values, scale, sum, x.g8, rows + j * stride, stride, f, g0, g1,
                                                   first, c + j, cs);
  }
}

// c[m, n] += x[0, m) times n packed rows, transposed.
template <int BITS, int BYTES, int SUB, bool BOOK = false>
static void integer_product(const IntegerRows& x, int64_t m, const uint8_t* rows, int64_t stride, int64_t n,
                            const GroupFormat& f, float* c, int64_t cs) {
  for (int64_t i = 0; i < m;) {
    const int64_t block = block_of<MOST_TOGETHER>(i, m).rows;
    switch (block) {
      case 8: integer_rows<BITS, BYTES, SUB, 8, 1, BOOK>(x, i, rows, stride, n, f, c, cs); break;
      case 4: integer_rows<BITS, BYTES, SUB, 4, 2, BOOK>(x, i, rows, stride, n, f, c, cs); break;
      case 2: integer_rows<BITS, BYTES, SUB, 2, 2, BOOK>(x, i, rows, stride, n, f, c, cs); break;
      default: integer_rows<BITS, BYTES, SUB, 1, 4, BOOK>(x, i, rows, stride, n, f, c, cs);
    }
    i += block;
  }
}

}  // namespace forebay
#endif
