// What follows a matrix product: act(y) * multiplier + residual, each step rounded to out's type.
#pragma once

#include "vector_math.h"

namespace forebay {

// Each step is rounded to out's type, as the operators apart would leave it.
template <class O, class Args> FB_INLINE vf finish(const Args& a, vf y, vf multiplier, vf residual) {
  const O* type = nullptr;
  if (a.activation) y = activate(a.activation, rounded(type, y));
  if (a.multiplier) y = rounded(type, y) * multiplier;
  if (a.residual) y = rounded(type, y) + residual;
  return y;
}

// Writes out[m0, m1) x [n0, n1) from the product c, whose row stride is cs and whose first element is (m0, n0).
template <class O, class Args>
static void write_product(const Args& a, const float* c, int64_t cs, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  for (int64_t m = m0; m < m1; ++m) {
    O* out = static_cast<O*>(a.out) + m * a.out_stride;
    const O* multiplier = static_cast<const O*>(a.multiplier) + m * a.multiplier_stride;
    const O* residual = static_cast<const O*>(a.residual) + m * a.residual_stride;
    const float* row = c + (m - m0) * cs - n0;
    int64_t n = n0;
    for (; n + VL <= n1; n += VL)
      store_whole(out + n, finish<O>(a, load(row + n), a.multiplier ? load(multiplier + n) : vf{},
                                     a.residual ? load(residual + n) : vf{}));
    if (n < n1) {
      const int left = int(n1 - n);
      const vf y = finish<O>(a, load_partial(row + n, left), a.multiplier ? load_partial(multiplier + n, left) : vf{},
                             a.residual ? load_partial(residual + n, left) : vf{});
      store_partial(out + n, y, left);
    }
  }
}

template <class Args>
static void write_product(const Args& a, const float* c, int64_t cs, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  if (a.out_dtype == F32) write_product<float>(a, c, cs, m0, m1, n0, n1);
  else if (a.out_dtype == BF16) write_product<bf16>(a, c, cs, m0, m1, n0, n1);
  else write_product<f16>(a, c, cs, m0, m1, n0, n1);
}

}  // namespace forebay
