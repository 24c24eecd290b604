// Attention of one query a sequence that multiplies the values of its best positions only (FlexGen, section 5): all keys
// are read, and then a share of the values. Over plain rows, or packed ones as of attention_q.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "cache_rows.h"
#include "softmax_rows.h"
#include "team.h"

using namespace forebay;

extern "C" struct SparseAttentionArgs {
  const void* q;         // [B, H, 1, D]
  const uint8_t* k;      // [B, Hkv, L, D], or [B, Hkv, L, R] packed
  const uint8_t* v;
  const int64_t* start;  // [B], read at every call
  void* out;             // [B, 1, H, D]
  int64_t batch, heads, kv_heads, length, head_dim, group;
  int64_t q_batch, q_head;                                 // elements
  int64_t k_batch, k_head, k_row, v_batch, v_head, v_row;  // bytes
  int64_t out_batch, out_head;                             // elements
  int64_t window;  // as first_seen has it
  double kept;
  float scale, softcap;
  int32_t bits, dtype;  // bits 0: plain rows of dtype
};

namespace {

constexpr int64_t KEYS = 64;  // packed keys that are unpacked together
constexpr int64_t AHEAD = 4;  // chosen positions between a prefetch and the use
constexpr int64_t MAX_DIM = 1024;  // as attention.cpp takes
constexpr float NONE = -std::numeric_limits<float>::infinity();

// How many of p[0, n) have bits of at least x > 0: numbers that are not negative are in the order of their bits. What
// fills the last vector is 0.
FB_INLINE int64_t count_from(const float* p, int64_t n, int32_t x) {
  vi found = {};
  for (int64_t t = 0; t < n; t += VL) {
    vi bits;
    std::memcpy(&bits, p + t, sizeof bits);
    found -= bits >= x;
  }
  int64_t sum = 0;
  for (int i = 0; i < VL; ++i) sum += found[i];
  return sum;
}

// The most bits that at least `count` of p[0, n) have, by halves; stops where so many are told from the rest. 0 where
// fewer are above 0. Twenty passes over vectors take a tenth of a partial sort of scalars.
int32_t least_bits(const float* p, int64_t n, int64_t count) {
  int32_t low = 0, high = 0x3f800001;  // weights are at most 1
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const int64_t some = count_from(p, n, middle);
    if (some >= count) low = middle;
    else high = middle;
    if (some == count) break;
  }
  return low;
}

// Indices of the newest of n positions and the `count` of the others whose weights p are largest, of equal ones the
// first, in order; returns how many. Those that weigh nothing are left out. `chosen` has room for n + 1.
int64_t choose(float* p, int64_t n, int64_t count, int32_t* chosen) {
  const int64_t others = n - 1;
  int64_t found = 0;
  const float newest = p[others];
  p[others] = 0.0f;  // of the others alone
  if (count > 0) {
    const int32_t least = std::max(1, least_bits(p, others, count));
    int64_t above = 0;
    for (int64_t t = 0; t < others; ++t) {
      const int32_t bits = int32_t(float_to_bits(p[t]));
      chosen[found] = int32_t(t);
      found += bits >= least;
      above += bits > least;
    }
    if (found > count) {  // too many are equal
      int64_t kept = 0;
      for (int64_t i = 0; i < found; ++i) {
        chosen[kept] = chosen[i];
        kept += int32_t(float_to_bits(p[chosen[i]])) > least || above++ < count;
      }
      found = kept;
    }
  }
  p[others] = newest;
  chosen[found++] = int32_t(others);
  return found;
}

// o[0, d) += p * v[0, d)
template <class T> FB_INLINE void add_scaled(float* o, float p, const T* v, int64_t d) {
  int64_t j = 0;
  for (; j + VL <= d; j += VL) store(o + j, load(o + j) + p * load(v + j));
  for (; j < d; ++j) o[j] += p * load_one(v + j);
}

// Rows of values in T, where they lie.
template <class T> struct Plain {
  int64_t d;
  int64_t nbytes() const { return d * int64_t(sizeof(T)); }
  void turn(float*) const {}
  void score(const float* q, int64_t m, const uint8_t* k, int64_t step, int64_t n, float* scores, int64_t stride) const {
    for (int64_t t = 0; t < n; t += KEYS) {
      const int64_t some = std::min(KEYS, n - t);
      prefetch_rows(k + (t + some) * step, std::min(KEYS, n - t - some), step, nbytes());
      multiply_dot(q, d, reinterpret_cast<const T*>(k + t * step), step / int64_t(sizeof(T)), m, some, d, scores + t,
                   stride);
    }
  }
  void add(float* o, float p, const uint8_t* v) const { add_scaled(o, p, reinterpret_cast<const T*>(v), d); }
};

// Packed rows, which are rotated: queries are rotated to meet them, and results back.
struct Packed {
  int64_t d;
  GroupFormat f;
  int64_t nbytes() const { return f.codes_nbytes() + 2 * f.scales_nbytes(); }
  void turn(float* x) const { rotate(x, d, read_factor(rotation_size(d))); }
  void score(const float* q, int64_t m, const uint8_t* k, int64_t step, int64_t n, float* scores, int64_t stride) const {
    alignas(64) float tile[KEYS * MAX_HEAD_DIM];
    for (int64_t t = 0; t < n; t += KEYS) {
      const int64_t some = std::min(KEYS, n - t);
      for (int64_t i = 0; i < some; ++i) {
        if (t + KEYS + i < n) prefetch_rows(k + (t + KEYS + i) * step, 1, step, nbytes());
        dequantize_row(k + (t + i) * step, f, 0, d, tile + i * d);
      }
      multiply_dot(q, d, tile, d, m, some, d, scores + t, stride);
    }
  }
  void add(float* o, float p, const uint8_t* v) const {
    alignas(64) float row[MAX_HEAD_DIM];
    dequantize_row(v, f, 0, d, row);
    add_scaled(o, p, row, d);
  }
};

int64_t stride_of(const SparseAttentionArgs& a) { return (a.length + 16) / 16 * 16; }

// Floats that a task takes: scores of each query, the positions that one has chosen, and the queries.
int64_t scratch_of(const SparseAttentionArgs& a) {
  const int64_t m = a.heads / a.kv_heads;
  return (m + 1) * stride_of(a) + (m * a.head_dim + 15) / 16 * 16;
}

// The queries of one KV head of one sequence.
template <class T, class Rows>
void run_task(const SparseAttentionArgs& a, const Rows& rows, int64_t b, int64_t h, float* scores) {
  alignas(64) float o[MAX_DIM];
  const int64_t m = a.heads / a.kv_heads, d = a.head_dim, start = a.start[b], stride = stride_of(a);
  const int64_t low = first_seen(start, a.window), n = start + 1 - low;
  int32_t* chosen = reinterpret_cast<int32_t*>(scores + m * stride);
  float* q = scores + (m + 1) * stride;
  const uint8_t* k = a.k + b * a.k_batch + h * a.k_head + low * a.k_row;
  const uint8_t* v = a.v + b * a.v_batch + h * a.v_head + low * a.v_row;
  for (int64_t i = 0; i < m; ++i) {
    upcast(static_cast<const T*>(a.q) + b * a.q_batch + (h * m + i) * a.q_head, q + i * d, d);
    rows.turn(q + i * d);
    std::memset(scores + i * stride, 0, size_t(n) * 4);
  }
  rows.score(q, m, k, a.k_row, n, scores, stride);
  const int64_t count = int64_t(std::ceil(a.kept * double(n - 1)));
  for (int64_t i = 0; i < m; ++i) {
    float* p = scores + i * stride;
    Row row = {0, n, NONE, 0.0f};
    soften(p, n, row, 0, a.scale, a.softcap);
    std::memset(o, 0, size_t(d) * 4);
    if (row.sum == row.sum) {  // NaN has no place in an order; the result is NaN with it
      const int64_t found = choose(p, n, count, chosen);
      for (int64_t j = 0; j < found; ++j) {
        if (j + AHEAD < found) prefetch_rows(v + chosen[j + AHEAD] * a.v_row, 1, a.v_row, rows.nbytes());
        rows.add(o, p[chosen[j]], v + chosen[j] * a.v_row);
      }
      rows.turn(o);
    }
    T* out = static_cast<T*>(a.out) + b * a.out_batch + (h * m + i) * a.out_head;
    for (int64_t j = 0; j < d; ++j) store_one(out + j, o[j] / row.sum);
  }
}

template <class T, class Rows>
void run(const SparseAttentionArgs& a, const Rows& rows, float* scratch, int64_t floats, int threads) {
  const int64_t count = a.batch * a.kv_heads, each = scratch_of(a);
  const int64_t parts = std::min<int64_t>({count, threads, floats / each});
  int64_t keys = 0;
  for (int64_t b = 0; b < a.batch; ++b) keys += a.start[b] + 1;
  std::atomic<int64_t> next{0};
  parallel_for(parts, threads, keys * a.heads * a.head_dim / 8, [&](int64_t part) {
    for (int64_t i; (i = next.fetch_add(1)) < count;)
      run_task<T>(a, rows, i / a.kv_heads, i % a.kv_heads, scratch + part * each);
  });
}

template <class T> void run_dtype(const SparseAttentionArgs& a, float* scratch, int64_t floats, int threads) {
  if (a.bits) run<T>(a, Packed{a.head_dim, format_of(a.head_dim, a.group, a.bits)}, scratch, floats, threads);
  else run<T>(a, Plain<T>{a.head_dim}, scratch, floats, threads);
}

}  // namespace

// Needs head_dim <= MAX_DIM (packed: MAX_HEAD_DIM), D and R contiguous, and room in `scratch` for one task at least.
// Writes all of `out` and nothing else; returns 1, and writes nothing, where a position would lie outside the cache.
extern "C" int forebay_sparse_attention(const SparseAttentionArgs* a, float* scratch, int64_t floats, int threads) {
  if (!inside(a->start, a->batch, 1, a->length)) return 1;
  if (a->dtype == F32) run_dtype<float>(*a, scratch, floats, threads);
  else if (a->dtype == BF16) run_dtype<bf16>(*a, scratch, floats, threads);
  else run_dtype<f16>(*a, scratch, floats, threads);
  return 0;
}
