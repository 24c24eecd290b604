// Products of some rows of x, more than a few and fewer than panels pay for: groups of up to 8 rows (4 where there are
// 16 registers), which lie side by side vector by vector, meet three weight rows at a time, so that each weight is
// loaded once for a group. Every sum is in one order: a row of x gives the same bits whatever rows are beside it.
#pragma once

#include <cstring>
#include <type_traits>

#include "panels.h"
#include "wide.h"

namespace forebay {

#if defined(__AVX512F__)
constexpr int GROUP = 8;     // rows of x whose sums lie together
#else
constexpr int GROUP = 4;
#endif
constexpr int TOGETHER = 3;  // weight rows: 24 accumulators of 32 registers, or 12 of 16

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define FB_ROW_GROUPS 1

// Products in fp32 with weights of any type: elements of a vector, and of rows that are summed before anything is
// added; the vector of x or w where so many elements are left; what becomes of sums.
template <class W> struct Fp32Rows {
  using Weight = W;
  using Packs = Fp32Rows<float>;  // how x lies does not depend on the weights' type
  static constexpr int64_t STEP = VL, BLOCK = 2048;

  template <class X> FB_INLINE vf of_x(const X* x) { return load(x); }
  template <class X> FB_INLINE vf of_x(const X* x, int64_t left) { return load_partial(x, int(left)); }
  FB_INLINE vf of_w(const W* w) { return load(w); }
  FB_INLINE vf of_w(const W* w, int64_t left) { return load_partial(w, int(left)); }

#if defined(__AVX512F__)
  FB_INLINE void add(vf& sum, vf x, vf w) { sum = (vf)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum); }

  template <int MB, int NB> FB_INLINE void end(const vf (&acc)[TOGETHER][GROUP], float* sums) {
    __m512 two[2 * GROUP], more[2 * GROUP];
    FB_UNROLL for (int m = 0; m < GROUP; ++m)
      two[m] = (__m512)acc[0][m], two[GROUP + m] = (__m512)acc[1][m], more[m] = (__m512)acc[2][m],
      more[GROUP + m] = _mm512_setzero_ps();
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), sums_of(two)));
    if constexpr (NB > 2)
      _mm256_storeu_ps(sums + 2 * GROUP, _mm256_add_ps(_mm256_loadu_ps(sums + 2 * GROUP),
                                                       _mm512_castps512_ps256(sums_of(more))));
  }
#else
  FB_INLINE void add(vf& sum, vf x, vf w) { sum = (vf)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum); }

  template <int MB, int NB> FB_INLINE void end(const vf (&acc)[TOGETHER][GROUP], float* sums) {
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)acc[n][0], (__m256)acc[n][1]),
                                      _mm256_hadd_ps((__m256)acc[n][2], (__m256)acc[n][3]));
      const __m128 four = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
      _mm_storeu_ps(sums + n * GROUP, _mm_add_ps(_mm_loadu_ps(sums + n * GROUP), four));
    }
  }
#endif
};

// Rows of x in groups as equal as can be: f(rows, i, group) for rows [i, i + rows), `rows` known when this is compiled.
template <int MB = GROUP, class F> static void row_groups(int64_t i, int64_t m, int64_t group, const F& f) {
  while (i < m) {
    const int64_t left = m - i, groups = (left + GROUP - 1) / GROUP, rows = (left + groups - 1) / groups;
    if (rows != MB) {
      if constexpr (MB > 1) row_groups<MB - 1>(i, m, group, f);
      return;
    }
    f(std::integral_constant<int, MB>{}, i, group);
    i += MB, ++group;
  }
}

// sums[n * GROUP + m] += x[m, k] w[n, k] of MB rows in `packed` and NB weight rows; FIRST: those after them are called
// in. A function of its own, since gcc 12 moves sums to memory and back where many of these are in one.
template <class Kind, int MB, int NB, bool FIRST>
FB_APART void group_block(const vf* packed, const typename Kind::Weight* w, int64_t ws, int64_t k, float* sums) {
  vf acc[TOGETHER][GROUP];
  FB_UNROLL for (int n = 0; n < TOGETHER; ++n)
    FB_UNROLL for (int m = 0; m < GROUP; ++m) acc[n][m] = vf{};
  int64_t i = 0;
  for (; i + Kind::STEP <= k; i += Kind::STEP, packed += MB) {
    vf wv[NB];
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      wv[n] = Kind::of_w(w + n * ws + i);
      if (FIRST) __builtin_prefetch(w + (n + TOGETHER) * ws + i, 0, 2);
    }
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      const vf xv = packed[m];
      FB_UNROLL for (int n = 0; n < NB; ++n) Kind::add(acc[n][m], xv, wv[n]);
    }
  }
  if (i < k)
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      const vf wv = Kind::of_w(w + n * ws + i, k - i);
      FB_UNROLL for (int m = 0; m < MB; ++m) Kind::add(acc[n][m], packed[m], wv);
    }
  Kind::template end<MB, NB>(acc, sums);
}

// Vectors of a row of k elements.
template <class Kind> constexpr int64_t vectors_of(int64_t k) { return (k + Kind::STEP - 1) / Kind::STEP; }

// x[m, k] as groups take it, in m * vectors_of(k) vectors.
template <class Kind, class X> FB_APART void pack_groups(const X* x, int64_t xs, int64_t m, int64_t k, vf* packed) {
  row_groups(0, m, 0, [&](auto rows, int64_t i, int64_t) {
    constexpr int MB = decltype(rows)::value;
    vf* to = packed + i * vectors_of<Kind>(k);
    int64_t at = 0;
    for (; at + Kind::STEP <= k; at += Kind::STEP, to += MB)
      FB_UNROLL for (int r = 0; r < MB; ++r) to[r] = Kind::of_x(x + (i + r) * xs + at);
    for (int r = 0; at < k && r < MB; ++r) to[r] = Kind::of_x(x + (i + r) * xs + at, k - at);
  });
}

// Floats that the sums of m rows of x with n weight rows take: as many weight rows for each group as are written out
// together.
constexpr int64_t sums_of_groups(int64_t m, int64_t n) { return (m + GROUP - 1) / GROUP * (n + GROUP) * GROUP; }

// sums[m, n] += x[m, k] w[n, k]^T of rows so packed.
template <class Kind>
static void multiply_groups(const vf* packed, const typename Kind::Weight* w, int64_t ws, int64_t m, int64_t n,
                            int64_t k, float* sums) {
  for (int64_t j = 0; j < n; j += TOGETHER)
    row_groups(0, m, 0, [&](auto rows, int64_t i, int64_t group) {
      constexpr int MB = decltype(rows)::value;
      float* to = sums + (group * (n + GROUP) + j) * GROUP;
      const vf* from = packed + i * vectors_of<Kind>(k);
      if (j + TOGETHER > n) {
        for (int64_t one = j; one < n; ++one, to += GROUP) group_block<Kind, MB, 1, false>(from, w + one * ws, ws, k, to);
      } else {
        const auto block = group ? group_block<Kind, MB, TOGETHER, false> : group_block<Kind, MB, TOGETHER, true>;
        block(from, w + j * ws, ws, k, to);
      }
    });
}

// c[m, n] from sums; c has rows for a whole group at its end, of n rounded up to whole vectors.
static void write_groups(const float* sums, int64_t m, int64_t n, float* c, int64_t cs) {
  row_groups(0, m, 0, [&](auto, int64_t i, int64_t group) {
    const float* from = sums + group * (n + GROUP) * GROUP;
    for (int64_t j = 0; j < n; j += GROUP) {
#if defined(__AVX512F__)
      transpose8(from + j * GROUP, GROUP, c + i * cs + j, cs);
#else
      __m128 r[4];
      FB_UNROLL for (int q = 0; q < 4; ++q) r[q] = _mm_loadu_ps(from + (j + q) * GROUP);
      _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
      FB_UNROLL for (int q = 0; q < 4; ++q) _mm_storeu_ps(c + (i + q) * cs + j, r[q]);
#endif
    }
  });
}
#else
#define FB_ROW_GROUPS 0
#endif

}  // namespace forebay
