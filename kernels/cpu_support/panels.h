// Products of many rows of x: a tile of weights is expanded once to fp32, in panels that lie as the inner loop reads
// them, and meets all rows of x from the caches. Then neither the weights' type nor their packing is felt: a panel of
// 16 KiB takes as long to expand as some 5 rows of x take to meet it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ahead.h"
#include "groups.h"

namespace forebay {

constexpr int PANEL = 2 * VL;                        // weight rows that are multiplied together
constexpr int64_t DEPTH = (1 << 14) / (4 * PANEL);   // elements of each: a panel is half of L1
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;  // rows of x in registers: 24 accumulators of 32 registers
#elif defined(__aarch64__)
constexpr int MOST_ROWS = 10;  // 20 of 32: with more gcc 12 moves pointers to memory and back
#else
constexpr int MOST_ROWS = 6;   // 12 of 16
#endif

// Element i of weight row j is at panel[i * ps + j]. acc[MB, PANEL] += x[MB, k] times a panel.
template <int MB>
FB_INLINE void panel_sums(const float* x, int64_t xs, const float* panel, int64_t ps, int64_t k, vf (&acc)[MB][2]) {
  for (int64_t i = 0; i < k; ++i) {
    const vf w0 = load(panel + i * ps), w1 = load(panel + i * ps + VL);
    FB_UNROLL for (int m = 0; m < MB; ++m) {
      vf xv = x[m * xs + i] - vf{};
      keep(xv);
      acc[m][0] += xv * w0;
      acc[m][1] += xv * w1;
    }
  }
}

// c[MB, PANEL] += x[MB, k] times a panel.
template <int MB>
FB_INLINE void panel_block(const float* x, int64_t xs, const float* panel, int64_t k, float* c, int64_t cs,
                           int64_t ps = PANEL) {
  vf acc[MB][2] = {};
  panel_sums<MB>(x, xs, panel, ps, k, acc);
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < 2; ++n) store(c + m * cs + n * VL, load(c + m * cs + n * VL) + acc[m][n]);
}

// f(rows, i) for rows [i, i + rows) of m, in blocks as equal as can be: few accumulators do not hide the latency of their
// sums. `rows` is known when this is compiled.
template <int MB = MOST_ROWS, class F> static void equal_blocks(int64_t i, int64_t m, const F& f) {
  while (i < m) {
    const int64_t left = m - i, blocks = (left + MOST_ROWS - 1) / MOST_ROWS, rows = (left + blocks - 1) / blocks;
    if (rows != MB) {
      if constexpr (MB > 1) equal_blocks<MB - 1>(i, m, f);
      return;
    }
    f(std::integral_constant<int, MB>{}, i);
    i += MB;
  }
}

// The same for any m.
static void panel_rows(const float* x, int64_t xs, const float* panel, int64_t m, int64_t k, float* c, int64_t cs) {
  equal_blocks(0, m, [&](auto rows, int64_t i) {
    panel_block<decltype(rows)::value>(x + i * xs, xs, panel, k, c + i * cs, cs);
  });
}

// Bytes from one row of x to the next where many meet panels as they lie: an odd number of cache lines, so that several
// do not share one set of L1.
constexpr int64_t apart(int64_t nbytes) { return ((nbytes + 63) / 64 | 1) * 64; }

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

#if defined(__AVX__)
// to[i * stride + j] = from[j * step + i], i and j below 8.
FB_INLINE void transpose8(const float* from, int64_t step, float* to, int64_t stride) {
  __m256 r[8], s[8];
  FB_UNROLL for (int j = 0; j < 8; ++j) r[j] = _mm256_loadu_ps(from + j * step);
  FB_UNROLL for (int j = 0; j < 8; j += 2) {
    s[j] = _mm256_unpacklo_ps(r[j], r[j + 1]);
    s[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
  }
  FB_UNROLL for (int j = 0; j < 8; j += 4) {
    r[j] = _mm256_shuffle_ps(s[j], s[j + 2], 0x44);
    r[j + 1] = _mm256_shuffle_ps(s[j], s[j + 2], 0xee);
    r[j + 2] = _mm256_shuffle_ps(s[j + 1], s[j + 3], 0x44);
    r[j + 3] = _mm256_shuffle_ps(s[j + 1], s[j + 3], 0xee);
  }
  FB_UNROLL for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(to + j * stride, _mm256_permute2f128_ps(r[j], r[j + 4], 0x20));
    _mm256_storeu_ps(to + (j + 4) * stride, _mm256_permute2f128_ps(r[j], r[j + 4], 0x31));
  }
}
#elif defined(__aarch64__)
FB_INLINE void transpose8(const float* from, int64_t step, float* to, int64_t stride) {
  FB_UNROLL for (int i = 0; i < 8; i += 4)
    FB_UNROLL for (int j = 0; j < 8; j += 4) {
      const float* row = from + j * step + i;
      const float32x4_t a = vld1q_f32(row), b = vld1q_f32(row + step), c = vld1q_f32(row + 2 * step),
                        d = vld1q_f32(row + 3 * step);
      const auto ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
      FB_UNROLL for (int k = 0; k < 2; ++k) {
        const auto upper = vreinterpretq_f64_f32(ab.val[k]), lower = vreinterpretq_f64_f32(cd.val[k]);
        vst1q_f32(to + (i + k) * stride + j, vreinterpretq_f32_f64(vtrn1q_f64(upper, lower)));
        vst1q_f32(to + (i + k + 2) * stride + j, vreinterpretq_f32_f64(vtrn2q_f64(upper, lower)));
      }
    }
}
#endif

// A panel of the weight rows [0, n), elements [0, k), of which row(j, to) writes those of row j; the rest are zeros.
template <class Row> FB_INLINE void fill_panel(int64_t n, int64_t k, float* panel, const Row& row) {
  constexpr int64_t STEP = DEPTH + 16;  // no power of two, which would share one L1 set
  alignas(64) float held[8 * STEP];
  for (int64_t j = 0; j < PANEL; j += 8) {
    const int64_t rows = std::clamp<int64_t>(n - j, 0, 8);
    for (int64_t r = 0; r < rows; ++r) row(j + r, held + r * STEP);
    if (rows < 8) std::memset(held + rows * STEP, 0, size_t((8 - rows) * STEP) * 4);
    int64_t i = 0;
#if defined(__AVX__) || defined(__aarch64__)
    for (; i + 8 <= k; i += 8) transpose8(held + i, STEP, panel + i * PANEL + j, PANEL);
#endif
    for (; i < k; ++i)
      for (int64_t r = 0; r < 8; ++r) panel[i * PANEL + j + r] = held[r * STEP + i];
  }
}

// c[m, n] += x[m, k] times weights, of which fill(n0, rows, k0, depth, panel) makes panels and ahead(row, k0, depth)
// calls in what it will read; rows of c hold n rounded up to whole panels.
template <class Fill, class Ahead>
static void multiply_panels(const float* x, int64_t xs, int64_t m, int64_t n, int64_t k, float* c, int64_t cs,
                            const Fill& fill, const Ahead& ahead) {
  alignas(64) float panel[DEPTH * PANEL];
  for (int64_t k0 = 0; k0 < k; k0 += DEPTH)
    for (int64_t n0 = 0; n0 < n; n0 += PANEL) {
      const int64_t depth = std::min(DEPTH, k - k0), n1 = std::min<int64_t>(n, n0 + PANEL);
      fill(n0, n1 - n0, k0, depth, panel);
      const bool last = n1 == n;
      const int64_t next = last ? 0 : n1, next_k = last ? k0 + DEPTH : k0;
      for (int64_t j = next; next_k < k && j < std::min<int64_t>(n, next + PANEL); ++j)
        ahead(j, next_k, std::min(DEPTH, k - next_k));
      panel_rows(x + k0, xs, panel, m, depth, c + n0, cs);
    }
}

// Weight rows of a task, whole panels up to `most`, of the sizes that keep `threads` busy longest together.
inline int64_t panel_chunk(int64_t n, int64_t most, int threads) {
  int64_t best = PANEL, least = std::numeric_limits<int64_t>::max();
  for (int64_t chunk = PANEL; chunk <= most; chunk += PANEL) {
    const int64_t tasks = (n + chunk - 1) / chunk, spent = (tasks + threads - 1) / threads * chunk;
    if (spent <= least) best = chunk, least = spent;
  }
  return best;
}

}  // namespace forebay
