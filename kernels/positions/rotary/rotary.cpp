// Rotary embedding, a row at a time, with every rounding that the eager operators make.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")  // a fused multiply-add would skip the rounding of a product; gcc ignores STDC
#endif

#include "team.h"
#include "vector_math.h"

using namespace forebay;

extern "C" struct RotaryArgs {
  const void* x;    // [B, H, S, D]
  const void* cos;  // [B, S, D]
  const void* sin;  // [B, S, D]
  void* out;        // [B, H, S, D], apart from x
  int64_t batch, heads, queries, head_dim;
  int64_t x_batch, x_head, x_row, cos_batch, cos_row, sin_batch, sin_row, out_batch, out_head, out_row;
  int32_t dtype;
};

namespace {

// out[j] = x[j] cos[j] + turned[j] sin[j] for j < n, turned negated or not.
template <class T, bool NEGATE>
FB_INLINE void rotate(const T* x, const T* turned, const T* cos, const T* sin, T* out, int64_t n) {
  const auto turn = [](vf v) { return NEGATE ? -v : v; };
  int64_t j = 0;
  for (; j + VL <= n; j += VL)
    store_whole(out + j, rounded(x, load(x + j) * load(cos + j)) + rounded(x, turn(load(turned + j)) * load(sin + j)));
  if (j < n) {
    const int left = int(n - j);
    const vf one = rounded(x, load_partial(x + j, left) * load_partial(cos + j, left));
    const vf other = rounded(x, turn(load_partial(turned + j, left)) * load_partial(sin + j, left));
    store_partial(out + j, one + other, left);
  }
}

// Rows [r0, r1) in the order B, S, H: the heads of a position share cos and sin.
template <class T> void rotary_rows(const RotaryArgs& a, int64_t r0, int64_t r1) {
  int64_t h = r0 % a.heads, s = r0 / a.heads % a.queries, b = r0 / a.heads / a.queries;
  const int64_t half = a.head_dim / 2, rest = a.head_dim - half;
  for (int64_t r = r0; r < r1; ++r) {
    const T* x = static_cast<const T*>(a.x) + b * a.x_batch + h * a.x_head + s * a.x_row;
    const T* cos = static_cast<const T*>(a.cos) + b * a.cos_batch + s * a.cos_row;
    const T* sin = static_cast<const T*>(a.sin) + b * a.sin_batch + s * a.sin_row;
    T* out = static_cast<T*>(a.out) + b * a.out_batch + h * a.out_head + s * a.out_row;
    rotate<T, true>(x, x + half, cos, sin, out, rest);
    rotate<T, false>(x + rest, x, cos + rest, sin + rest, out + rest, half);
    if (++h == a.heads) {
      h = 0;
      if (++s == a.queries) s = 0, ++b;
    }
  }
}

template <class T> void rotary(const RotaryArgs& a, int threads) {
  const int64_t rows = a.batch * a.heads * a.queries;
  parallel_parts(rows, threads, rows * a.head_dim / 2,
                 [&](int64_t begin, int64_t end) { rotary_rows<T>(a, begin, end); });
}

}  // namespace

// Needs D contiguous in every tensor.
extern "C" int forebay_rotary(const RotaryArgs* a, float*, int64_t, int threads) {
  if (a->batch == 0 || a->heads == 0 || a->queries == 0) return 0;
  if (a->dtype == F32) rotary<float>(*a, threads);
  else if (a->dtype == BF16) rotary<bf16>(*a, threads);
  else rotary<f16>(*a, threads);
  return 0;
}
