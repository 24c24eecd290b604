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

constexpr int64_t DECAYS = 1 << 17;  // numbers of `a` that a task meets all its sequences with: a part of L2
constexpr int64_t AHEAD = 1536;      // numbers of the state between one that is used and one that is called in
constexpr int64_t SOON = 256;        // and of `a`, from L2

// 2^(scale * a), at most 1; below 2^-125 the result is 0.
FB_INLINE vf decay_of(float scale, vf a) {
  const vf shifted = scale * a + EXP_MAGIC;
  const vf y = exp2_parts(scale * a - (shifted - EXP_MAGIC), shifted);
  return shifted < EXP_MAGIC - 125.0f ? vf{} : y;
}

// Vector i of a row of n numbers, of which the last vector may have fewer than VL: its other lanes are 0.
template <bool WHOLE> FB_INLINE vf read(const float* row, int i, int n) {
  if (WHOLE) return load(row + i * VL);
  const int left = std::clamp(n - i * VL, 0, VL);
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_loadu_ps(__mmask16((1u << left) - 1), row + i * VL);
#else
  return left == VL ? load(row + i * VL) : load_partial(row + i * VL, left);
#endif
}
template <bool WHOLE> FB_INLINE void write(float* row, int i, int n, vf v) {
  const int left = WHOLE ? VL : std::clamp(n - i * VL, 0, VL);
  if (left == VL) return store(row + i * VL, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(row + i * VL, __mmask16((1u << left) - 1), (__m512)v);
#else
  store_partial(row + i * VL, v, left);
#endif
}

// v, and 0 from lane n on: a token that is not finite is seen there too.
FB_INLINE vf within(vf v, int n) {
  for (int i = std::max(0, n); i < VL; ++i) v[i] = 0.0f;
  return v;
}

// Channels [first, first + most) of a sequence, at most VL, and numbers [from, from + wide) of their states. Results are
// added to those of the numbers before these. WHOLE: `most` is VL, and wide NV vectors.
template <int NV, bool WHOLE>
void numbers_of(const SelectiveScanArgs& s, int64_t b, int64_t first, int most, int64_t from, int wide) {
  const int n = WHOLE ? VL : most;
  const int64_t count = std::min(std::max<int64_t>(s.count[b], 0), s.tokens);
  const float* a = s.a + first * s.width + from;
  float* state = s.state + (b * s.channels + first) * s.width + from;
  const float* x = s.x + b * s.x_batch + first * s.x_channel;
  const float* dt = s.dt + b * s.dt_batch + first * s.dt_channel;
  float* out = s.out + b * s.out_batch + first * s.out_channel;
  const int64_t later = AHEAD / s.width;  // channels
  __builtin_prefetch(x + later * s.x_channel, 0, 2);
  __builtin_prefetch(dt + later * s.dt_channel, 0, 2);
  __builtin_prefetch(out + later * s.out_channel, 1, 2);
  if (!s.start[b])
    for (int i = 0; i < n; ++i) std::fill_n(state + i * s.width, wide, 0.0f);
  for (int64_t t = 0; t < count; ++t) {
    const float *bt = s.b + b * s.b_batch + t * s.b_token + from, *ct = s.c + b * s.c_batch + t * s.c_token + from;
    vf by_b[NV], by_c[NV], sums[VL];
    for (int j = n; j < VL; ++j) sums[j] = vf{};
    FB_UNROLL for (int i = 0; i < NV; ++i) by_b[i] = read<WHOLE>(bt, i, wide), by_c[i] = read<WHOLE>(ct, i, wide);
    alignas(64) float scale[VL], given[VL];
    const float *xt = x + t * s.x_token, *dtt = dt + t * s.dt_token;
    if (n == VL && s.x_channel == 1 && s.dt_channel == 1) {
      store(scale, load(dtt) * LOG2_E), store(given, load(dtt) * load(xt));
    } else {
      for (int j = 0; j < n; ++j) {
        scale[j] = dtt[j * s.dt_channel] * LOG2_E;
        given[j] = dtt[j * s.dt_channel] * xt[j * s.x_channel];
      }
    }
    for (int j = 0; j < n; ++j) {
      float* held = state + j * s.width;
      vf sum = {};
      FB_UNROLL for (int i = 0; i < NV; ++i) {
        vf rate = read<WHOLE>(a + j * s.width, i, wide);
        keep(rate);
        const vf decay = decay_of(scale[j], rate);
        const vf now = decay * read<WHOLE>(held, i, wide) + given[j] * by_b[i];
        write<WHOLE>(held, i, wide, now);
        sum += WHOLE ? now * by_c[i] : within(now * by_c[i], wide - i * VL);
        __builtin_prefetch(a + j * s.width + i * VL + SOON, 0, 3);
        __builtin_prefetch(held + i * VL + AHEAD, 0, 2);
      }
      sums[j] = sum;
    }
    const vf sum = lane_sums(sums);
    float* to = out + t * s.out_token;
    if (n == VL && s.out_channel == 1 && !from) {
      store(to, sum);
      continue;
    }
    for (int j = 0; j < n; ++j) to[j * s.out_channel] = (from ? to[j * s.out_channel] : 0.0f) + sum[j];
  }
  for (int64_t t = count; t < s.tokens; ++t)
    for (int j = 0; j < n; ++j) out[t * s.out_token + j * s.out_channel] = 0.0f;
}

template <int NV> void row_of(const SelectiveScanArgs& s, int64_t b, int64_t first, int n, int64_t from, int numbers) {
  if (numbers == NV * VL && n == VL) numbers_of<NV, true>(s, b, first, n, from, numbers);
  else numbers_of<NV, false>(s, b, first, n, from, numbers);
}

}  // namespace

// Needs b and c dense in their last dimension, and a dense state and a.
extern "C" int forebay_selective_scan(const SelectiveScanArgs* s, float*, int64_t, int threads) {
  const int64_t numbers = s->batch * s->channels * s->width, wanted = 4 * threads;
  if (!numbers) return 0;
  const int64_t cut = (wanted + s->batch - 1) / s->batch, most = std::max<int64_t>(1, DECAYS / VL / s->width);
  const int64_t span = std::min(most, (s->channels + cut * VL - 1) / (cut * VL)) * VL;
  const int64_t spans = (s->channels + span - 1) / span, runs = std::min(s->batch, (wanted + spans - 1) / spans);
  parallel_for(runs * spans, threads, numbers * (s->tokens + 1) / 8, [&](int64_t task) {
    const int64_t begin = task % spans * span, end = std::min(s->channels, begin + span), run = task / spans;
    for (int64_t b = s->batch * run / runs; b < s->batch * (run + 1) / runs; ++b)
      for (int64_t first = begin; first < end; first += VL)
        for (int64_t from = 0; from < s->width; from += 4 * VL) {
          const int left = int(std::min<int64_t>(4 * VL, s->width - from)), n = int(std::min<int64_t>(VL, end - first));
          if (left > 2 * VL) row_of<4>(*s, b, first, n, from, left);
          else if (left > VL) row_of<2>(*s, b, first, n, from, left);
          else row_of<1>(*s, b, first, n, from, left);
        }
  });
  return 0;
}
