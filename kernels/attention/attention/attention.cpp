// Causal attention over a KV cache with grouped queries, a window, a soft cap and a length for each sequence.
// Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) in fp32, upcasting the cache in registers.
#include <algorithm>
#include <cmath>
#include <limits>

#include "softmax_rows.h"
#include "team.h"

using namespace forebay;

extern "C" struct AttentionArgs {
  const void* q;         // [B, H, S, D]
  const void* k;         // [B, Hkv, L, D]
  const void* v;         // [B, Hkv, L, D]
  const int64_t* start;  // [B], read at every call
  void* out;             // [B, S, H, D]
  int64_t batch, heads, kv_heads, queries, length, head_dim;
  int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_row, out_head;
  int64_t window;  // as first_seen has it
  float scale, softcap;
  int32_t dtype;
};

namespace {

constexpr int64_t ROWS = 32;          // query rows (positions x group) per task
constexpr int64_t KEYS = 64;          // cache positions per step
constexpr int64_t FEW = 16;           // of them between prefetches, where few query rows leave memory to wait for
constexpr int64_t MAX_HEAD_DIM = 512;  // 32 x 512 floats twice: 128 KiB of stack a thread

// One task: query rows [r0, r1) of KV heads [h0, h1) of one sequence, row r being position r / group of head r % group.
template <class T> void run_task(const AttentionArgs& a, int64_t b, int64_t h0, int64_t h1, int64_t r0, int64_t r1) {
  alignas(64) float q[ROWS * MAX_HEAD_DIM], o[ROWS * MAX_HEAD_DIM], scores[ROWS * KEYS];
  Row rows[ROWS];
  const int64_t group = a.heads / a.kv_heads, d = a.head_dim, ds = (d + VL - 1) / VL * VL, m = r1 - r0;
  const int64_t start = a.start[b], count = (h1 - h0) * m, width = d * int64_t(sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = r0 + i % m, s = r / group, h = (h0 + i / m) * group + r % group, high = start + s + 1;
    upcast(static_cast<const T*>(a.q) + b * a.q_batch + h * a.q_head + s * a.q_row, q + i * d, d);
    rows[i] = {first_seen(start + s, a.window), high, -std::numeric_limits<float>::infinity(), 0.0f};
  }
  std::memset(o, 0, size_t(count * ds) * 4);
  const T* k = static_cast<const T*>(a.k) + b * a.k_batch;
  const T* v = static_cast<const T*>(a.v) + b * a.v_batch;
  const int64_t step = m < 4 ? FEW : KEYS;
  // Rows are in order of position, so the first sees the lowest key and the last the highest.
  const int64_t end = rows[m - 1].high;
  for (int64_t t0 = rows[0].low; t0 < end; t0 += KEYS) {
    const int64_t n = std::min(KEYS, end - t0);
    for (int64_t h = h0; h < h1; ++h) {
      const int64_t i0 = (h - h0) * m, next = h + 1 < h1 ? h + 1 : h0, t1 = h + 1 < h1 ? t0 : t0 + KEYS;
      const int64_t coming = std::min(n, end - t1);  // of the next head, or of the next positions; none at the end
      for (int64_t i = 0; i < m; ++i) std::memset(scores + i * KEYS, 0, size_t(n) * 4);
      for (int64_t t = 0; t < n; t += step) {
        prefetch_rows(k + next * a.k_head + (t1 + t) * a.k_row, std::min(step, coming - t), a.k_row, width);
        multiply_dot(q + i0 * d, d, k + h * a.k_head + (t0 + t) * a.k_row, a.k_row, m, std::min(step, n - t), d,
                     scores + t, KEYS);
      }
      for (int64_t i = 0; i < m; ++i) {
        const float factor = soften(scores + i * KEYS, n, rows[i0 + i], t0, a.scale, a.softcap);
        float* row = o + (i0 + i) * ds;
        if (factor != 1.0f)
          for (int64_t j = 0; j < ds; j += VL) store(row + j, load(row + j) * factor);
      }
      for (int64_t t = 0; t < n; t += step) {
        prefetch_rows(v + next * a.v_head + (t1 + t) * a.v_row, std::min(step, coming - t), a.v_row, width);
        multiply_outer(scores + t, KEYS, v + h * a.v_head + (t0 + t) * a.v_row, a.v_row, m, d, std::min(step, n - t),
                       o + i0 * ds, ds);
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = r0 + i % m, s = r / group, h = (h0 + i / m) * group + r % group;
    T* out = static_cast<T*>(a.out) + b * a.out_batch + s * a.out_row + h * a.out_head;
    for (int64_t j = 0; j < d; ++j) store_one(out + j, o[i * ds + j] / rows[i].sum);
  }
}

template <class T> void run(const AttentionArgs& a, int threads) {
  const int64_t rows = a.queries * (a.heads / a.kv_heads), blocks = (rows + ROWS - 1) / ROWS;
  const int64_t together = a.k_head < a.k_row ? heads_together(a.batch, a.kv_heads, ROWS / rows, threads) : 1;
  const int64_t parts = (a.kv_heads + together - 1) / together;
  // Each query row meets at most `length` keys and values, some 8 products a ns.
  int64_t keys = 0;
  for (int64_t b = 0; b < a.batch; ++b) keys += a.start[b] + a.queries;
  parallel_for(a.batch * parts * blocks, threads, keys * a.queries * a.heads * a.head_dim / 4, [&](int64_t i) {
    const int64_t block = blocks - 1 - i % blocks, part = i / blocks;  // the longest block of a head comes first
    const int64_t h0 = part % parts * together;
    run_task<T>(a, part / parts, h0, std::min(h0 + together, a.kv_heads), block * ROWS,
                std::min(rows, (block + 1) * ROWS));
  });
}

}  // namespace

extern "C" int64_t forebay_attention_max_head_dim() { return MAX_HEAD_DIM; }

// Needs head_dim <= MAX_HEAD_DIM and D contiguous everywhere. Writes all of `out` and nothing else, or returns 1 and
// writes nothing where a sequence's queries would stand outside the cache.
extern "C" int forebay_attention(const AttentionArgs* a, float*, int64_t, int threads) {
  for (int64_t b = 0; b < a->batch; ++b)
    if (a->start[b] < 0 || a->start[b] + a->queries > a->length) return 1;
  if (a->dtype == F32) run<float>(*a, threads);
  else if (a->dtype == BF16) run<bf16>(*a, threads);
  else run<f16>(*a, threads);
  return 0;
}
