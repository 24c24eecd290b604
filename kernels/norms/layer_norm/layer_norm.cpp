// Layer norm, a row at a time: mean, then the variance of what is left, in fp32; rounded once.
#include <cmath>

#include "team.h"
#include "vector_math.h"

using namespace forebay;

extern "C" struct LayerNormArgs {
  const void* x;       // [rows, columns]
  const void* weight;  // [columns], or null: 1
  const void* bias;    // [columns], or null: 0
  void* out;           // [rows, columns], may be x
  int64_t rows, columns, x_row, out_row;
  float eps;
  int32_t dtype;
};

namespace {

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t n, float eps) {
  const vf mean = vf{} + row_sum(x, n, [](vf v) { return v; }) / float(n);
  const float variance = row_sum(x, n, [&](vf v) { return (v - mean) * (v - mean); }) / float(n);
  const vf scale = vf{} + 1.0f / std::sqrt(variance + eps);
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    vf y = (load(x + i) - mean) * scale;
    if (weight) y *= load(weight + i);
    if (bias) y += load(bias + i);
    store_whole(out + i, y);
  }
  if (i < n) {
    const int left = int(n - i);
    vf y = (load_partial(x + i, left) - mean) * scale;
    if (weight) y *= load_partial(weight + i, left);
    if (bias) y += load_partial(bias + i, left);
    store_partial(out + i, y, left);
  }
}

template <class T> void layer_norm(const LayerNormArgs& a, int threads) {
  parallel_parts(a.rows, threads, a.rows * a.columns / 4, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      layer_norm_row(static_cast<const T*>(a.x) + r * a.x_row, static_cast<const T*>(a.weight),
                     static_cast<const T*>(a.bias), static_cast<T*>(a.out) + r * a.out_row, a.columns, a.eps);
  });
}

}  // namespace

// Needs contiguous columns in every tensor.
extern "C" int forebay_layer_norm(const LayerNormArgs* a, float*, int64_t, int threads) {
  if (a->dtype == F32) layer_norm<float>(*a, threads);
  else if (a->dtype == BF16) layer_norm<bf16>(*a, threads);
  else layer_norm<f16>(*a, threads);
  return 0;
}
