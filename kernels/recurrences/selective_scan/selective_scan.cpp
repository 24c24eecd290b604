// A state of `width` numbers a channel, each with a decay of its own that every token scales by its dt (Mamba 1).
#include <algorithm>

#include "team.h"
#include "vector_math.h"

using namespace forebay;

extern "C" struct SelectiveScanArgs {
  const float *x, *dt;  // [batch, tokens, channels]
  const float* a;       // [channels, width]
  const float *b, *c;   // [batch, tokens, width]
  float* state;         // [batch, channels, width]
  const int64_t* start;
  const int64_t* count;
  float* out;  // [batch, tokens, channels]
  int64_t batch, tokens, channels, width;
  int64_t x_batch, x_token, x_channel, dt_batch, dt_token, dt_channel, out_batch, out_token, out_channel;
  int64_t b_batch, b_token, c_batch, c_token;
};

namespace {

constexpr int64_t BLOCK = 16;  // channels of a task: a cache line of each token

// `n` numbers of the state of a channel, from `from` on, over all tokens; results are added to those of the numbers
// before them.
template <int NV> void numbers_of(const SelectiveScanArgs& s, int64_t b, int64_t channel, int64_t from, int n) {
  const int64_t count = std::min(std::max<int64_t>(s.count[b], 0), s.tokens);
  const auto read = [&](const float* p, int i) {
    const int left = n - i * VL;
    return left >= VL ? load(p + i * VL) : load_partial(p + i * VL, std::max(0, left));
  };
  float* state = s.state + (b * s.channels + channel) * s.width + from;
  vf held[NV], a[NV];
  FB_UNROLL for (int i = 0; i < NV; ++i) {
    held[i] = s.start[b] ? read(state, i) : vf{};
    a[i] = read(s.a + channel * s.width + from, i);
  }
  const float* x = s.x + b * s.x_batch + channel * s.x_channel;
  const float* dt = s.dt + b * s.dt_batch + channel * s.dt_channel;
  float* out = s.out + b * s.out_batch + channel * s.out_channel;
  for (int64_t t = 0; t < count; ++t) {
    const float by = dt[t * s.dt_token], given = by * x[t * s.x_token];
    const float *bt = s.b + b * s.b_batch + t * s.b_token + from, *ct = s.c + b * s.c_batch + t * s.c_token + from;
    vf sum = {};
    FB_UNROLL for (int i = 0; i < NV; ++i) {
      held[i] = exp_nonpositive(by * a[i]) * held[i] + given * read(bt, i);
      sum += held[i] * read(ct, i);
    }
    out[t * s.out_token] = (from ? out[t * s.out_token] : 0.0f) + lane_sum(sum);
  }
  for (int64_t t = count; t < s.tokens; ++t) out[t * s.out_token] = 0.0f;
  FB_UNROLL for (int i = 0; i < NV; ++i) {
    const int left = n - i * VL;
    if (left >= VL) store(state + i * VL, held[i]);
    else if (left > 0) store_partial(state + i * VL, held[i], left);
  }
}

}  // namespace

// Needs b and c dense in their last dimension, and a dense state and a.
extern "C" int forebay_selective_scan(const SelectiveScanArgs* s, float*, int64_t, int threads) {
  const int64_t blocks = (s->channels + BLOCK - 1) / BLOCK, numbers = s->batch * s->channels * s->width;
  parallel_for(s->batch * blocks, threads, numbers * (s->tokens + 1) / 4, [&](int64_t i) {
    const int64_t first = i % blocks * BLOCK, last = std::min(s->channels, first + BLOCK);
    for (int64_t channel = first; channel < last; ++channel)
      for (int64_t from = 0; from < s->width; from += 4 * VL) {
        const int n = int(std::min<int64_t>(4 * VL, s->width - from));
        if (n > 2 * VL) numbers_of<4>(*s, i / blocks, channel, from, n);
        else if (n > VL) numbers_of<2>(*s, i / blocks, channel, from, n);
        else numbers_of<1>(*s, i / blocks, channel, from, n);
      }
  });
  return 0;
}
