// K and V of new positions into the cache, each sequence at its own start.
#include <cstdint>
#include <cstring>

#include "team.h"

extern "C" struct KvAppendArgs {
  void* k_cache;         // [B, H, L, D]
  void* v_cache;         // [B, H, L, Dv]
  const void* k;         // [B, H, S, D]
  const void* v;         // [B, H, S, Dv]
  const int64_t* start;  // [B], read at every call
  int64_t batch, heads, length, rows, k_nbytes, v_nbytes;  // length L, rows S, bytes of a row
  // bytes from one sequence, head and row to the next
  int64_t k_cache_batch, k_cache_head, k_cache_row, v_cache_batch, v_cache_head, v_cache_row;
  int64_t k_batch, k_head, k_row, v_batch, v_head, v_row;
};

namespace {

void copy_rows(char* to, int64_t to_row, const char* from, int64_t from_row, int64_t rows, int64_t nbytes) {
  for (int64_t s = 0; s < rows; ++s) std::memcpy(to + s * to_row, from + s * from_row, size_t(nbytes));
}

}  // namespace

// Needs D contiguous everywhere. Returns 1, and writes nothing, where a position would lie outside the cache.
extern "C" int forebay_kv_append(const KvAppendArgs* a, float*, int64_t, int threads) {
  for (int64_t b = 0; b < a->batch; ++b)
    if (a->start[b] < 0 || a->start[b] + a->rows > a->length) return 1;
  const int64_t tasks = a->batch * a->heads;
  const int64_t copied_nbytes = tasks * a->rows * (a->k_nbytes + a->v_nbytes);
  forebay::parallel_for(tasks, threads, copied_nbytes / 8, [&](int64_t i) {
    const int64_t b = i / a->heads, h = i % a->heads, at = a->start[b];
    copy_rows(static_cast<char*>(a->k_cache) + b * a->k_cache_batch + h * a->k_cache_head + at * a->k_cache_row,
              a->k_cache_row, static_cast<const char*>(a->k) + b * a->k_batch + h * a->k_head, a->k_row, a->rows,
              a->k_nbytes);
    copy_rows(static_cast<char*>(a->v_cache) + b * a->v_cache_batch + h * a->v_cache_head + at * a->v_cache_row,
              a->v_cache_row, static_cast<const char*>(a->v) + b * a->v_batch + h * a->v_head, a->v_row, a->rows,
              a->v_nbytes);
  });
  return 0;
}
