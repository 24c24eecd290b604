// Appending to a KV cache of rotated rows, packed in groups along the head dimension. Scales are fp16.
#include "cache_rows.h"
#include "team.h"

using namespace forebay;

extern "C" struct CacheAppendArgs {
  uint8_t* k_cache;      // [B, Hkv, L, R] packed rows
  uint8_t* v_cache;
  const void* k;         // [B, Hkv, S, D]
  const void* v;         // [B, Hkv, S, Dv]
  const int64_t* start;  // [B], or where `each` a position of every row [B, S], read at every call
  int64_t batch, heads, length, rows, k_dim, v_dim, group;
  int64_t k_cache_batch, k_cache_head, k_cache_row, v_cache_batch, v_cache_head, v_cache_row;  // bytes
  int64_t k_batch, k_head, k_row, v_batch, v_head, v_row;                                      // elements
  int32_t bits, dtype, each;
};

namespace {

template <class T>
void append_row(const T* x, int64_t dim, int64_t group, int32_t bits, uint8_t* row) {
  alignas(64) float held[MAX_HEAD_DIM];
  const GroupFormat f = format_of(dim, group, bits);
  f16* scales = reinterpret_cast<f16*>(row + f.codes_nbytes());
  f16* lows = reinterpret_cast<f16*>(row + f.codes_nbytes() + f.scales_nbytes());
  upcast(x, held, dim);
  rotate(held, dim, stored_factor(rotation_size(dim)));
  for (int64_t g = 0; g < f.count; ++g) {
    const int64_t n = std::min(group, dim - g * group);
    uint8_t* codes = row + g * group * bits / 8;
    quantize_group(held + g * group, n, group, bits, codes, scales + g, lows + g);
    if (bits == 4) refit_group(held + g * group, n, codes, scales + g, lows + g);
  }
  const int64_t used = f.codes_nbytes() + 2 * f.scales_nbytes();
  std::memset(row + used, 0, size_t(-used & 3));  // rows are padded to 4 bytes
}

template <class T> void append(const CacheAppendArgs& a, int threads) {
  const int64_t tasks = a.batch * a.heads;
  const bool same = a.k_cache == a.v_cache && a.k == a.v;  // rows of latents
  parallel_for(tasks, threads, tasks * a.rows * (a.k_dim + a.v_dim), [&](int64_t i) {
    const int64_t b = i / a.heads, h = i % a.heads;
    for (int64_t s = 0; s < a.rows; ++s) {
      const int64_t at = a.each ? a.start[b * a.rows + s] : a.start[b] + s;
      append_row(static_cast<const T*>(a.k) + b * a.k_batch + h * a.k_head + s * a.k_row, a.k_dim, a.group, a.bits,
                 a.k_cache + b * a.k_cache_batch + h * a.k_cache_head + at * a.k_cache_row);
      if (same) continue;
      append_row(static_cast<const T*>(a.v) + b * a.v_batch + h * a.v_head + s * a.v_row, a.v_dim, a.group, a.bits,
                 a.v_cache + b * a.v_cache_batch + h * a.v_cache_head + at * a.v_cache_row);
    }
  });
}

}  // namespace

extern "C" int64_t forebay_cache_max_head_dim() { return MAX_HEAD_DIM; }

// Needs D and R contiguous everywhere and D <= MAX_HEAD_DIM. Returns 1, and writes nothing, where a position would lie
// outside the cache.
extern "C" int forebay_kv_append_q(const CacheAppendArgs* a, float*, int64_t, int threads) {
  const bool held = a->each ? inside(a->start, a->batch * a->rows, 1, a->length)
                            : inside(a->start, a->batch, a->rows, a->length);
  if (!held || a->k_dim > MAX_HEAD_DIM || a->v_dim > MAX_HEAD_DIM) return 1;
  if (a->dtype == F32) append<float>(*a, threads);
  else if (a->dtype == BF16) append<bf16>(*a, threads);
  else append<f16>(*a, threads);
  return 0;
}
