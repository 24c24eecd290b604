// Products of some rows of x, more than a few and fewer than panels pay for: groups of up to 8 rows, which lie side by
// side vector by vector, meet three weight rows at a time, so that each weight is loaded once for 8 rows of x. Every sum
// is in one order: a row of x gives the same bits whatever rows are beside it.
#pragma once

#include <cstring>
#include <type_traits>

#include "panels.h"
#include "wide.h"

namespace forebay {

constexpr int GROUP = 8;     // rows of x whose sums lie together
constexpr int TOGETHER = 3;  // weight rows: 24 accumulators of 32 registers

#if defined(__AVX512F__)
#define FB_ROW_GROUPS 1

// Products in fp32 with weights of any type: elements of a vector, and of rows that are summed before anything is added;
// the vector of x or w where so many elements are left; what becomes of sums.
template <class W> struct Fp32Rows {
  using Weight = W;
  static constexpr int64_t STEP = VL, BLOCK = 2048;

  template <class X> FB_INLINE __m512i of_x(const X* x) { return (__m512i)load(x); }
  template <class X> FB_INLINE __m512i of_x(const X* x, int64_t left) { return (__m512i)load_partial(x, int(left)); }
  FB_INLINE __m512i of_w(const W* w) { return (__m512i)load(w); }
  FB_INLINE __m512i of_w(const W* w, int64_t left) { return (__m512i)load_partial(w, int(left)); }
  FB_INLINE void add(__m512& sum, __m512i x, __m512i w) { sum = _mm512_fmadd_ps((__m512)x, (__m512)w, sum); }

  template <int MB, int NB> FB_INLINE void end(const __m512 (&acc)[TOGETHER][GROUP], float* sums) {
    __m512 two[2 * GROUP], more[2 * GROUP];
    FB_UNROLL for (int m = 0; m < GROUP; ++m)
      two[m] = acc[0][m], two[GROUP + m] = acc[1][m], more[m] = acc[2][m], more[GROUP + m] = _mm512_setzero_ps();
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), sums_of(two)));
    if constexpr (NB > 2)
      _mm256_storeu_ps(sums + 2 * GROUP, _mm256_add_ps(_mm256_loadu_ps(sums + 2 * GROUP),
                                                       _mm512_castps512_ps256(sums_of(more))));
  }
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
static __attribute__((noinline)) void group_block(const __m512i* packed, const typename Kind::Weight* w, int64_t ws,
                                                  int64_t k, float* sums) {
  __m512 acc[TOGETHER][GROUP];
  FB_UNROLL for (int n = 0; n < TOGETHER; ++n)
    FB_UNROLL for (int m = 0; m < GROUP; ++m) acc[n][m] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + Kind::STEP <= k; i += Kind::STEP, packed += MB) {
    __m512i wv[NB];
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      wv[n] = Kind::of_w(w + n * ws + i);
      if (FIRST) __builtin_prefetch(w + (n + TOGETHER) * ws + i, 0, 2);
    }
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      const __m512i xv = _mm512_load_si512(packed + m);
      FB_UNROLL for (int n = 0; n < NB; ++n) Kind::add(acc[n][m], xv, wv[n]);
    }
  }
  if (i < k)
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      const __m512i wv = Kind::of_w(w + n * ws + i, k - i);
      FB_UNROLL for (int m = 0; m < MB; ++m) Kind::add(acc[n][m], _mm512_load_si512(packed + m), wv);
    }
  Kind::template end<MB, NB>(acc, sums);
}

// Vectors of a row of k elements.
template <class Kind> constexpr int64_t vectors_of(int64_t k) { return (k + Kind::STEP - 1) / Kind::STEP; }

// x[m, k] as groups take it, in m * vectors_of(k) vectors.
template <class Kind, class X> static void pack_groups(const X* x, int64_t xs, int64_t m, int64_t k, __m512i* packed) {
  row_groups(0, m, 0, [&](auto rows, int64_t i, int64_t) {
    constexpr int MB = decltype(rows)::value;
    __m512i* to = packed + i * vectors_of<Kind>(k);
    int64_t at = 0;
    for (; at + Kind::STEP <= k; at += Kind::STEP, to += MB)
      FB_UNROLL for (int r = 0; r < MB; ++r) _mm512_store_si512(to + r, Kind::of_x(x + (i + r) * xs + at));
    for (int r = 0; at < k && r < MB; ++r) _mm512_store_si512(to + r, Kind::of_x(x + (i + r) * xs + at, k - at));
  });
}

// Floats that the sums of m rows of x with n weight rows take: as many weight rows for each group as are written out
// together.
constexpr int64_t sums_of_groups(int64_t m, int64_t n) { return (m + GROUP - 1) / GROUP * (n + GROUP) * GROUP; }

// sums[m, n] += x[m, k] w[n, k]^T of rows so packed.
template <class Kind>
static void multiply_groups(const __m512i* packed, const typename Kind::Weight* w, int64_t ws, int64_t m, int64_t n,
                            int64_t k, float* sums) {
  for (int64_t j = 0; j < n; j += TOGETHER)
    row_groups(0, m, 0, [&](auto rows, int64_t i, int64_t group) {
      constexpr int MB = decltype(rows)::value;
      float* to = sums + (group * (n + GROUP) + j) * GROUP;
      const __m512i* from = packed + i * vectors_of<Kind>(k);
      const auto block = j + 1 == n ? group_block<Kind, MB, 1, false> : j + 2 == n ? group_block<Kind, MB, 2, false>
                         : group ? group_block<Kind, MB, 3, false> : group_block<Kind, MB, 3, true>;
      block(from, w + j * ws, ws, k, to);
    });
}

// c[m, n] from sums; c has rows for a whole group at its end, of n rounded up to whole vectors.
static void write_groups(const float* sums, int64_t m, int64_t n, float* c, int64_t cs) {
  row_groups(0, m, 0, [&](auto, int64_t i, int64_t group) {
    const float* from = sums + group * (n + GROUP) * GROUP;
    for (int64_t j = 0; j < n; j += GROUP) transpose8(from + j * GROUP, GROUP, c + i * cs + j, cs);
  });
}
#else
#define FB_ROW_GROUPS 0  // 16 registers hold no groups
#endif

}  // namespace forebay
