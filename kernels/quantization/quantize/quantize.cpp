// Rows of x to packed groups and back (packing.py).
#include <algorithm>
#include <atomic>

#include "groups.h"
#include "team.h"

using namespace forebay;

extern "C" struct QuantizeArgs {
  const void* x;  // [rows, k]
  uint8_t* packed;
  uint8_t* scale;
  uint8_t* low;  // null: the middle code is 0
  int32_t* unheld;  // set to 1 where some group holds NaN or infinity, or a range that the scale's type cannot
  int64_t rows, k, x_stride, group;                  // x_stride in elements
  int64_t packed_stride, scale_stride, low_stride;   // in bytes
  int32_t bits, scale_dtype, dtype, codebook;
};

namespace {

constexpr int64_t MAX_GROUP = 1024;

template <class S, class T> bool quantize_row(const QuantizeArgs& a, int64_t row) {
  alignas(64) float held[MAX_GROUP];
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  S* scale = reinterpret_cast<S*>(a.scale + row * a.scale_stride);
  S* low = reinterpret_cast<S*>(a.low + row * a.low_stride);
  bool whole = true;
  for (int64_t g = 0; g * a.group < a.k; ++g) {
    const int64_t n = std::min(a.group, a.k - g * a.group);
    upcast(x + g * a.group, held, n);
    whole &= quantize_group(held, n, a.group, a.bits, a.packed + row * a.packed_stride + g * a.group * a.bits / 8,
                            scale + g, low + g);
  }
  return whole;
}

template <class S> bool quantize_any(const QuantizeArgs& a, int64_t row) {
  if (a.dtype == F32) return quantize_row<S, float>(a, row);
  if (a.dtype == BF16) return quantize_row<S, bf16>(a, row);
  return quantize_row<S, f16>(a, row);
}

template <class T> void dequantize_any(const QuantizeArgs& a, int64_t row) {
  alignas(64) float held[MAX_GROUP];
  T* x = static_cast<T*>(const_cast<void*>(a.x)) + row * a.x_stride;
  const float limit = a.dtype == F16 ? 65504.0f : a.dtype == BF16 ? 3.38953139e38f : std::numeric_limits<float>::max();
  for (int64_t g = 0; g * a.group < a.k; ++g) {
    const int64_t n = std::min(a.group, a.k - g * a.group);
    const uint8_t* codes = a.packed + row * a.packed_stride + g * a.group * a.bits / 8;
    const uint8_t *scales = a.scale + row * a.scale_stride, *lows = a.low ? a.low + row * a.low_stride : nullptr;
    if (a.codebook) {
      look_up_group(codes, a.codebook, coded_scale(scales, lows, a.scale_dtype, g), n, held);
    } else {
      const float scale = scale_at(scales, a.scale_dtype, g);
      const float low = lows ? scale_at(lows, a.scale_dtype, g) : symmetric_low(a.bits) * scale;
      dequantize_group(codes, a.bits, scale, low, n, held);
    }
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
      vf v = load(held + i);
      v = v > limit ? vf{} + limit : v;  // the top of a range may lie just beyond the largest number
      v = v < -limit ? vf{} - limit : v;
      store_whole(x + g * a.group + i, v);
    }
    for (; i < n; ++i) store_one(x + g * a.group + i, held[i] > limit ? limit : held[i] < -limit ? -limit : held[i]);
  }
}

}  // namespace

extern "C" int64_t forebay_quantize_max_group() { return MAX_GROUP; }

// Needs contiguous columns, and a group of at most MAX_GROUP.
extern "C" int forebay_quantize(const QuantizeArgs* a, float*, int64_t, int threads) {
  if (a->group > MAX_GROUP) return 1;
  std::atomic<bool> unheld{false};
  parallel_parts(a->rows, threads, a->rows * a->k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      if (!(a->scale_dtype == F16 ? quantize_any<f16>(*a, row) : quantize_any<bf16>(*a, row))) unheld = true;
  });
  *a->unheld = unheld;
  return 0;
}

// The inverse, into x. The same needs.
extern "C" int forebay_dequantize(const QuantizeArgs* a, float*, int64_t, int threads) {
  if (a->group > MAX_GROUP) return 1;
  parallel_parts(a->rows, threads, a->rows * a->k / 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (a->dtype == F32) dequantize_any<float>(*a, row);
      else if (a->dtype == BF16) dequantize_any<bf16>(*a, row);
      else dequantize_any<f16>(*a, row);
    }
  });
  return 0;
}
