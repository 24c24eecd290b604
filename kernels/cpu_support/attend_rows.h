// Query rows that meet keys and values by the online softmax: in fp32, or in bf16 where the processor multiplies it.
#pragma once

#include "bf16_products.h"
#include "panels.h"
#include "softmax_rounded.h"
#include "softmax_rows.h"

namespace forebay {

constexpr int64_t ROWS = 88;            // query rows (positions x group) that meet keys together, at most
constexpr int64_t ROW_FLOATS = 11264;   // and so many numbers in them: 88 rows of 128, 19 of 576
constexpr int64_t KEYS = SEGMENT_STEP;  // cache positions per step

constexpr int64_t row_stride(int64_t dim) { return round_up(dim, PANEL); }

// Strides of keys and values in elements, how many of a value are gathered, and what becomes of scores.
struct RowsMet {
  int64_t k_row, v_row, dim;
  float scale, softcap;
};

// Query rows as they meet keys: in fp32, or in bf16 where the processor multiplies it (bf16_products.h), with what is
// added up apart of their sums.
template <class T> struct Queries {
  alignas(64) float rows[ROW_FLOATS];
  int64_t d;
  template <class S> void take(int64_t i, const S* q) { upcast(q, rows + i * d, d); }
  static constexpr int64_t STEP = KEYS;  // cache positions that many rows meet together
  const float* at(int64_t i) const { return rows + i * d; }
  void end(Row*, int64_t) const {}
};

// scores[m, n] += q keys^T.
template <class T>
void score_few(const Queries<T>& q, int64_t i, const T* k, int64_t k_row, int64_t m, int64_t n, float* scores) {
  multiply_dot(q.at(i), q.d, k, k_row, m, n, q.d, scores, KEYS);
}

// c[m, n] += x[m, d] weights^T, of which row j is at w + j * w_row, in panels of them.
template <class T>
void meet_rows(const float* x, const T* w, int64_t w_row, int64_t m, int64_t n, int64_t d, float* c, int64_t cs) {
  const auto fill = [&](int64_t n0, int64_t rows, int64_t d0, int64_t depth, float* panel) {
    fill_panel(rows, depth, panel, [&](int64_t j, float* to) { upcast(w + (n0 + j) * w_row + d0, to, depth); });
  };
  multiply_panels(x, d, m, n, d, c, cs, fill, [](int64_t, int64_t, int64_t) {});
}

// o[m, d] += scores[m, n] values, in panels of their columns.
template <class T>
void gather_rows(const float* scores, const T* v, int64_t v_row, int64_t m, int64_t n, int64_t d, float* o,
                 int64_t os) {
  const auto fill = [&](int64_t d0, int64_t columns, int64_t n0, int64_t depth, float* panel) {
    for (int64_t i = 0; i < depth; ++i, panel += PANEL) {
      upcast(v + (n0 + i) * v_row + d0, panel, columns);
      for (int64_t j = columns; j < PANEL; ++j) panel[j] = 0.0f;
    }
  };
  multiply_panels(scores, KEYS, m, d, n, o, os, fill, [](int64_t, int64_t, int64_t) {});
}

// What is gathered so far of a row, brought to its new maximum.
FB_INLINE void rescale(float* o, int64_t d, float factor) {
  if (factor == 1.0f) return;
  for (int64_t j = 0; j < d; j += VL) store(o + j, load(o + j) * factor);
}

// Query rows [i, i + m) attend to n keys and values at positions from t0 on, in panels.
template <class T>
void attend_rows(const RowsMet& how, Queries<T>& q, int64_t i, const T* keys, const T* values, int64_t m, int64_t n,
                 int64_t t0, Row* rows, float* scores, float* o) {
  const int64_t os = row_stride(how.dim);
  std::memset(scores, 0, size_t(m * KEYS) * 4);
  meet_rows(q.at(i), keys, how.k_row, m, n, q.d, scores, KEYS);
  for (int64_t r = 0; r < m; ++r)
    rescale(o + r * os, how.dim, soften(scores + r * KEYS, n, rows[r], t0, how.scale, how.softcap));
  gather_rows(scores, values, how.v_row, m, n, how.dim, o, os);
}

#if FB_BF16
template <> struct Queries<bf16> {
  alignas(64) char rows[2 * ROW_FLOATS + 128 * ROWS];
  __m512 sums[ROWS] = {};
  static constexpr int64_t STEP = ROUNDED_STEP;
  int64_t d;
  void take(int64_t i, const bf16* q) { bf16_products::copy_row(q, d, rows + i * bf16_products::row_nbytes(d)); }
  const char* at(int64_t i) const { return rows + i * bf16_products::row_nbytes(d); }
  void end(Row* row, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) row[i].sum += _mm512_reduce_add_ps(sums[i]);
  }
};

inline void score_few(const Queries<bf16>& q, int64_t i, const bf16* k, int64_t k_row, int64_t m, int64_t n,
                      float* scores) {
  const int64_t stride = bf16_products::row_nbytes(q.d) / 2;
  for (int64_t r = 0; r < m; r += 4)
    bf16_products::multiply_dot(reinterpret_cast<const bf16*>(q.at(i + r)), stride, k, k_row, std::min<int64_t>(4, m - r),
                                n, q.d, scores + r * KEYS, KEYS);
}

inline void attend_rows(const RowsMet& how, Queries<bf16>& q, int64_t i, const bf16* keys, const bf16* values,
                        int64_t m, int64_t n, int64_t t0, Row* rows, float* scores, float* o) {
  using namespace bf16_products;
  alignas(64) char p[ROWS * row_nbytes(ROUNDED_STEP)];
  const int64_t os = row_stride(how.dim), nbytes = row_nbytes(n);
  panel_product<Weights::ROWS>(q.at(i), m, keys, how.k_row, n, q.d, scores, ROUNDED_STEP, false);
  for (int64_t r = 0; r < m; ++r) {
    char* to = p + r * nbytes;
    rescale(o + r * os, how.dim,
            soften_rounded(scores + r * ROUNDED_STEP, n, rows[r], q.sums[i + r], t0, how.scale, how.softcap, to));
  }
  panel_product<Weights::COLUMNS>(p, m, values, how.v_row, how.dim, n, o, os);
}
#endif

}  // namespace forebay
