// A causal convolution of a few taps along the tokens, a channel at a time, behind the rows that a sequence keeps.
#include <algorithm>

#include "team.h"
#include "vector_math.h"

using namespace forebay;

extern "C" struct ShortConvArgs {
  const void* x;       // [batch, tokens, channels]
  const void* weight;  // [channels, taps]
  const void* bias;    // [channels] or null
  void* state;         // [batch, taps - 1, channels]
  const int64_t* start;
  const int64_t* count;
  void* out;           // [batch, tokens, channels]
  int64_t batch, tokens, channels, taps, x_batch, x_token, out_batch, out_token;
  int32_t dtype, activation;
};

namespace {

constexpr int TAPS = 16;       // whose weights stay in registers or near; more are read again
constexpr int64_t BLOCK = 64;  // channels of a task

// The row of inputs `at` tokens behind the first, of the state where it is negative; null for a row of zeros.
template <class T> struct Rows {
  const T* x;
  int64_t x_token;
  const T* state;
  int64_t channels, kept;
  bool begins;
  const T* operator()(int64_t at) const {
    if (at >= 0) return x + at * x_token;
    return begins ? nullptr : state + (kept + at) * channels;
  }
};

template <class T, bool WHOLE> FB_INLINE vf read(const T* p, int n) { return WHOLE ? load(p) : load_partial(p, n); }

// The weights of VL channels of 4 taps each, a vector of every tap: two by two from the first and the second half of
// the channels, then from both.
template <class T> FB_INLINE void four_taps(const T* weight, vf (&to)[TAPS]) {
  vi at[2], halves[2];
  for (int i = 0; i < VL; ++i)
    for (int second = 0; second < 2; ++second) {
      at[second][i] = i % (VL / 2) * 4 + 2 * second + i / (VL / 2);
      halves[second][i] = i % (VL / 2) + second * (VL / 2) + i / (VL / 2) * VL;
    }
  const vf w[4] = {load(weight), load(weight + VL), load(weight + 2 * VL), load(weight + 3 * VL)};
  for (int second = 0; second < 2; ++second) {
    const vf low = __builtin_shuffle(w[0], w[1], at[second]), high = __builtin_shuffle(w[2], w[3], at[second]);
    to[2 * second] = __builtin_shuffle(low, high, halves[0]);
    to[2 * second + 1] = __builtin_shuffle(low, high, halves[1]);
  }
}

// KNOWN: how many taps there are, or 0.
template <class T, bool WHOLE, int KNOWN> void channels_of(const ShortConvArgs& a, int64_t b, int64_t c, int n) {
  const int64_t taps = KNOWN ? KNOWN : a.taps, count = std::min(std::max<int64_t>(a.count[b], 0), a.tokens);
  const T* weight = static_cast<const T*>(a.weight) + c * taps;
  T* state = static_cast<T*>(a.state) + b * (taps - 1) * a.channels + c;
  T* out = static_cast<T*>(a.out) + b * a.out_batch + c;
  const Rows<T> rows{static_cast<const T*>(a.x) + b * a.x_batch + c, a.x_token, state, a.channels, taps - 1,
                     a.start[b] == 0};
  const auto weights = [&](int64_t j) {
    vf v = {};
    for (int i = 0; i < n; ++i) v[i] = load_one(weight + i * taps + j);
    return v;
  };
  vf w[TAPS];
  if (WHOLE && KNOWN == 4) four_taps(weight, w);
  else
    for (int64_t j = 0; j < std::min<int64_t>(taps, TAPS); ++j) w[j] = weights(j);
  const vf bias = a.bias ? read<T, WHOLE>(static_cast<const T*>(a.bias) + c, n) : vf{};
  const auto put = [&](T* to, vf v) {
    if (WHOLE) store_whole(to, v);
    else store_partial(to, v, n);
  };
  for (int64_t t = 0; t < count; ++t) {
    vf sum = bias;
    for (int64_t j = 0; j < taps; ++j)
      if (const T* row = rows(t - taps + 1 + j)) sum += read<T, WHOLE>(row, n) * (j < TAPS ? w[j] : weights(j));
    if (a.activation) sum = activate(SILU, rounded(out, sum));
    put(out + t * a.out_token, sum);
  }
  for (int64_t t = count; t < a.tokens; ++t) put(out + t * a.out_token, vf{});
  // the last rows of what counts; row r is made of one that is not before it
  for (int64_t r = 0; r + 1 < taps; ++r) {
    const T* row = rows(count - taps + 1 + r);
    put(state + r * a.channels, row ? read<T, WHOLE>(row, n) : vf{});
  }
}

template <class T> void short_conv(const ShortConvArgs& a, int threads) {
  const int64_t blocks = (a.channels + BLOCK - 1) / BLOCK;
  parallel_for(a.batch * blocks, threads, a.batch * a.channels * (a.tokens + 2) * a.taps / 8, [&](int64_t i) {
    const int64_t b = i / blocks, end = std::min(a.channels, (i % blocks + 1) * BLOCK);
    int64_t c = i % blocks * BLOCK;
    for (; c + VL <= end && a.taps == 4; c += VL) channels_of<T, true, 4>(a, b, c, VL);
    for (; c + VL <= end; c += VL) channels_of<T, true, 0>(a, b, c, VL);
    if (c < end) channels_of<T, false, 0>(a, b, c, int(end - c));
  });
}

}  // namespace

// Needs contiguous channels in x and out, and all else dense.
extern "C" int forebay_short_conv(const ShortConvArgs* a, float*, int64_t, int threads) {
  if (a->dtype == F32) short_conv<float>(*a, threads);
  else if (a->dtype == BF16) short_conv<bf16>(*a, threads);
  else short_conv<f16>(*a, threads);
  return 0;
}
