// Many rows of x as integers (vnni_rows.h) times packed rows: codes are expanded once into panels of 32 weight rows, a
// lane each, which all rows of x meet; sums of a group are exact, then scaled. AVX-512 and its VNNI instructions.
#pragma once

#include "ahead.h"
#include "panels.h"
#include "vnni_rows.h"
#include "wide.h"

#if FB_VNNI

namespace forebay {
namespace vnni {

constexpr int64_t SCALE_GROUPS = 32;  // groups whose scales lie ready
constexpr int64_t MOST_SUMMED = 256;  // elements whose products fit 32 bits: 256 * 255 * 32767
constexpr int64_t PANEL_NBYTES = 1 << 14;  // half of L1

// Words of 32 bits: each holds 4 / NBYTES elements of x, or of one weight row.
constexpr int64_t elements_of(int nbytes) { return 4 / nbytes; }

// Of 16 weight rows, word i / elements_of of each, lane by lane.
template <int BITS, int NBYTES> FB_INLINE void expand(__m512i codes, int32_t* to) {
  constexpr int64_t STEP = PANEL;  // 32-bit lanes from one word to the next
  if constexpr (NBYTES == 1) {
    if constexpr (BITS == 8) {
      _mm512_store_si512(to, codes);
    } else {
      const __m512i mask = _mm512_set1_epi8(15);
      _mm512_store_si512(to, _mm512_and_si512(codes, mask));
      _mm512_store_si512(to + STEP, _mm512_and_si512(_mm512_srli_epi32(codes, 4), mask));
    }
  } else if constexpr (BITS == 8) {
    const __m512i mask = _mm512_set1_epi32(0x00ff00ff);
    _mm512_store_si512(to, _mm512_and_si512(codes, mask));
    _mm512_store_si512(to + STEP, _mm512_and_si512(_mm512_srli_epi32(codes, 8), mask));
  } else {
    const __m512i mask = _mm512_set1_epi32(0x000f000f);
    FB_UNROLL for (int i = 0; i < 4; ++i)
      _mm512_store_si512(to + i * STEP, _mm512_and_si512(_mm512_srli_epi32(codes, unsigned(4 * i)), mask));
  }
}

// A panel of up to 32 rows, elements [k0, k0 + depth), k0 and depth whole groups.
template <int BITS, int NBYTES>
FB_APART void fill(const uint8_t* rows, int64_t stride, int64_t n, int64_t k0, int64_t depth, int32_t* panel) {
  constexpr int64_t CODES = 64 * 8 / BITS;                                    // elements of 64 bytes
  constexpr int64_t WORDS = 32 / BITS / elements_of(NBYTES) * PANEL;          // lanes that one word of codes becomes
  const int64_t nbytes = depth * BITS / 8;
  for (int64_t half = 0; half < PANEL; half += 16)
    for (int64_t b = 0; b < nbytes; b += 64) {
      __m512i r[16];
      FB_UNROLL for (int i = 0; i < 16; ++i)
        r[i] = half + i < n ? load_bytes(rows + (half + i) * stride + k0 * BITS / 8 + b, nbytes - b)
                            : _mm512_setzero_si512();
      transpose16(r);
      int32_t* to = panel + half + b / 64 * CODES / elements_of(NBYTES) * PANEL;
      const int64_t words = std::min<int64_t>(16, (nbytes - b) / 4);
      if (words == 16) {
        FB_UNROLL for (int i = 0; i < 16; ++i) expand<BITS, NBYTES>(r[i], to + i * WORDS);
      } else {
        alignas(64) __m512i held[16];
        FB_UNROLL for (int i = 0; i < 16; ++i) held[i] = r[i];
        for (int64_t i = 0; i < words; ++i) expand<BITS, NBYTES>(held[i], to + i * WORDS);
      }
    }
}

// Scales (or lows) of groups [g0, g0 + count) of up to 32 rows, count at most 32, at to[g * PANEL + row].
FB_APART void fill_scales(const uint8_t* at, int64_t stride, int64_t n, int32_t dtype, int64_t count, float* to) {
  for (int64_t half = 0; half < PANEL; half += 16) {
    __m512i r[16];
    FB_UNROLL for (int i = 0; i < 16; ++i)
      r[i] = half + i < n ? load_bytes(at + (half + i) * stride, 2 * count) : _mm512_setzero_si512();
    transpose16(r);
    FB_UNROLL for (int i = 0; i < 16; ++i) {
      float *even = to + 2 * i * PANEL + half, *odd = even + PANEL;
      if (dtype == F16) {
        _mm512_store_ps(even, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(r[i])));
        _mm512_store_ps(odd, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(r[i], 16))));
      } else {
        _mm512_store_si512(even, _mm512_slli_epi32(r[i], 16));
        _mm512_store_si512(odd, _mm512_and_si512(r[i], _mm512_set1_epi32(int(0xffff0000u))));
      }
    }
  }
}

// What a panel is multiplied with, and what follows a group's exact sum.
struct Operands {
  const uint8_t* values;  // of the first row of x, at the panel's first element
  const float *x_scale, *x_sum;    // at its first group
  int64_t row_nbytes, groups;      // from one row of x to the next
  const int32_t* panel;
  const float *scales, *lows;      // [groups of the panel, PANEL]
};

// Words of a panel that are all of group g, or a part of it.
struct Part {
  const uint8_t* values;
  const int32_t* panel;
  int64_t words, g;
  bool begins, ends;  // the group
};

// c[m, PANEL] += MB rows of x times a part. A function of its own, whose sums then stay in registers: within a loop over
// groups gcc 12 keeps them in memory.
template <int NBYTES, bool LOWS, int MB>
FB_APART void part_block(const Operands& a, const Part& part, int64_t m0, float* c, int64_t cs) {
  __m512i acc[MB][2];
  const float* x_sum = a.x_sum + m0 * a.groups + part.g;
  if (!LOWS && part.begins) {  // what the middle code makes of all elements
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      int32_t middle;
      std::memcpy(&middle, x_sum + m * a.groups, 4);
      acc[m][0] = acc[m][1] = _mm512_set1_epi32(middle);
    }
  } else {
    FB_UNROLL for (int m = 0; m < MB; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_si512();
  }
  const int64_t row_nbytes = a.row_nbytes, words = part.words;
  const uint8_t* values = part.values;
  const int32_t* panel = part.panel;
  for (int64_t i = 0; i < words; ++i, panel += PANEL, values += 4) {
    const __m512i w0 = _mm512_load_si512(panel), w1 = _mm512_load_si512(panel + 16);
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      int32_t word;
      std::memcpy(&word, values + m * row_nbytes, 4);
      const __m512i x = _mm512_set1_epi32(word);
      add_products<NBYTES>(acc[m][0], w0, x);
      add_products<NBYTES>(acc[m][1], w1, x);
    }
  }
  const float* x_scale = a.x_scale + m0 * a.groups + part.g;
  const __m512 s0 = _mm512_load_ps(a.scales + part.g * PANEL), s1 = _mm512_load_ps(a.scales + part.g * PANEL + 16);
  __m512 l0 = _mm512_setzero_ps(), l1 = l0;
  if (LOWS && part.ends) l0 = _mm512_load_ps(a.lows + part.g * PANEL), l1 = _mm512_load_ps(a.lows + part.g * PANEL + 16);
  FB_UNROLL for (int m = 0; m < MB; ++m) {
    float* to = c + m * cs;
    const __m512 sum0 = _mm512_cvtepi32_ps(acc[m][0]), sum1 = _mm512_cvtepi32_ps(acc[m][1]);
    __m512 c0 = _mm512_loadu_ps(to), c1 = _mm512_loadu_ps(to + 16);
    if (LOWS) {
      const __m512 x = _mm512_set1_ps(x_sum[m * a.groups]);
      c0 = _mm512_fmadd_ps(l0, x, c0), c1 = _mm512_fmadd_ps(l1, x, c1);
    }
    const __m512 scale = _mm512_set1_ps(x_scale[m * a.groups]);
    _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_mul_ps(sum0, scale), s0, c0));
    _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(_mm512_mul_ps(sum1, scale), s1, c1));
  }
}

// c[m, PANEL] += MB rows of x times a panel of `count` groups.
template <int NBYTES, bool LOWS, int MB>
FB_INLINE void panel_block(const Operands& a, int64_t m0, int64_t count, int64_t group, float* c, int64_t cs) {
  const int64_t summed = std::min(group, MOST_SUMMED), words = summed / elements_of(NBYTES);
  Part part = {a.values + m0 * a.row_nbytes, a.panel, words, 0, true, true};
  for (; part.g < count; ++part.g)
    for (int64_t k = 0; k < group; k += summed, part.panel += words * PANEL, part.values += words * 4) {
      part.begins = k == 0, part.ends = k + summed >= group;
      part_block<NBYTES, LOWS, MB>(a, part, m0, c + m0 * cs, cs);
    }
}

// Groups of up to 32 packed rows that a panel takes: where the rows begin, how many there are, the first group and how
// many, and the scales and lows of all of these, [groups, PANEL].
struct Groups {
  const uint8_t* rows;
  int64_t n, first, count;
  const float *scales, *lows;
};

// meet(n0, groups) for all panels of n packed rows, `depth` elements of each, or one larger group: what a panel reads is
// called in while the one before is met.
template <int BITS, class Meet>
FB_INLINE void for_panels(const uint8_t* rows, int64_t stride, int64_t n, const GroupFormat& f, int64_t depth,
                          const Meet& meet) {
  alignas(64) float scales[SCALE_GROUPS * PANEL], lows[SCALE_GROUPS * PANEL];
  const int64_t together = std::max<int64_t>(1, depth / f.group);  // groups of a panel
  call_in(rows, 0, std::min<int64_t>(PANEL, n) * stride);
  for (int64_t n0 = 0; n0 < n; n0 += PANEL) {
    const int64_t here = std::min<int64_t>(PANEL, n - n0), coming = std::clamp<int64_t>(n - n0 - PANEL, 0, PANEL) * stride;
    int64_t called = 0;
    const uint8_t *at = rows + n0 * stride, *scales_at = at + f.codes_nbytes();
    for (int64_t g0 = 0; g0 < f.count; g0 += SCALE_GROUPS) {
      const int64_t g1 = std::min(f.count, g0 + SCALE_GROUPS);
      fill_scales(scales_at + 2 * g0, stride, here, f.scale_dtype, g1 - g0, scales);
      if (f.symmetric)
        for (int64_t i = 0; i < (g1 - g0) * PANEL; ++i) lows[i] = symmetric_low(BITS) * scales[i];
      else fill_scales(scales_at + f.scales_nbytes() + 2 * g0, stride, here, f.scale_dtype, g1 - g0, lows);
      for (int64_t g = g0; g < g1; g += together) {
        const int64_t count = std::min(together, g1 - g);
        const int64_t soon = (g + count) * coming / f.count / 64 * 64;  // of the next panel, as much of it as of this
        call_in(at + PANEL * stride, called, soon);
        called = soon;
        meet(n0, Groups{at, here, g, count, scales + (g - g0) * PANEL, lows + (g - g0) * PANEL});
      }
    }
  }
}

// c[m, n] += x[0, m) times n packed rows, transposed; rows of c hold n rounded up to whole panels.
template <int BITS, int NBYTES, bool LOWS>
static void panel_product(const Integers& x, int64_t m, const uint8_t* rows, int64_t stride, int64_t n,
                          const GroupFormat& f, float* c, int64_t cs) {
  constexpr int64_t DEPTH = PANEL_NBYTES / (4 * PANEL) * elements_of(NBYTES);  // 256 or 512 elements
  alignas(64) int32_t panel[std::max<int64_t>(DEPTH, 512) / elements_of(NBYTES) * PANEL];
  for_panels<BITS>(rows, stride, n, f, DEPTH, [&](int64_t n0, const Groups& of) {
    const int64_t k0 = of.first * f.group;
    fill<BITS, NBYTES>(of.rows, stride, of.n, k0, of.count * f.group, panel);
    const Operands a = {x.values + k0 * NBYTES, x.scale + of.first, x.sum + of.first, x.row_nbytes, x.groups, panel,
                        of.scales, of.lows};
    equal_blocks(0, m, [&](auto block, int64_t i) {
      panel_block<NBYTES, LOWS, decltype(block)::value>(a, i, of.count, f.group, c + n0, cs);
    });
  });
}

}  // namespace vnni
}  // namespace forebay
#endif
