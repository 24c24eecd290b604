// Rows of x as 16- or 8-bit integers for processors with AVX-512 and its VNNI instructions: the same roundings as
// integer_dot.h, in the orders that vnni_dot.h (few rows of x) and vnni_panels.h (many) read.
#pragma once

#include "integer_dot.h"

#if FB_INTEGER_DOT && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define FB_VNNI 1

namespace forebay {
namespace vnni {

constexpr int64_t UNIT = 64;     // elements of x that are rounded and multiplied together
constexpr int64_t LANES = 16;    // groups whose scales are read together
constexpr int64_t MOST_TOGETHER = 4;  // rows of a block
constexpr int64_t FEW_ROWS = 5;  // rows of x up to which they meet weights one by one; from more on, in panels

// sum += the products of 32 pairs of 16 bits, or of 64 bytes (w without a sign), four or two to a lane. In assembly, since
// gcc 12 moves the sums to memory and back around the intrinsics.
template <int NBYTES> FB_INLINE void add_products(__m512i& sum, __m512i w, __m512i x) {
  if (NBYTES == 2) asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  else asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
}

// Where in a unit of 64 integers element i lies. Of 16 bits they are multiplied in pairs, of 8 in fours, beside codes
// that a shift and a mask leave: DOT16 holds the even elements, then the odd ones; a panel of 8-bit codes has the pairs
// (0, 2), (1, 3) of every four, one of 4-bit codes (0, 4), (1, 5), ... of every eight, or the fours of even and of odd.
enum class Order { PLAIN, DOT16, PANEL16_OF_8, PANEL16_OF_4, PANEL8_OF_4 };

constexpr int64_t place_of(Order order, int64_t i) {
  switch (order) {
    case Order::DOT16: return i / 2 + (i & 1) * 32;
    case Order::PANEL16_OF_8: return i / 4 * 4 + (i & 1) * 2 + (i & 2) / 2;
    case Order::PANEL16_OF_4: return i / 8 * 8 + (i & 3) * 2 + (i & 4) / 4;
    case Order::PANEL8_OF_4: return i / 8 * 8 + (i & 1) * 4 + (i & 6) / 2;
    default: return i;
  }
}

// The element that each place of a unit holds.
template <Order ORDER> struct Elements {
  alignas(64) int16_t at[64] = {};
  constexpr Elements() {
    for (int64_t i = 0; i < 64; ++i) at[place_of(ORDER, i)] = int16_t(i);
  }
};

constexpr Order order_of(int bits, int nbytes, bool panels) {
  if (nbytes == 1) return panels && bits == 4 ? Order::PANEL8_OF_4 : Order::PLAIN;
  return !panels ? Order::DOT16 : bits == 4 ? Order::PANEL16_OF_4 : Order::PANEL16_OF_8;
}

// Rows of x as integers, zeros up to whole units. Few rows lie in blocks of 4, 2 and 1 (block_of): 64 elements of each
// of a block's rows, then the next 64 of each. Many lie one after the other, an odd number of cache lines apart, so that
// several do not share one set of L1.
struct Integers {
  uint8_t* values;  // int16 or int8
  float* scale;     // [m, groups]
  float* sum;       // [m, groups]: sum of the group's elements as rounded; for panels as `sum_for_panels` has it
  int64_t k, groups, row_nbytes;  // whole units; whole vectors; of many rows
  bool panels;     // m is more than FEW_ROWS
  int32_t middle;  // the code that is 0 of symmetric rows, else 0
};

// What panels add for a group of so many integers together: of symmetric rows the bits of an integer, which products are
// added to, else what lows are multiplied with.
FB_INLINE float sum_for_panels(const Integers& rows, int32_t total, float step) {
  if (!rows.middle) return step * float(total);
  const int32_t value = -rows.middle * total;
  float bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

FB_INLINE __m512 load16(const float* p, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
FB_INLINE __m512 load16(const bf16* p, __mmask16 lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
}
FB_INLINE __m512 load16(const f16* p, __mmask16 lanes) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p)); }

// The largest magnitude of x[0, n), infinite where one is not finite.
template <class T> FB_INLINE float largest_of(const T* x, int64_t n) {
  __m512 most = _mm512_setzero_ps();
  __mmask16 odd = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = load16(x + i, n - i >= 16 ? 0xffff : __mmask16((1 << (n - i)) - 1));
    most = _mm512_max_ps(most, _mm512_abs_ps(v));
    odd |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  }
  return odd ? std::numeric_limits<float>::infinity() : _mm512_reduce_max_ps(most);
}

FB_INLINE bool normal_scale(float largest) { return largest == 0.0f || (largest > 1e-30f && largest < 1e38f); }

// Integers of a unit into their places.
template <Order ORDER, int NBYTES> FB_INLINE void place_unit(const __m512i* q, uint8_t* to) {
  static constexpr Elements<ORDER> from;
  const auto join = [](__m512i low, __m512i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
  };
  const __m512i a = join(q[0], q[1]), b = join(q[2], q[3]);
  const __m512i first = _mm512_permutex2var_epi16(a, _mm512_load_si512(from.at), b),
                second = _mm512_permutex2var_epi16(a, _mm512_load_si512(from.at + 32), b);
  if (NBYTES == 2) {
    _mm512_storeu_si512(to, first);
    _mm512_storeu_si512(to + 64, second);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(first));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm512_cvtepi16_epi8(second));
  }
}

// Row i of m, k elements from x on; false where it is not finite, or so small that a scale would not be a normal number.
// Groups of 16 share the scale of two.
template <Order ORDER, int NBYTES, class T>
static bool round_row(const T* x, int64_t k, int64_t group, const Integers& rows, int64_t i, int64_t m) {
  constexpr float top = NBYTES == 2 ? 32767.0f : 127.0f;
  const int64_t count = (k + group - 1) / group, span = std::max<int64_t>(group, 32);
  const RowBlock block = rows.panels ? RowBlock{i, 1} : block_of<MOST_TOGETHER>(i, m);
  uint8_t* values = rows.panels ? rows.values + i * rows.row_nbytes
                                : rows.values + (block.begin * rows.k + (i - block.begin) * UNIT) * NBYTES;
  const int64_t unit_nbytes = UNIT * NBYTES * (rows.panels ? 1 : block.rows);
  float *scale = rows.scale + i * rows.groups, *sum = rows.sum + i * rows.groups;
  for (int64_t g = count / 16 * 16; g < rows.groups; ++g) scale[g] = sum[g] = 0.0f;
  const auto sum_of = [&](int32_t total, float step) {
    return rows.panels ? sum_for_panels(rows, total, step) : step * float(total);
  };
  bool usable = true;
  float factor[2] = {}, step[2] = {};      // of each half of a unit, and their inverses
  __m512i total = _mm512_setzero_si512();  // of 512 elements of 2^15 at most
  for (int64_t at = 0; at < rows.k; at += UNIT) {
    FB_UNROLL for (int h = 0; h < 2; ++h) {
      const int64_t begin = at + 32 * h;
      if (begin % span) {  // in the middle of a group
        factor[h] = factor[0], step[h] = step[0];
        continue;
      }
      const float largest = begin < k ? largest_of(x + begin, std::min(span, k - begin)) : 0.0f;
      const bool normal = normal_scale(largest);
      usable &= normal;
      step[h] = normal ? largest * (1.0f / top) : 0.0f;
      factor[h] = normal && largest > 0.0f ? top / largest : 0.0f;
    }
    __m512i q[4];
    FB_UNROLL for (int j = 0; j < 4; ++j) {
      const int64_t left = k - at - 16 * j;
      const __m512 v = load16(x + at + 16 * j, left >= 16 ? 0xffff : left > 0 ? __mmask16((1 << left) - 1) : 0);
      q[j] = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(factor[j / 2])));
    }
    place_unit<ORDER, NBYTES>(q, values + at / UNIT * unit_nbytes);
    if (group >= UNIT) {
      total = _mm512_add_epi32(_mm512_add_epi32(total, _mm512_add_epi32(q[0], q[1])), _mm512_add_epi32(q[2], q[3]));
      if ((at + UNIT) % group == 0) {
        scale[at / group] = step[0];
        sum[at / group] = sum_of(_mm512_reduce_add_epi32(total), step[0]);
        total = _mm512_setzero_si512();
      }
      continue;
    }
    for (int64_t j = 0; j < 4; j += group / 16) {
      const int64_t g = (at + 16 * j) / group;
      if (g >= count) break;
      scale[g] = step[j / 2];
      sum[g] = sum_of(_mm512_reduce_add_epi32(group == 16 ? q[j] : _mm512_add_epi32(q[j], q[j + 1])), step[j / 2]);
    }
  }
  return usable;
}

template <int BITS, int NBYTES, class T>
static bool round_row(const T* x, int64_t k, int64_t group, const Integers& rows, int64_t i, int64_t m) {
  return rows.panels ? round_row<order_of(BITS, NBYTES, true), NBYTES>(x, k, group, rows, i, m)
                     : round_row<order_of(BITS, NBYTES, false), NBYTES>(x, k, group, rows, i, m);
}

}  // namespace vnni
}  // namespace forebay
#endif
