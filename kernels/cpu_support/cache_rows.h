// How a row of K or V becomes a packed row of the cache: rotated, quantized, and at 4 bits the range fitted once more.
// kv_append_q/reference.py says why; it gives the same bits.
#pragma once

#include "groups.h"

namespace forebay {

constexpr int64_t MAX_HEAD_DIM = 640;  // 64 positions of 640 floats: 160 KiB of stack, as much for q and results
constexpr int64_t MAX_ROTATION = 32;

// Elements of a rotated block: the largest power of two, at most MAX_ROTATION, that divides dim.
FB_INLINE int64_t rotation_size(int64_t dim) { return std::min(MAX_ROTATION, dim & -dim); }

// 2^-ceil(p / 2) and 2^-floor(p / 2) for blocks of 2^p: their product undoes two rotations, and neither rounds.
FB_INLINE float stored_factor(int64_t size) {
  float factor = 1.0f;
  for (int64_t s = 1; s < size; s *= 4) factor *= 0.5f;
  return factor;
}
FB_INLINE float read_factor(int64_t size) { return 1.0f / (float(size) * stored_factor(size)); }

// The lanes of v with those STRIDE away, in pairs.
template <int STRIDE> FB_INLINE vf swapped(vf v) {
#if defined(__GNUC__) && !defined(__clang__)
  vi lanes;
  for (int j = 0; j < VL; ++j) lanes[j] = j ^ STRIDE;
  return __builtin_shuffle(v, lanes);
#else
  vf r;
  for (int j = 0; j < VL; ++j) r[j] = v[j ^ STRIDE];
  return r;
#endif
}

// One stage of x[0, n): of every two elements STRIDE apart, their sum and the first less the second.
template <int STRIDE> FB_INLINE void butterflies(float* x, int64_t n) {
  if (STRIDE < VL && n % VL == 0) {
    constexpr int WITHIN = STRIDE < VL ? STRIDE : 1;
    vf sign;
    for (int j = 0; j < VL; ++j) sign[j] = j & WITHIN ? -1.0f : 1.0f;
    for (int64_t i = 0; i < n; i += VL) {
      const vf v = load(x + i);
      store(x + i, v * sign + swapped<WITHIN>(v));
    }
    return;
  }
  for (int64_t i = 0; i < n; i += 2 * STRIDE)
    for (int64_t j = i; j < i + STRIDE; ++j) {
      const float a = x[j], b = x[j + STRIDE];
      x[j] = a + b;
      x[j + STRIDE] = a - b;
    }
}

// x[0, dim) becomes factor * H x, H the Hadamard matrix of +-1 of every block (Sylvester's order).
static void rotate(float* x, int64_t dim, float factor) {
  const int64_t size = rotation_size(dim);
  if (size >= 2) butterflies<1>(x, dim);
  if (size >= 4) butterflies<2>(x, dim);
  if (size >= 8) butterflies<4>(x, dim);
  if (size >= 16) butterflies<8>(x, dim);
  if (size >= 32) butterflies<16>(x, dim);
  for (int64_t j = 0; j < dim; ++j) x[j] *= factor;
}

constexpr int DL = 4;  // lanes of a sum in doubles
typedef float quad __attribute__((vector_size(DL * 4)));
typedef double vd __attribute__((vector_size(DL * 8)));

// Elements [i, i + DL) of from[0, n); 0 from n on.
FB_INLINE vd widened(const float* from, int64_t i, int64_t n) {
  quad v = {};
  if (i + DL <= n) std::memcpy(&v, from + i, sizeof v);
  else std::memcpy(&v, from + i, size_t(n - i) * 4);
  return __builtin_convertvector(v, vd);
}
FB_INLINE double lane_sum(vd v) { return (v[0] + v[1]) + (v[2] + v[3]); }

// Replaces the range of a group of 4-bit codes by the least-squares fit to them, and codes anew, where that brings the
// squared error down. Sums are of doubles, in which the order hardly matters: their terms have at most 28 bits.
static void refit_group(const float* x, int64_t n, uint8_t* codes, f16* scale, f16* low) {
  alignas(64) float code[MAX_HEAD_DIM];
  alignas(64) uint8_t fresh[MAX_HEAD_DIM / 2];
  const int64_t nbytes = (n + 1) / 2;
  const float step = load_one(scale), base = load_one(low);
  if (!(step > 0)) return;
  const auto error = [&](const uint8_t* from, float step, float base) {
    vd sum = {};
    dequantize_group(from, 4, step, base, n, code);
    for (int64_t i = 0; i < n; i += DL) {
      const vd off = widened(code, i, n) - widened(x, i, n);
      sum += off * off;
    }
    return lane_sum(sum);
  };
  vd counted = {}, squared = {}, totals = {}, products = {};
  dequantize_group(codes, 4, 1.0f, 0.0f, n, code);
  for (int64_t i = 0; i < n; i += DL) {
    const vd c = widened(code, i, n), v = widened(x, i, n);
    counted += c;
    squared += c * c;
    totals += v;
    products += c * v;
  }
  const double q = lane_sum(counted), qq = lane_sum(squared), sum = lane_sum(totals), product = lane_sum(products);
  const double fitted = (double(n) * product - q * sum) / (double(n) * qq - q * q);
  f16 s, l;
  from_float(float(fitted), &s);
  from_float(float((sum - fitted * q) / double(n)), &l);
  const float fresh_step = to_float(s), fresh_base = to_float(l), most = std::numeric_limits<float>::max();
  if (!(fresh_step > 0 && fresh_step <= most && fresh_base <= most && fresh_base >= -most)) return;
  encode_group(x, n, 2 * nbytes, 4, fresh_base, fresh_step, fresh);
  if (!(error(fresh, fresh_step, fresh_base) < error(codes, step, base))) return;
  std::memcpy(codes, fresh, size_t(nbytes));
  store_bits(scale, s);
  store_bits(low, l);
}

inline GroupFormat format_of(int64_t dim, int64_t group, int32_t bits) {
  return {group, (dim + group - 1) / group, bits, F16};
}

// Whether `rows` new positions from start[b] on lie within a cache of `length` positions, for every sequence.
inline bool inside(const int64_t* start, int64_t batch, int64_t rows, int64_t length) {
  for (int64_t b = 0; b < batch; ++b)
    if (start[b] < 0 || start[b] + rows > length) return false;
  return true;
}

}  // namespace forebay
