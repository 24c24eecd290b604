// RMS norm, a row at a time, with every rounding that the eager operators make.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")  // a fused multiply-add would skip the rounding of a product; gcc ignores STDC
#endif
#include <cmath>

#include "team.h"
#include "vector_math.h"

using namespace forebay;

extern "C" struct RmsNormArgs {
  const void* x;       // [rows, columns]
  const void* weight;  // [columns]
  void* out;           // [rows, columns], may be x
  int64_t rows, columns, x_row, out_row;
  float eps;
  int32_t dtype;
};

namespace {

template <class T> void rms_norm_row(const T* x, const T* weight, T* out, int64_t n, float eps) {
  const vf scale = vf{} + 1.0f / std::sqrt(row_sum(x, n, [](vf v) { return v * v; }) / float(n) + eps);
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store_whole(out + i, load(weight + i) * rounded(x, load(x + i) * scale));
  if (i < n) {
    const int left = int(n - i);
    store_partial(out + i, load_partial(weight + i, left) * rounded(x, load_partial(x + i, left) * scale), left);
  }
}

template <class T> void rms_norm(const RmsNormArgs& a, int threads) {
  parallel_parts(a.rows, threads, a.rows * a.columns / 4, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      rms_norm_row(static_cast<const T*>(a.x) + r * a.x_row, static_cast<const T*>(a.weight),
                   static_cast<T*>(a.out) + r * a.out_row, a.columns, a.eps);
  });
}

}  // namespace

// Needs contiguous columns in every tensor.
extern "C" int forebay_rms_norm(const RmsNormArgs* a, float*, int64_t, int threads) {
  if (a->dtype == F32) rms_norm<float>(*a, threads);
  else if (a->dtype == BF16) rms_norm<bf16>(*a, threads);
  else rms_norm<f16>(*a, threads);
  return 0;
}
