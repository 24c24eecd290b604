// Causal attention over a KV cache with grouped queries, a window, a soft cap and a length for each sequence.
// Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) in fp32, upcasting the cache in registers.
#include "attend_rows.h"
#include "team.h"

using namespace forebay;

extern "C" struct AttentionArgs {
  const void* q;         // [B, H, S, D]
  const void* k;         // [B, Hkv, L, D]
  const void* v;         // [B, Hkv, L, D]
  const int64_t* start;  // [B], read at every call
  void* out;             // [B, S, H, D]
  const void* sinks;     // [H] of q's type, or null
  int64_t batch, heads, kv_heads, queries, length, head_dim;
  int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_row, out_head;
  int64_t window;  // as first_seen has it
  float scale, softcap;
  int32_t dtype, parts;  // parts: of the positions seen, at most, that tasks attend to apart
};

namespace {

constexpr int64_t FEW = 4;             // of them at a time where few query rows leave memory to wait for
constexpr int64_t MANY_ROWS = 12;      // from so many on keys and values meet them in panels
constexpr int64_t MAX_HEAD_DIM = 1024;

// A task: query rows [r0, r1) of KV heads [h0, h1) of sequence b, row r being position r / group of head r % group; and
// of so many parts of the positions that they see, one.
struct Piece { int64_t b, h0, h1, r0, r1, part, parts; };

// The sum of a row with that of its sink, a score that no value goes with: infinite where nothing else counts.
template <class T> float with_sink(const AttentionArgs& a, int64_t h, float largest, float sum) {
  return a.sinks ? sum + std::exp(load_one(static_cast<const T*>(a.sinks) + h) - largest) : sum;
}

// Row [s, h] of sequence b: what was gathered, to be merged with that of other parts or whole.
template <class T>
void leave_row(const AttentionArgs& a, const Piece& p, int64_t s, int64_t h, const Row& row, const float* o,
               float* parts) {
  const int64_t d = a.head_dim;
  if (p.parts > 1) {
    float* to = parts + (((p.b * a.queries + s) * a.heads + h) * p.parts + p.part) * part_floats(d);
    to[0] = row.largest, to[1] = row.sum;
    std::memcpy(to + 2, o, size_t((d + VL - 1) / VL * VL) * 4);
    return;
  }
  T* out = static_cast<T*>(a.out) + p.b * a.out_batch + s * a.out_row + h * a.out_head;
  const float sum = with_sink<T>(a, h, row.largest, row.sum);
  for (int64_t j = 0; j < d; ++j) store_one(out + j, o[j] / sum);
}

template <class T> void run_task(const AttentionArgs& a, const Piece& p, float* parts) {
  alignas(64) float o[ROW_FLOATS], scores[ROWS * Queries<T>::STEP];
  Queries<T> q;
  q.d = a.head_dim;
  Row rows[ROWS];
  const int64_t group = a.heads / a.kv_heads, d = a.head_dim, os = row_stride(a.head_dim), m = p.r1 - p.r0;
  const int64_t start = a.start[p.b], count = (p.h1 - p.h0) * m, width = d * int64_t(sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = p.r0 + i % m, s = r / group, h = (p.h0 + i / m) * group + r % group, high = start + s + 1;
    q.take(i, static_cast<const T*>(a.q) + p.b * a.q_batch + h * a.q_head + s * a.q_row);
    rows[i] = {first_seen(start + s, a.window), high, -std::numeric_limits<float>::infinity(), 0.0f};
  }
  std::memset(o, 0, size_t(count * os) * 4);
  const T* k = static_cast<const T*>(a.k) + p.b * a.k_batch;
  const T* v = static_cast<const T*>(a.v) + p.b * a.v_batch;
  const RowsMet how = {a.k_row, a.v_row, d, a.scale, a.softcap};
  const bool many = m >= MANY_ROWS, few = m <= 4;
  const int64_t wide = many ? Queries<T>::STEP : KEYS;
  const int64_t step = few ? FEW : KEYS, ahead = AHEAD_NBYTES / width / FEW * FEW + FEW;
  // Rows are in order of position, so the first sees the lowest key and the last the highest.
  const Segment seen = segment_of(rows[0].low, rows[m - 1].high, p.parts, p.part);
  for (int64_t t0 = seen.begin; t0 < seen.end; t0 += wide) {
    const int64_t n = std::min(wide, seen.end - t0);
    for (int64_t h = p.h0; h < p.h1; ++h) {
      const int64_t i0 = (h - p.h0) * m, next = h + 1 < p.h1 ? h + 1 : p.h0, t1 = h + 1 < p.h1 ? t0 : t0 + wide;
      const int64_t coming = std::min(n, seen.end - t1);  // of the next head, or of the next positions; none at the end
      const T *keys = k + h * a.k_head + t0 * a.k_row, *values = v + h * a.v_head + t0 * a.v_row;
      if (!few) {
        prefetch_rows(k + next * a.k_head + t1 * a.k_row, coming, a.k_row, width);
        prefetch_rows(v + next * a.v_head + t1 * a.v_row, coming, a.v_row, width);
      }
      if (many) {
        attend_rows(how, q, i0, keys, values, m, n, t0, rows + i0, scores, o + i0 * os);
        continue;
      }
      std::memset(scores, 0, size_t(m * KEYS) * 4);
      for (int64_t t = 0; t < n; t += step) {
        if (few) prefetch_rows(keys + (t + ahead) * a.k_row, step, a.k_row, width);
        score_few(q, i0, keys + t * a.k_row, a.k_row, m, std::min(step, n - t), scores + t);
      }
      for (int64_t i = 0; i < m; ++i)
        rescale(o + (i0 + i) * os, d, soften(scores + i * KEYS, n, rows[i0 + i], t0, a.scale, a.softcap));
      for (int64_t t = 0; t < n; t += step) {
        if (few) prefetch_rows(values + (t + ahead) * a.v_row, step, a.v_row, width);
        multiply_outer(scores + t, KEYS, values + t * a.v_row, a.v_row, m, d, std::min(step, n - t), o + i0 * os, os);
      }
    }
  }
  q.end(rows, count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = p.r0 + i % m;
    leave_row<T>(a, p, r / group, (p.h0 + i / m) * group + r % group, rows[i], o + i * os, parts);
  }
}

// Puts the parts of every row together.
template <class T> void merge_rows(const AttentionArgs& a, int64_t count, int threads, const float* parts) {
  const int64_t d = a.head_dim, per_row = count * part_floats(d), rows = a.batch * a.queries * a.heads;
  parallel_parts(rows, threads, rows * per_row / 8, [&](int64_t begin, int64_t end) {
    alignas(64) float o[MAX_HEAD_DIM];
    for (int64_t r = begin; r < end; ++r) {
      const int64_t h = r % a.heads, s = r / a.heads % a.queries, b = r / a.heads / a.queries;
      float largest = parts[r * per_row];
      for (int64_t p = 1; p < count; ++p) largest = std::max(largest, parts[r * per_row + p * part_floats(d)]);
      const float sum = with_sink<T>(a, h, largest, merge_parts(parts + r * per_row, count, d, o));
      T* out = static_cast<T*>(a.out) + b * a.out_batch + s * a.out_row + h * a.out_head;
      for (int64_t j = 0; j < d; ++j) store_one(out + j, o[j] / sum);
    }
  });
}

template <class T> void run(const AttentionArgs& a, int threads, float* scratch) {
  const int64_t rows = a.queries * (a.heads / a.kv_heads), most = std::min(ROWS, ROW_FLOATS / row_stride(a.head_dim));
  const int64_t blocks = (rows + most - 1) / most;
  int64_t keys = 0, longest = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t seen = a.start[b] + a.queries - first_seen(a.start[b], a.window);
    keys += seen, longest = std::max(longest, seen);
  }
  const int64_t parts = blocks > 1 ? 1 : std::clamp<int64_t>(longest / SEGMENT, 1, std::max<int64_t>(1, a.parts));
  const int64_t together =
      a.k_head < a.k_row ? heads_together(a.batch * parts, a.kv_heads, most / rows, threads) : 1;
  const int64_t shares = (a.kv_heads + together - 1) / together;
  // Each query row meets the keys and values that it sees, some 8 products a ns.
  parallel_for(a.batch * shares * parts * blocks, threads, keys * a.queries * a.heads * a.head_dim / 4, [&](int64_t i) {
    const int64_t block = blocks - 1 - i % blocks;  // the longest block of a head comes first
    const int64_t part = i / blocks % parts;
    const int64_t share = i / blocks / parts, h0 = share % shares * together;
    const Piece piece = {share / shares, h0, std::min(h0 + together, a.kv_heads),
                         block * most, std::min(rows, (block + 1) * most), part, parts};
    run_task<T>(a, piece, scratch);
  });
  if (parts > 1) merge_rows<T>(a, parts, threads, scratch);
}

}  // namespace

extern "C" int64_t forebay_attention_max_head_dim() { return MAX_HEAD_DIM; }

// Needs head_dim <= MAX_HEAD_DIM, D contiguous everywhere and scratch for `parts` parts. Writes all of `out` and nothing
// else, or returns 1 and writes nothing where a sequence's queries would stand outside the cache.
extern "C" int forebay_attention(const AttentionArgs* a, float* scratch, int64_t floats, int threads) {
  for (int64_t b = 0; b < a->batch; ++b)
    if (a->start[b] < 0 || a->start[b] + a->queries > a->length) return 1;
  if (a->parts > 1 && floats < a->batch * a->queries * a->heads * a->parts * part_floats(a->head_dim)) return 1;
  if (a->dtype == F32) run<float>(*a, threads, scratch);
  else if (a->dtype == BF16) run<bf16>(*a, threads, scratch);
  else run<f16>(*a, threads, scratch);
  return 0;
}
