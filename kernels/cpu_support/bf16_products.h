// Products of bf16 with bf16 by the instructions of AVX512-BF16, which add two products at a time to a sum in fp32: few
// rows of x meet weight rows as they lie, many meet panels of 32 of them, in pairs of elements.
#pragma once

#include "ahead.h"
#include "panels.h"
#include "row_groups.h"
#include "wide.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define FB_BF16 1

namespace forebay {
namespace bf16_products {

constexpr int64_t FEW_ROWS = 4;         // rows of x up to which they are in no groups, and no panels are made
constexpr int64_t WORDS = 128;          // pairs of elements in a panel of 16 KiB, half of L1

// In assembly, since gcc 12 moves sums to memory and back around the intrinsic.
FB_INLINE void add_products(__m512& sum, __m512i w, __m512i x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
}

// Rows in groups, as Fp32Rows.
struct GroupRows {
  using Weight = bf16;
  using Packs = GroupRows;
  static constexpr int64_t STEP = 32, BLOCK = std::numeric_limits<int64_t>::max();

  FB_INLINE vf of_x(const bf16* x) { return (vf)_mm512_loadu_si512(x); }
  FB_INLINE vf of_x(const bf16* x, int64_t left) { return (vf)load_bytes(x, 2 * left); }
  FB_INLINE vf of_w(const bf16* w) { return (vf)_mm512_loadu_si512(w); }
  FB_INLINE vf of_w(const bf16* w, int64_t left) { return (vf)load_bytes(w, 2 * left); }
  FB_INLINE void add(vf& sum, vf x, vf w) {
    add_products(reinterpret_cast<__m512&>(sum), (__m512i)w, (__m512i)x);
  }

  template <int MB, int NB> FB_INLINE void end(const vf (&acc)[TOGETHER][GROUP], float* sums) {
    FB_UNROLL for (int n = 0; n < NB; ++n)
      FB_UNROLL for (int m = 0; m < MB; m += 4) {
        float* to = sums + n * GROUP + m;
        const __m128 four = sum16((__m512)acc[n][m], (__m512)acc[n][m + 1], (__m512)acc[n][m + 2],
                                  (__m512)acc[n][m + 3]);
        _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), four));
      }
  }
};

// c[m, n] += MB rows of x times NB weight rows of k elements; STREAM: that are read once, in order (ahead.h).
template <int MB, int NB, bool STREAM>
static void dot_block(const bf16* x, int64_t xs, const bf16* w, int64_t ws, int64_t k, float* c, int64_t cs) {
  __m512 acc[MB][NB];
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < NB; ++n) acc[m][n] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) {
    __m512i wv[NB];
    FB_UNROLL for (int n = 0; n < NB; ++n) wv[n] = _mm512_loadu_si512(w + n * ws + i);
    if (STREAM) call_ahead(w + NB * i, 64 * NB);
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      const __m512i xv = _mm512_loadu_si512(x + m * xs + i);
      FB_UNROLL for (int n = 0; n < NB; ++n) add_products(acc[m][n], wv[n], xv);
    }
  }
  if (i < k)
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      const __m512i wv = load_bytes(w + n * ws + i, 2 * (k - i));
      FB_UNROLL for (int m = 0; m < MB; ++m) add_products(acc[m][n], wv, load_bytes(x + m * xs + i, 2 * (k - i)));
    }
  FB_UNROLL for (int m = 0; m < MB; ++m) {
    if (NB == 4) {
      const __m128 sums = sum16(acc[m][0], acc[m][1 % NB], acc[m][2 % NB], acc[m][3 % NB]);
      _mm_storeu_ps(c + m * cs, _mm_add_ps(_mm_loadu_ps(c + m * cs), sums));
    } else {
      FB_UNROLL for (int n = 0; n < NB; ++n) c[m * cs + n] += sum16(acc[m][n]);
    }
  }
}

template <int MB, bool STREAM>
static void dot_rows(const bf16* x, int64_t xs, const bf16* w, int64_t ws, int64_t n, int64_t k, float* c, int64_t cs) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) dot_block<MB, 4, STREAM>(x, xs, w + j * ws, ws, k, c + j, cs);
  for (; j < n; ++j) dot_block<MB, 1, STREAM>(x, xs, w + j * ws, ws, k, c + j, cs);
}

// c[m, n] += x[m, k] w[n, k]^T for m up to FEW_ROWS.
template <int MB = FEW_ROWS>
static void dot_product(const bf16* x, int64_t xs, const bf16* w, int64_t ws, int64_t m, int64_t n, int64_t k, float* c,
                        int64_t cs) {
  if (m != MB) {
    if constexpr (MB > 1) dot_product<MB - 1>(x, xs, w, ws, m, n, k, c, cs);
    return;
  }
  begin_reading(w, n * ws * 2);
  dot_rows<MB, true>(x, xs, w, ws, n, k, c, cs);
}

// The same for rows of few elements, such as keys, as dot_block16 takes them.
template <int MB>
static void dot_rows16(const bf16* x, int64_t xs, const bf16* w, int64_t ws, int64_t n, int64_t k, float* c,
                       int64_t cs) {
  constexpr int NB = 16 / (MB == 3 ? 4 : MB);
  int64_t j = 0;
  for (; j + NB <= n; j += NB) {
    __m512 acc[16];
    FB_UNROLL for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 32) {
      __m512i xv[MB];
      FB_UNROLL for (int m = 0; m < MB; ++m) xv[m] = load_bytes(x + m * xs + i, 2 * (k - i));
      FB_UNROLL for (int b = 0; b < NB; ++b) {
        const __m512i wv = load_bytes(w + (j + b) * ws + i, 2 * (k - i));
        FB_UNROLL for (int m = 0; m < MB; ++m) add_products(acc[m * NB + b], wv, xv[m]);
      }
    }
    add_sums<MB, NB>(acc, c + j, cs);
  }
  dot_rows<MB, false>(x, xs, w + j * ws, ws, n - j, k, c + j, cs);
}

// c[m, n] += x[m, k] w[n, k]^T for m up to 4.
static void multiply_dot(const bf16* x, int64_t xs, const bf16* w, int64_t ws, int64_t m, int64_t n, int64_t k,
                         float* c, int64_t cs) {
  switch (m) {
    case 4: return dot_rows16<4>(x, xs, w, ws, n, k, c, cs);
    case 3: return dot_rows16<3>(x, xs, w, ws, n, k, c, cs);
    case 2: return dot_rows16<2>(x, xs, w, ws, n, k, c, cs);
    default: return dot_rows16<1>(x, xs, w, ws, n, k, c, cs);
  }
}

// Of rows of k elements that meet panels, with zeros up to whole pairs.
constexpr int64_t row_nbytes(int64_t k) { return apart(2 * k); }

// Elements [k0, k0 + depth) of up to 32 weight rows; k0 is even.
FB_INLINE void fill(const bf16* w, int64_t ws, int64_t n, int64_t k0, int64_t depth, __m512i* panel) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t i = 0; i < depth; i += 32) {
      __m512i r[16];
      FB_UNROLL for (int j = 0; j < 16; ++j)
        r[j] = 16 * half + j < n ? load_bytes(w + (16 * half + j) * ws + k0 + i, 2 * (depth - i))
                                 : _mm512_setzero_si512();
      transpose16(r);
      FB_UNROLL for (int j = 0; j < 16; ++j) _mm512_store_si512(panel + (i / 2 + j) * 2 + half, r[j]);
    }
}

// The same of weights [k, n] whose first column is at w.
FB_INLINE void fill_columns(const bf16* w, int64_t ws, int64_t n, int64_t k0, int64_t depth, __m512i* panel) {
  alignas(64) static constexpr int16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                  8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(low), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < depth; i += 2, panel += 2) {
    const __m512i a = load_bytes(w + (k0 + i) * ws, 2 * n),
                  b = i + 1 < depth ? load_bytes(w + (k0 + i + 1) * ws, 2 * n) : _mm512_setzero_si512();
    _mm512_store_si512(panel, _mm512_permutex2var_epi16(a, first, b));
    _mm512_store_si512(panel + 1, _mm512_permutex2var_epi16(a, second, b));
  }
}

// c[m, 32] += (or without `add` =) MB rows of x times so many pairs of a panel.
template <int MB>
static __attribute__((noinline)) void panel_block(const char* x, int64_t row_nbytes, const __m512i* panel,
                                                  int64_t words, bool add, float* c, int64_t cs) {
  __m512 acc[MB][2];
  FB_UNROLL for (int m = 0; m < MB; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  const auto word = [&]() __attribute__((always_inline)) {
    const __m512i w0 = _mm512_load_si512(panel), w1 = _mm512_load_si512(panel + 1);
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      int32_t word;
      std::memcpy(&word, x + m * row_nbytes, 4);
      const __m512i xv = _mm512_set1_epi32(word);
      add_products(acc[m][0], w0, xv);
      add_products(acc[m][1], w1, xv);
    }
    panel += 2, x += 4;
  };
  int64_t i = 0;
  for (; i + 16 <= words; i += 16) {
    FB_UNROLL for (int m = 0; m < MB; ++m) __builtin_prefetch(x + (MB + m) * row_nbytes, 0, 3);
    for (int j = 0; j < 16; ++j) word();
  }
  for (; i < words; ++i) word();
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int j = 0; j < 2; ++j) {
      float* to = c + m * cs + 16 * j;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), acc[m][j]) : acc[m][j]);
    }
}

// x[0, n) rounded to bf16, then zeros up to row_nbytes(n).
FB_INLINE void round_row(const float* x, int64_t n, char* to) {
  const char* end = to + row_nbytes(n);
  for (int64_t i = 0; i < n; i += 32, to += 64) {
    const __m512 low = (__m512)load_bytes(x + i, 4 * (n - i)), high = (__m512)load_bytes(x + i + 16, 4 * (n - i - 16));
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  std::memset(to, 0, size_t(end - to));
}

FB_INLINE void copy_row(const bf16* x, int64_t n, char* to) {
  std::memcpy(to, x, size_t(n) * 2);
  std::memset(to + n * 2, 0, size_t(row_nbytes(n) - n * 2));
}

// How weights lie: [n, k]; the same, read once and in order, so that what a panel reads is called into L2 while the one
// before is met; [k, n].
enum class Weights { ROWS, STREAM, COLUMNS };

// c[m, n] += (or =) x[m, k] times weights, x as row_nbytes(k) says; rows of c hold n rounded up to whole panels.
template <Weights KIND>
static void panel_product(const char* x, int64_t m, const bf16* w, int64_t ws, int64_t n, int64_t k, float* c,
                          int64_t cs, bool add = true) {
  alignas(64) __m512i panel[2 * WORDS];
  const int64_t stride = 2 * ws;
  if (KIND == Weights::STREAM) call_in(w, 0, std::min<int64_t>(PANEL, n) * stride);
  for (int64_t n0 = 0; n0 < n; n0 += PANEL) {
    const int64_t here = std::min<int64_t>(PANEL, n - n0), coming = std::clamp<int64_t>(n - n0 - PANEL, 0, PANEL) * stride;
    int64_t called = 0;
    for (int64_t k0 = 0; k0 < k; k0 += 2 * WORDS) {
      const int64_t depth = std::min(2 * WORDS, k - k0);
      if (KIND == Weights::COLUMNS) fill_columns(w + n0, ws, here, k0, depth, panel);
      else fill(w + n0 * ws, ws, here, k0, depth, panel);
      if (KIND == Weights::STREAM) {
        const int64_t soon = (k0 + depth) * coming / k / 64 * 64;
        call_in(w + (n0 + PANEL) * ws, called, soon);
        called = soon;
      }
      equal_blocks(0, m, [&](auto rows, int64_t i) {
        panel_block<decltype(rows)::value>(x + i * row_nbytes(k) + 2 * k0, row_nbytes(k), panel, (depth + 1) / 2,
                                           add || k0 > 0, c + i * cs + n0, cs);
      });
    }
  }
}

}  // namespace bf16_products
}  // namespace forebay
#endif
