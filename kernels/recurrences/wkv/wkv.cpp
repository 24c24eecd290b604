// Two sums a channel, which every token decays and adds to, both divided by the exponential of a number kept with them.
#include <algorithm>

#include "team.h"
#include "vector_math.h"

using namespace forebay;

extern "C" struct WkvArgs {
  const float *k, *v;  // [batch, tokens, channels]
  const float *log_decay, *bonus;  // [channels]
  float* state;  // [batch, 3, channels]
  const int64_t* start;
  const int64_t* count;
  float* out;  // [batch, tokens, channels]
  int64_t batch, tokens, channels, k_batch, k_token, v_batch, v_token, out_batch, out_token;
};

namespace {

constexpr int64_t BLOCK = 64;   // channels of a task
constexpr int64_t AHEAD = 256;  // between channels in use and those whose lines are called in

struct Sums { vf above, below, exponent; };

// The sums with a token of the exponent `key` added, by the larger of both exponents: one of the two factors is 1.
FB_INLINE Sums with_token(const Sums& s, vf key, vf value) {
  const vf ahead = key - s.exponent, less = exp_nonpositive(-absolute(ahead)), one = vf{} + 1.0f;
  const vf old = ahead > 0.0f ? less : one, fresh = ahead > 0.0f ? one : less;
  return {old * s.above + fresh * value, old * s.below + fresh, ahead > 0.0f ? key : s.exponent};
}

template <bool WHOLE> void channels_of(const WkvArgs& a, int64_t b, int64_t c, int n) {
  const auto read = [&](const float* p) { return WHOLE ? load(p) : load_partial(p, n); };
  const auto put = [&](float* p, vf v) {
    if (WHOLE) store(p, v);
    else store_partial(p, v, n);
  };
  const int64_t count = std::min(std::max<int64_t>(a.count[b], 0), a.tokens);
  float *state = a.state + b * 3 * a.channels + c, *out = a.out + b * a.out_batch + c;
  const vf decay = read(a.log_decay + c), bonus = read(a.bonus + c);
  Sums s = {vf{}, vf{}, vf{} - 1e38f};
  if (a.start[b]) s = {read(state), read(state + a.channels), read(state + 2 * a.channels)};
  for (int64_t t = 0; t < count; ++t) {
    const vf k = read(a.k + b * a.k_batch + t * a.k_token + c), v = read(a.v + b * a.v_batch + t * a.v_token + c);
    const Sums seen = with_token(s, k + bonus, v);
    put(out + t * a.out_token, seen.above * inverse(seen.below));
    s = with_token({s.above, s.below, s.exponent + decay}, k, v);
  }
  const int64_t later = AHEAD + (c + AHEAD < a.channels ? 0 : 2 * a.channels);  // or the next sequence's
  for (int row = 0; row < 3; ++row) __builtin_prefetch(state + row * a.channels + later, 0, 2);
  __builtin_prefetch(a.k + b * a.k_batch + c + AHEAD, 0, 2);
  __builtin_prefetch(a.v + b * a.v_batch + c + AHEAD, 0, 2);
  __builtin_prefetch(out + AHEAD, 1, 2);
  for (int64_t t = count; t < a.tokens; ++t) put(out + t * a.out_token, vf{});
  put(state, s.above);
  put(state + a.channels, s.below);
  put(state + 2 * a.channels, s.exponent);
}

}  // namespace

// Needs contiguous channels, and all else dense.
extern "C" int forebay_wkv(const WkvArgs* a, float*, int64_t, int threads) {
  const int64_t blocks = (a->channels + BLOCK - 1) / BLOCK;
  parallel_for(a->batch * blocks, threads, a->batch * a->channels * (a->tokens + 1) * 2, [&](int64_t i) {
    const int64_t b = i / blocks, end = std::min(a->channels, (i % blocks + 1) * BLOCK);
    int64_t c = i % blocks * BLOCK;
    for (; c + VL <= end; c += VL) channels_of<true>(*a, b, c, VL);
    if (c < end) channels_of<false>(*a, b, c, int(end - c));
  });
  return 0;
}
