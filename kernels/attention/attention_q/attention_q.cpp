// Causal attention over a KV cache of rotated rows, packed in groups along the head dimension. Positions are unpacked to
// fp32 in tiles on the stack, and stay rotated: queries are rotated to meet the keys, results are rotated back. Memory
// holds the packed rows only. Scales are fp16.
#include "cache_rows.h"
#include "softmax_rows.h"
#include "team.h"

using namespace forebay;

extern "C" struct CacheAttentionArgs {
  const void* q;           // [B, H, S, D]
  const uint8_t* k_cache;  // [B, Hkv, L, R] packed rows
  const uint8_t* v_cache;
  const int64_t* start;    // [B], read at every call
  void* out;               // [B, S, H, D]
  int64_t batch, heads, kv_heads, queries, length, head_dim, group;
  int64_t q_batch, q_head, q_row;                             // elements
  int64_t k_batch, k_head, k_row, v_batch, v_head, v_row;     // bytes
  int64_t out_batch, out_row, out_head;                       // elements
  int64_t window;  // as first_seen has it
  float scale, softcap;
  int32_t bits, dtype;
};

namespace {

constexpr int64_t ROWS = 32;           // query rows (positions x group of heads) per task
constexpr int64_t KEYS = 64;           // cache positions per step

// One task: query rows [r0, r1) of KV heads [h0, h1) of one sequence, row r being position r / group of head r % group.
template <class T>
void run_task(const CacheAttentionArgs& a, int64_t b, int64_t h0, int64_t h1, int64_t r0, int64_t r1) {
  alignas(64) float q[ROWS * MAX_HEAD_DIM], o[ROWS * MAX_HEAD_DIM], scores[ROWS * KEYS], tile[KEYS * MAX_HEAD_DIM];
  Row rows[ROWS];
  const int64_t group = a.heads / a.kv_heads, d = a.head_dim, ds = (d + VL - 1) / VL * VL, m = r1 - r0;
  const int64_t start = a.start[b], count = (h1 - h0) * m;
  const GroupFormat f = format_of(d, a.group, a.bits);
  const int64_t width = f.codes_nbytes() + 2 * f.scales_nbytes();
  const float unrotated = read_factor(rotation_size(d));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = r0 + i % m, s = r / group, h = (h0 + i / m) * group + r % group, high = start + s + 1;
    upcast(static_cast<const T*>(a.q) + b * a.q_batch + h * a.q_head + s * a.q_row, q + i * d, d);
    rotate(q + i * d, d, unrotated);
    rows[i] = {first_seen(start + s, a.window), high, -std::numeric_limits<float>::infinity(), 0.0f};
  }
  std::memset(o, 0, size_t(count * ds) * 4);
  const uint8_t* k = a.k_cache + b * a.k_batch;
  const uint8_t* v = a.v_cache + b * a.v_batch;
  const bool same = k == v && a.k_head == a.v_head && a.k_row == a.v_row;  // rows of latents, unpacked once
  // Rows are in order of position, so the first sees the lowest key and the last the highest.
  const int64_t end = rows[m - 1].high;
  for (int64_t t0 = rows[0].low; t0 < end; t0 += KEYS) {
    const int64_t n = std::min(KEYS, end - t0);
    for (int64_t h = h0; h < h1; ++h) {
      const int64_t i0 = (h - h0) * m, next = h + 1 < h1 ? h + 1 : h0, t1 = h + 1 < h1 ? t0 : t0 + KEYS;
      const int64_t coming = std::min(n, end - t1);  // of the next head, or of the next positions; none at the end
      for (int64_t i = 0; i < m; ++i) std::memset(scores + i * KEYS, 0, size_t(n) * 4);
      for (int64_t t = 0; t < n; ++t) {
        if (t < coming) prefetch_rows(k + next * a.k_head + (t1 + t) * a.k_row, 1, a.k_row, width);
        dequantize_row(k + h * a.k_head + (t0 + t) * a.k_row, f, 0, d, tile + t * d);
      }
      multiply_dot(q + i0 * d, d, tile, d, m, n, d, scores, KEYS);
      for (int64_t i = 0; i < m; ++i) {
        const float factor = soften(scores + i * KEYS, n, rows[i0 + i], t0, a.scale, a.softcap);
        float* row = o + (i0 + i) * ds;
        if (factor != 1.0f)
          for (int64_t j = 0; j < ds; j += VL) store(row + j, load(row + j) * factor);
      }
      for (int64_t t = 0; t < n && !same; ++t) {
        if (t < coming) prefetch_rows(v + next * a.v_head + (t1 + t) * a.v_row, 1, a.v_row, width);
        dequantize_row(v + h * a.v_head + (t0 + t) * a.v_row, f, 0, d, tile + t * d);
      }
      multiply_outer(scores, KEYS, tile, d, m, d, n, o + i0 * ds, ds);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = r0 + i % m, s = r / group, h = (h0 + i / m) * group + r % group;
    T* out = static_cast<T*>(a.out) + b * a.out_batch + s * a.out_row + h * a.out_head;
    rotate(o + i * ds, d, unrotated);
    for (int64_t j = 0; j < d; ++j) store_one(out + j, o[i * ds + j] / rows[i].sum);
  }
}

template <class T> void attend(const CacheAttentionArgs& a, int threads) {
  const int64_t rows = a.queries * (a.heads / a.kv_heads), blocks = (rows + ROWS - 1) / ROWS;
  const int64_t together = a.k_head < a.k_row ? heads_together(a.batch, a.kv_heads, ROWS / rows, threads) : 1;
  const int64_t parts = (a.kv_heads + together - 1) / together;
  int64_t keys = 0;
  for (int64_t b = 0; b < a.batch; ++b) keys += a.start[b] + a.queries;
  // 4 products a ns, and each key and value unpacked once a task.
  const int64_t serial_ns = keys * (a.queries * a.heads + 2 * a.kv_heads * blocks) * a.head_dim / 4;
  parallel_for(a.batch * parts * blocks, threads, serial_ns, [&](int64_t i) {
    const int64_t block = blocks - 1 - i % blocks, part = i / blocks;  // the longest block of a head comes first
    const int64_t h0 = part % parts * together;
    run_task<T>(a, part / parts, h0, std::min(h0 + together, a.kv_heads), block * ROWS,
                std::min(rows, (block + 1) * ROWS));
  });
}

}  // namespace

// Needs D and R contiguous everywhere and D <= MAX_HEAD_DIM. Writes all of `out` and nothing else; returns 1, and writes
// nothing, where a position would lie outside the cache.
extern "C" int forebay_attention_q(const CacheAttentionArgs* a, float*, int64_t, int threads) {
  if (!inside(a->start, a->batch, a->queries, a->length) || a->head_dim > MAX_HEAD_DIM) return 1;
  if (a->dtype == F32) attend<float>(*a, threads);
  else if (a->dtype == BF16) attend<bf16>(*a, threads);
  else attend<f16>(*a, threads);
  return 0;
}
