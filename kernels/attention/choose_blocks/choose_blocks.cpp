// The blocks of a KV cache that a step's queries give the most weight, by means of keys.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "micro.h"
#include "team.h"
#include "vector_math.h"

using namespace forebay;

extern "C" struct ChooseBlocksArgs {
  const void* q;         // [B, H, D], contiguous in D
  const void* means;     // [B, Hkv, n, D], the rows of a head one behind the other
  const int64_t* start;  // [B]
  const int64_t* begun;  // [B]
  int64_t* out;          // [B + B blocks]
  int64_t batch, heads, kv_heads, dim, blocks, each, block_tokens;
  // elements from one sequence and head to the next
  int64_t q_batch, q_head, means_batch, means_head;
  double scale, share;
  int32_t dtype;
};

namespace {

constexpr int64_t SEGMENT = 512;  // means whose scores are one task

// Of one sequence: its queries in fp32 and scaled, scores of all means by head, 1 / the sum of their exponents by head,
// weights by block, and blocks by weight.
struct Held {
  float *queries, *scores, *shares, *weights;
  int32_t* order;
  Held(const ChooseBlocksArgs& a, float* scratch)
      : queries(scratch), scores(queries + a.heads * a.dim), shares(scores + a.heads * a.blocks * a.each),
        weights(shares + a.heads), order(reinterpret_cast<int32_t*>(weights + a.blocks)) {}
};

template <class T> void score(const ChooseBlocksArgs& a, int64_t b, int64_t parts, const Held& held, int threads) {
  const int64_t group = a.heads / a.kv_heads, segments = (parts + SEGMENT - 1) / SEGMENT;
  for (int64_t h = 0; h < a.heads; ++h) {
    const T* q = static_cast<const T*>(a.q) + b * a.q_batch + h * a.q_head;
    for (int64_t i = 0; i < a.dim; ++i) held.queries[h * a.dim + i] = load_one(q + i) * float(a.scale);
  }
  parallel_for(a.kv_heads * segments, threads, a.heads * parts * a.dim / 32, [&](int64_t task) {
    const int64_t head = task / segments, first = task % segments * SEGMENT, n = std::min(SEGMENT, parts - first);
    const T* means = static_cast<const T*>(a.means) + b * a.means_batch + head * a.means_head + first * a.dim;
    float* scores = held.scores + head * group * parts + first;
    for (int64_t i = 0; i < group; ++i) std::memset(scores + i * parts, 0, size_t(n) * 4);
    multiply_dot(held.queries + head * group * a.dim, a.dim, means, a.dim, group, n, a.dim, scores, parts);
  });
}

// Scores of a head become exponents of what they are below the largest; 1 / their sum.
float exponents(float* scores, int64_t n) {
  float largest = scores[0];
  for (int64_t i = 1; i < n; ++i) largest = std::max(largest, scores[i]);
  vf sums = {};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    const vf e = exp_nonpositive(load(scores + i) - largest);
    store(scores + i, e);
    sums += e;
  }
  if (i < n) {
    const vf e = exp_nonpositive(load_partial(scores + i, int(n - i)) - largest);
    store_partial(scores + i, e, int(n - i));
    for (int64_t j = i; j < n; ++j) sums[0] += scores[j];
  }
  float sum = 0;
  for (int j = 0; j < VL; ++j) sum += sums[j];
  return 1.0f / sum;
}

void weigh(const ChooseBlocksArgs& a, int64_t full, const Held& held, int threads) {
  const int64_t parts = full * a.each;
  parallel_for(a.heads, threads, a.heads * parts / 4,
               [&](int64_t h) { held.shares[h] = exponents(held.scores + h * parts, parts); });
  parallel_parts(full, threads, a.heads * parts / 4, [&](int64_t begin, int64_t end) {
    std::fill(held.weights + begin, held.weights + end, 0.0f);
    for (int64_t h = 0; h < a.heads; ++h) {
      const float* scores = held.scores + h * parts;
      for (int64_t block = begin; block < end; ++block) {
        float sum = 0;
        for (int64_t i = 0; i < a.each; ++i) sum += scores[block * a.each + i];
        held.weights[block] += held.shares[h] * sum;
      }
    }
  });
}

// The `count` blocks of the most weight, the first and the newest among them, into `row`, ascending.
void choose(int64_t full, int64_t count, const Held& held, int64_t* row) {
  float* weights = held.weights;
  int32_t* order = held.order;
  weights[0] = weights[full - 1] = std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < full; ++i)
    if (std::isnan(weights[i])) weights[i] = -1.0f;  // an order needs numbers
  std::iota(order, order + full, 0);
  std::nth_element(order, order + (count - 1), order + full, [&](int32_t i, int32_t j) {
    return weights[i] > weights[j] || (weights[i] == weights[j] && i < j);
  });
  std::sort(order, order + count);
  std::copy(order, order + count, row);
}

}  // namespace

extern "C" int forebay_choose_blocks(const ChooseBlocksArgs* a, float* scratch, int64_t, int threads) {
  for (int64_t b = 0; b < a->batch; ++b)
    if (a->start[b] < 0 || a->start[b] / a->block_tokens >= a->blocks) return 1;
  const Held held(*a, scratch);
  for (int64_t b = 0; b < a->batch; ++b) {
    const int64_t full = a->start[b] / a->block_tokens;
    const int64_t wanted = std::max<int64_t>(2, int64_t(std::ceil(a->share * double(full))));
    const int64_t count = std::min(full, wanted);
    int64_t* row = a->out + a->batch + b * a->blocks;
    if (count == full) {
      std::iota(row, row + count, 0);
    } else {
      const int64_t parts = full * a->each;
      if (a->dtype == F32) score<float>(*a, b, parts, held, threads);
      else if (a->dtype == BF16) score<bf16>(*a, b, parts, held, threads);
      else score<f16>(*a, b, parts, held, threads);
      weigh(*a, full, held, threads);
      choose(full, count, held, row);
    }
    for (int64_t i = 0; i < count; ++i) row[i] += b * a->blocks;
    std::fill(row + count, row + a->blocks, -1);
    row[count] = a->begun[b];
    a->out[b] = count * a->block_tokens + a->start[b] % a->block_tokens;
  }
  return 0;
}
