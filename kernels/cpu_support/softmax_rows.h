// The running softmax of attention over steps of cache positions (Milakov and Gimelshein 2018; Dao et al. 2022).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector_math.h"

namespace forebay {

struct Row {
  int64_t low, high;  // visible cache positions [low, high)
  float largest, sum;
};

// The lowest position that a query sees at `position`: window > 0 looks back over so many positions, its own among them,
// window < 0 over its own chunk of -window, window 0 over all.
static int64_t first_seen(int64_t position, int64_t window) {
  if (window < 0) return position / -window * -window;
  return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
}

// scores[0, n) become probabilities relative to the running maximum; returns the factor for what was gathered before.
static float soften(float* scores, int64_t n, Row& row, int64_t t0, float scale, float softcap) {
  const int64_t low = std::clamp<int64_t>(row.low - t0, 0, n), high = std::clamp<int64_t>(row.high - t0, 0, n);
  for (int64_t t = 0; t < n; t += VL) {
    const vf s = load(scores + t) * scale;
    store(scores + t, softcap > 0 ? tanh_of(s / softcap) * softcap : s);
  }
  constexpr float none = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < low; ++t) scores[t] = none;
  for (int64_t t = high; t < (n + VL - 1) / VL * VL; ++t) scores[t] = none;
  vf most = vf{} + row.largest;
  for (int64_t t = 0; t < n; t += VL) {
    const vf s = load(scores + t);
    most = s > most ? s : most;
  }
  float largest = row.largest;
  for (int i = 0; i < VL; ++i) largest = most[i] > largest ? most[i] : largest;
  const float base = largest == none ? 0.0f : largest;
  const float factor = row.largest == none ? 0.0f : std::exp(row.largest - base);
  vf sum = {};
  for (int64_t t = 0; t < n; t += VL) {
    const vf p = exp_nonpositive(load(scores + t) - base);
    store(scores + t, p);
    sum += p;
  }
  row.sum = row.sum * factor + lane_sum(sum);
  row.largest = largest;
  return factor;
}

constexpr int64_t SEGMENT = 256, SEGMENT_STEP = 64;

// Positions [begin, end) of a sequence of which a task attends to part: `parts` of at least SEGMENT where there are so
// many, as equal as whole steps allow. Parts past the end are empty.
struct Segment { int64_t begin, end; };
static Segment segment_of(int64_t begin, int64_t end, int64_t parts, int64_t part) {
  parts = std::clamp<int64_t>((end - begin) / SEGMENT, 1, parts);
  const int64_t step = ((end - begin + parts - 1) / parts + SEGMENT_STEP - 1) / SEGMENT_STEP * SEGMENT_STEP;
  const int64_t first = std::min(end, begin + part * step);
  return {first, std::min(end, first + step)};
}

// What a part leaves of a row: its largest score, its sum, and the row gathered, of `head_dim` in whole vectors.
constexpr int64_t part_floats(int64_t head_dim) { return 2 + (head_dim + 15) / 16 * 16; }

// The row that `count` parts make together, in o[0, head_dim) and returned its sum.
static float merge_parts(const float* parts, int64_t count, int64_t head_dim, float* o) {
  const int64_t width = part_floats(head_dim);
  constexpr float none = -std::numeric_limits<float>::infinity();
  float largest = none, sum = 0.0f;
  for (int64_t p = 0; p < count; ++p) largest = std::max(largest, parts[p * width]);
  std::memset(o, 0, size_t(width - 2) * 4);
  for (int64_t p = 0; p < count; ++p) {
    const float* part = parts + p * width;
    const float factor = part[0] == none ? 0.0f : std::exp(part[0] - largest);
    sum += part[1] * factor;
    for (int64_t j = 0; j < head_dim; j += VL) store(o + j, load(o + j) + load(part + 2 + j) * factor);
  }
  return sum;
}

// Asks for `rows` rows of `nbytes` bytes ahead of their use, in L2: what is being computed has L1.
template <class T> FB_INLINE void prefetch_rows(const T* first, int64_t rows, int64_t stride, int64_t nbytes) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < nbytes; i += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(first + r * stride) + i, 0, 2);
}

// How many KV heads (at most `most`) a task takes together in a cache that lies token by token, where the rows of one
// head are pieces of a few hundred bytes, a page apart: so that memory is read in order. Each thread has four tasks.
static int64_t heads_together(int64_t batch, int64_t kv_heads, int64_t most, int threads) {
  int64_t found = std::max<int64_t>(1, std::min(kv_heads, most));
  while (found > 1 && batch * ((kv_heads + found - 1) / found) < 4 * int64_t(threads)) found = (found + 1) / 2;
  return found;
}

}  // namespace forebay
