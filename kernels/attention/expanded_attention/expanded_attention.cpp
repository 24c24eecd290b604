// Causal attention over rows [latent; rotated] that all heads share, by keys and values that are made of them: a head's
// key is [W_k latent; rotated], its value W_v latent. Some cached rows are expanded at a time, for one head, and meet all
// query rows of a task, whose online softmax waits in scratch meanwhile.
#include <atomic>

#include "attend_rows.h"
#include "cache_rows.h"
#include "team.h"

using namespace forebay;

extern "C" struct ExpandedAttentionArgs {
  const void* q;         // [B, H, S, plain + rotated]
  const void* rows;      // [B, 1, L, rank + rotated], or where there are `bits` packed rows, as of attention_q
  const int64_t* start;  // [B], read at every call
  const void* up;        // [H, plain + value, rank], contiguous
  void* out;             // [B, S, H, value]
  int64_t batch, heads, queries, length, rank, rotated, plain, value;
  int64_t most, lot;     // query rows of a task; cached rows that it expands at a time
  int64_t q_batch, q_head, q_row, row_batch, row, out_batch, out_row, out_head;
  int64_t window;        // as first_seen has it
  int64_t group;
  float scale, softcap;
  int32_t dtype, bits;
};

namespace {

// A worker's scratch: some latents, what is made of them, and of each query row its softmax and what it has gathered.
template <class K> struct Scratch {
  float *latents, *made, *o, *sums, *rows;
  K *keys, *values;
  Row* state;
  int64_t made_row, k_row, v_row, floats;

  Scratch(const ExpandedAttentionArgs& a, float* memory) {
    const int64_t dim = a.plain + a.rotated;
    made_row = row_stride(a.plain + a.value), k_row = round_up(dim, 16), v_row = made_row;
#if FB_BF16
    if constexpr (sizeof(K) == 2) {
      k_row = bf16_products::row_nbytes(dim) / 2, v_row = bf16_products::row_nbytes(a.value) / 2;
      floats = a.lot * bf16_products::row_nbytes(a.rank) / 4;
    } else
#endif
      floats = a.lot * a.rank;
    const auto take = [&](int64_t nbytes) {
      float* found = memory ? memory + floats : nullptr;
      floats += round_up(nbytes, 64) / 4;
      return found;
    };
    floats = round_up(floats, 16), latents = memory;
    made = take(4 * a.lot * made_row);
    keys = reinterpret_cast<K*>(take(a.lot * k_row * int64_t(sizeof(K))));
    if constexpr (sizeof(K) == 2) values = reinterpret_cast<K*>(take(2 * a.lot * v_row));
    else values = reinterpret_cast<K*>(made ? made + a.plain : nullptr);
    o = take(4 * a.most * row_stride(a.value));
    sums = take(sizeof(K) == 2 ? 64 * a.most : 0);
    state = reinterpret_cast<Row*>(take(a.most * int64_t(sizeof(Row))));
    rows = take(a.bits ? 4 * a.lot * (a.rank + a.rotated) : 0);
  }
};

// The values of n packed rows.
template <class T> void unpack(const ExpandedAttentionArgs& a, const uint8_t* rows, int64_t n, T* to) {
  alignas(64) float held[MAX_HEAD_DIM];
  const int64_t width = a.rank + a.rotated;
  const GroupFormat f = format_of(width, a.group, a.bits);
  for (int64_t i = 0; i < n; ++i) {
    dequantize_row(rows + i * a.row, f, 0, width, held);
    rotate(held, width, read_factor(rotation_size(width)));
    for (int64_t j = 0; j < width; ++j) store_one(to + i * width + j, held[j]);
  }
}

// Keys and values of head h of n cached rows, which begin `step` elements apart.
template <class T, class K>
void expand(const ExpandedAttentionArgs& a, const T* rows, int64_t step, int64_t n, int64_t h, const Scratch<K>& at) {
  const T* up = static_cast<const T*>(a.up) + h * (a.plain + a.value) * a.rank;
  const int64_t columns = a.plain + a.value;
#if FB_BF16
  if constexpr (sizeof(K) == 2) {
    using namespace bf16_products;
    char* x = reinterpret_cast<char*>(at.latents);
    for (int64_t i = 0; i < n; ++i) copy_row(rows + i * step, a.rank, x + i * row_nbytes(a.rank));
    panel_product<Weights::ROWS>(x, n, up, a.rank, columns, a.rank, at.made, at.made_row, false);
    for (int64_t i = 0; i < n; ++i) {
      const float* made = at.made + i * at.made_row;
      round_row(made, a.plain, reinterpret_cast<char*>(at.keys + i * at.k_row));
      std::memcpy(at.keys + i * at.k_row + a.plain, rows + i * step + a.rank, size_t(a.rotated) * 2);
      round_row(made + a.plain, a.value, reinterpret_cast<char*>(at.values + i * at.v_row));
    }
    return;
  } else
#endif
  {
    for (int64_t i = 0; i < n; ++i) upcast(rows + i * step, at.latents + i * a.rank, a.rank);
    std::memset(at.made, 0, size_t(n * at.made_row) * 4);
    meet_rows(at.latents, up, a.rank, n, columns, a.rank, at.made, at.made_row);
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(at.keys + i * at.k_row, at.made + i * at.made_row, size_t(a.plain) * 4);
      upcast(rows + i * step + a.rank, at.keys + i * at.k_row + a.plain, a.rotated);
    }
  }
}

// Query rows [i0, i0 + m), counted from the task's first, meet n keys and values at positions from t0 on.
template <class T, class K>
void attend(const ExpandedAttentionArgs& a, const T* q, int64_t i0, int64_t m, int64_t t0, int64_t n,
            const Scratch<K>& at) {
  alignas(64) float scores[ROWS * Queries<K>::STEP];
  Queries<K> met;
  met.d = a.plain + a.rotated;
  const RowsMet how = {at.k_row, at.v_row, a.value, a.scale, a.softcap};
  for (int64_t i = 0; i < m; ++i) met.take(i, q + (i0 + i) * a.q_row);
  if constexpr (sizeof(K) == 2) std::memcpy(met.sums, at.sums + 16 * i0, size_t(64 * m));
  for (int64_t t = 0; t < n; t += Queries<K>::STEP)
    attend_rows(how, met, 0, at.keys + t * at.k_row, at.values + t * at.v_row, m, std::min(Queries<K>::STEP, n - t),
                t0 + t, at.state + i0, scores, at.o + i0 * row_stride(a.value));
  if constexpr (sizeof(K) == 2) std::memcpy(at.sums + 16 * i0, met.sums, size_t(64 * m));
}

// Query rows [s0, s1) of head h of sequence b.
template <class T, class K>
void run_task(const ExpandedAttentionArgs& a, int64_t b, int64_t h, int64_t s0, int64_t s1, const Scratch<K>& at) {
  const int64_t start = a.start[b], count = s1 - s0, os = row_stride(a.value);
  const int64_t together = std::min(ROWS, ROW_FLOATS / row_stride(std::max(a.plain + a.rotated, a.value)));
  const T* q = static_cast<const T*>(a.q) + b * a.q_batch + h * a.q_head + s0 * a.q_row;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = start + s0 + i;
    at.state[i] = {first_seen(position, a.window), position + 1, -std::numeric_limits<float>::infinity(), 0.0f};
  }
  std::memset(at.o, 0, size_t(count * os) * 4);
  if constexpr (sizeof(K) == 2) std::memset(at.sums, 0, size_t(64 * count));
  const int64_t end = at.state[count - 1].high;
  for (int64_t t0 = at.state[0].low; t0 < end; t0 += a.lot) {
    const int64_t n = std::min(a.lot, end - t0);
    if (a.bits) {
      T* unpacked = reinterpret_cast<T*>(at.rows);
      unpack(a, static_cast<const uint8_t*>(a.rows) + b * a.row_batch + t0 * a.row, n, unpacked);
      expand(a, static_cast<const T*>(unpacked), a.rank + a.rotated, n, h, at);
    } else {
      expand(a, static_cast<const T*>(a.rows) + b * a.row_batch + t0 * a.row, a.row, n, h, at);
    }
    for (int64_t i = 0; i < count; i += together) {
      const int64_t m = std::min(together, count - i);
      const int64_t seen = std::min(n, at.state[i + m - 1].high - t0);  // by the last of these rows
      if (seen > 0 && at.state[i + m - 1].low - t0 < n) attend(a, q, i, m, t0, seen, at);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    float sum = at.state[i].sum;
    if constexpr (sizeof(K) == 2)
      for (int64_t j = 0; j < 16; ++j) sum += at.sums[16 * i + j];
    T* out = static_cast<T*>(a.out) + b * a.out_batch + (s0 + i) * a.out_row + h * a.out_head;
    for (int64_t j = 0; j < a.value; ++j) store_one(out + j, at.o[i * os + j] / sum);
  }
}

template <class T, class K> int run(const ExpandedAttentionArgs& a, float* scratch, int64_t floats, int threads) {
  const int64_t each = Scratch<K>(a, nullptr).floats, pieces = (a.queries + a.most - 1) / a.most;
  const int64_t count = a.batch * a.heads * pieces, workers = std::min<int64_t>({count, threads, floats / each});
  if (workers < 1) return 1;
  int64_t keys = 0;
  for (int64_t b = 0; b < a.batch; ++b) keys += a.start[b] + a.queries;
  const int64_t products = a.queries * (a.plain + a.rotated + a.value) + pieces * a.rank * (a.plain + a.value);
  std::atomic<int64_t> next{0};
  parallel_for(workers, threads, keys * a.heads * products / 16, [&](int64_t worker) {
    const Scratch<K> at(a, scratch + worker * each);
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      const int64_t piece = pieces - 1 - i / (a.batch * a.heads);  // the longest come first
      const int64_t pair = i % (a.batch * a.heads), s0 = piece * a.most;
      run_task<T>(a, pair / a.heads, pair % a.heads, s0, std::min(a.queries, s0 + a.most), at);
    }
  });
  return 0;
}

}  // namespace

// Needs the last dimension of each operand contiguous, heads of at most `forebay_attention_max_head_dim` elements, and
// scratch for one worker at least. Writes all of `out` and nothing else; returns 1, and writes nothing, where a sequence's
// queries would stand outside the cache.
extern "C" int forebay_expanded_attention(const ExpandedAttentionArgs* a, float* scratch, int64_t floats, int threads) {
  if (!inside(a->start, a->batch, a->queries, a->length)) return 1;
  if (a->batch * a->heads * a->queries == 0) return 0;
  if (a->dtype == F32) return run<float, float>(*a, scratch, floats, threads);
  if (a->dtype == F16) return run<f16, float>(*a, scratch, floats, threads);
#if FB_BF16
  return run<bf16, bf16>(*a, scratch, floats, threads);
#else
  return run<bf16, float>(*a, scratch, floats, threads);
#endif
}
