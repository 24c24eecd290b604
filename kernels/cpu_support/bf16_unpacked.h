// Many rows of x in bf16 times packed rows, which are expanded once into panels of bf16 (bf16_products.h), each weight
// rounded to it: AVX512-BF16.
#pragma once

#include "bf16_products.h"
#include "vnni_panels.h"

#if FB_BF16 && FB_VNNI
#define FB_BF16_UNPACKED 1

namespace forebay {
namespace bf16_products {

// 16 rows' pairs of elements, lane by lane: first in the low half.
FB_INLINE __m512i pairs_of(__m512 first, __m512 second) {
  alignas(64) static constexpr int16_t side[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(side), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Elements [k0, k0 + depth) of up to 32 packed rows, k0 and depth whole groups, whose scales and lows are there.
template <int BITS>
FB_INLINE void fill_unpacked(const uint8_t* rows, int64_t stride, int64_t n, const GroupFormat& f, int64_t k0,
                             int64_t depth, const float* scales, const float* lows, __m512i* panel) {
  constexpr int64_t EACH = 32 / BITS;  // elements of a lane of codes
  const int64_t nbytes = depth * BITS / 8;
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t b = 0; b < nbytes; b += 64) {
      alignas(64) __m512i r[16];
      FB_UNROLL for (int i = 0; i < 16; ++i)
        r[i] = 16 * half + i < n ? load_bytes(rows + (16 * half + i) * stride + k0 * BITS / 8 + b, nbytes - b)
                                 : _mm512_setzero_si512();
      transpose16(r);
      const int64_t lanes = std::min<int64_t>(16, (nbytes - b) / 4);
      for (int64_t i = 0; i < lanes; ++i) {
        const int64_t element = (b / 4 + i) * EACH, at = element / f.group * PANEL + 16 * half;
        const __m512 s = _mm512_load_ps(scales + at), l = _mm512_load_ps(lows + at);
        __m512 w[EACH];
        FB_UNROLL for (int j = 0; j < EACH; ++j) {
          const __m512i code = _mm512_and_si512(_mm512_srli_epi32(r[i], unsigned(BITS * j)),
                                                _mm512_set1_epi32((1 << BITS) - 1));
          w[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), s, l);
        }
        FB_UNROLL for (int j = 0; j < EACH; j += 2)
          _mm512_store_si512(panel + element + j + half, pairs_of(w[j], w[j + 1]));
      }
    }
}

// c[m, n] += x[0, m) times n packed rows, transposed; rows of x as row_nbytes of whole groups says, zeros behind k, rows of
// c hold n rounded up to whole panels.
template <int BITS>
static void unpacked_product(const char* x, int64_t m, const uint8_t* rows, int64_t stride, int64_t n,
                             const GroupFormat& f, float* c, int64_t cs) {
  alignas(64) __m512i panel[512];  // a word of 16 rows for each element of the largest group
  const int64_t x_nbytes = row_nbytes(f.count * f.group);
  vnni::for_panels<BITS>(rows, stride, n, f, 2 * WORDS, [&](int64_t n0, const vnni::Groups& of) {
    const int64_t k0 = of.first * f.group, depth = of.count * f.group;
    fill_unpacked<BITS>(of.rows, stride, of.n, f, k0, depth, of.scales, of.lows, panel);
    equal_blocks(0, m, [&](auto block, int64_t i) {
      panel_block<decltype(block)::value>(x + i * x_nbytes + 2 * k0, x_nbytes, panel, depth / 2, true, c + i * cs + n0,
                                          cs);
    });
  });
}

}  // namespace bf16_products
}  // namespace forebay
#endif
