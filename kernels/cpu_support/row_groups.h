// Products of some rows of x, more than a few and fewer than panels pay for: groups of up to 8 rows, which lie side by
// side vector by vector, meet three weight rows at a time, so that each weight is loaded once for 8 rows of x. Every sum
// is in the order of `dot_block`: a row of x gives the same bits whatever rows are beside it.
#pragma once

#include <cstring>
#include <type_traits>

#include "micro.h"

namespace forebay {

constexpr int GROUP = 8;     // rows of x whose sums lie together
constexpr int TOGETHER = 3;  // weight rows: 24 accumulators of 32 registers

#if defined(__AVX512F__)
#define FB_ROW_GROUPS 1

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

// sums[n * GROUP + m] += x[m, k] w[n, k] of MB rows, which lie in `packed` too, and NB weight rows; `first`: those after
// them are called in.
template <class W, int MB, int NB>
FB_INLINE void group_block(const float* packed, const float* x, int64_t xs, const W* w, int64_t ws, int64_t k,
                           float* sums, bool first) {
  __m512 acc[2 * GROUP] = {}, more[2 * GROUP] = {};
  int64_t i = 0;
  for (; i + VL <= k; i += VL) {
    __m512 wv[NB];
    FB_UNROLL for (int n = 0; n < NB; ++n) {
      wv[n] = (__m512)load(w + n * ws + i);
      if (first) __builtin_prefetch(w + (n + TOGETHER) * ws + i, 0, 2);
    }
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      const __m512 xv = _mm512_loadu_ps(packed + i * MB + m * VL);
      acc[m] = _mm512_fmadd_ps(xv, wv[0], acc[m]);
      if constexpr (NB > 1) acc[GROUP + m] = _mm512_fmadd_ps(xv, wv[1], acc[GROUP + m]);
      if constexpr (NB > 2) more[m] = _mm512_fmadd_ps(xv, wv[2], more[m]);
    }
  }
  const __m512 two = sums_of(acc);
  if constexpr (NB == 1) {
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), _mm512_castps512_ps256(two)));
  } else {
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), two));
    if constexpr (NB > 2)
      _mm256_storeu_ps(sums + 2 * GROUP, _mm256_add_ps(_mm256_loadu_ps(sums + 2 * GROUP),
                                                       _mm512_castps512_ps256(sums_of(more))));
  }
  for (; i < k; ++i)
    FB_UNROLL for (int n = 0; n < NB; ++n)
      FB_UNROLL for (int m = 0; m < MB; ++m) sums[n * GROUP + m] += x[m * xs + i] * load_one(w + n * ws + i);
}

// c[m, n] += x[m, k] w[n, k]^T. `packed` holds x's elements, `sums` n rows of m rounded up to whole groups.
template <class W>
static void multiply_groups(const float* x, int64_t xs, const W* w, int64_t ws, int64_t m, int64_t n, int64_t k,
                            float* c, int64_t cs, float* packed, float* sums) {
  const int64_t groups = (m + GROUP - 1) / GROUP;
  row_groups(0, m, 0, [&](auto rows, int64_t i, int64_t) {
    constexpr int MB = decltype(rows)::value;
    float* to = packed + i * k;
    for (int64_t at = 0; at + VL <= k; at += VL)
      FB_UNROLL for (int r = 0; r < MB; ++r) store(to + at * MB + r * VL, load(x + (i + r) * xs + at));
  });
  std::memset(sums, 0, size_t(n * groups * GROUP) * 4);
  for (int64_t j = 0; j < n; j += TOGETHER)
    row_groups(0, m, 0, [&](auto rows, int64_t i, int64_t group) {
      constexpr int MB = decltype(rows)::value;
      float* to = sums + (group * n + j) * GROUP;
      const float *from = packed + i * k, *plain = x + i * xs;
      if (j + TOGETHER <= n) group_block<W, MB, 3>(from, plain, xs, w + j * ws, ws, k, to, !group);
      else if (j + 2 == n) group_block<W, MB, 2>(from, plain, xs, w + j * ws, ws, k, to, false);
      else group_block<W, MB, 1>(from, plain, xs, w + j * ws, ws, k, to, false);
    });
  row_groups(0, m, 0, [&](auto rows, int64_t i, int64_t group) {
    for (int64_t r = 0; r < decltype(rows)::value; ++r)
      for (int64_t j = 0; j < n; ++j) c[(i + r) * cs + j] += sums[(group * n + j) * GROUP + r];
  });
}
#else
#define FB_ROW_GROUPS 0  // 16 registers hold no groups

template <class W>
static void multiply_groups(const float*, int64_t, const W*, int64_t, int64_t, int64_t, int64_t, float*, int64_t,
                            float*, float*) {}
#endif

}  // namespace forebay
