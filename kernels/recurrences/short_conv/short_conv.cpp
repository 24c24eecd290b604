// A causal convolution of a few taps along the tokens, a channel at a time, behind the rows that a sequence keeps.
#include <algorithm>
#include <type_traits>

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

constexpr int TAPS = 16;             // whose weights stay in registers or near; more are read again
constexpr int64_t BLOCK = 64;        // channels of a task
constexpr int64_t APART = 16;        // between rows of turned weights, which else would share sets of L1
constexpr int64_t TURNED = (1 << 15) + TAPS * APART;  // weights of a task of single tokens: a small part of L2
constexpr int64_t AHEAD = 1024;      // bytes of a row between those in use and those that are called in

template <class T> using Raw = std::conditional_t<sizeof(T) == 4, vf, vh>;

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

// The weights of VL channels, a vector of each tap, TAPS at most. Lanes of KNOWN taps, if not 0, are picked from one
// vector after another.
template <class T, int KNOWN> FB_INLINE void turned_taps(const T* weight, int64_t taps, vf* to) {
  if constexpr (KNOWN == 0) {
    for (int64_t j = 0; j < std::min<int64_t>(taps, TAPS); ++j)
      for (int i = 0; i < VL; ++i) to[j][i] = load_one(weight + i * taps + j);
  } else {
    vf w[KNOWN];
    FB_UNROLL for (int j = 0; j < KNOWN; ++j) w[j] = load(weight + j * VL);
    FB_UNROLL for (int j = 0; j < KNOWN; ++j) {
      to[j] = w[0];
      FB_UNROLL for (int from = 0; from < KNOWN; ++from) {
        vi lanes;
        for (int i = 0; i < VL; ++i) {
          const int at = i * KNOWN + j;
          lanes[i] = at / VL == from ? VL + at % VL : i;
        }
        to[j] = __builtin_shuffle(to[j], w[from], lanes);
      }
    }
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
  if constexpr (WHOLE) turned_taps<T, KNOWN>(weight, taps, w);
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

// As `rounded` and `store_whole`, and faster where an instruction rounds to bf16. That takes subnormal numbers for 0.
template <class T> FB_INLINE vf narrowed(const T* type, vf v) { return rounded(type, v); }
template <class T> FB_INLINE void narrow(T* to, vf v) { store_whole(to, v); }
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
FB_INLINE bool any_subnormal(vf v) { return __builtin_expect(_mm512_fpclass_ps_mask((__m512)v, 0x20), 0); }
FB_INLINE vf narrowed(const bf16* type, vf v) {
  if (any_subnormal(v)) return rounded(type, v);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
}
FB_INLINE void narrow(bf16* to, vf v) {
  if (any_subnormal(v)) return store_whole(to, v);
  const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &h, sizeof h);
}
#endif

// A row of each tap: those of the state from `state` on, and `x`. What a vector of channels reads is read before it
// writes, as rows may lie whole pages apart, where processors take one for another.
template <class T, int KNOWN>
FB_INLINE void one_vector(int64_t taps, int64_t channels, bool activation, const float* weights, int64_t stride,
                          const T* bias, const T* x, T* state, T* out) {
  Raw<T> row[KNOWN ? KNOWN : TAPS];
  FB_UNROLL for (int64_t j = 0; j < taps; ++j)
    std::memcpy(&row[j], j + 1 < taps ? state + j * channels : x, sizeof row[0]);
  vf sum = bias ? load(bias) : vf{};
  FB_UNROLL for (int64_t j = 0; j < taps; ++j)
    sum += load(reinterpret_cast<const T*>(&row[j])) * load(weights + j * stride);
  FB_UNROLL for (int64_t j = 1; j < taps; ++j) std::memcpy(state + (j - 1) * channels, &row[j], sizeof row[0]);
  if (activation) sum = activate(SILU, narrowed(out, sum));
  narrow(out, sum);
}

// One token of each of sequences [b0, b1) over channels [c0, c1), whole vectors: their weights are turned once. Rows
// are walked as far as can be, as processors look ahead in them. Sequences that begin or end are left to `others`.
template <class T, int KNOWN, class F>
void one_token(const ShortConvArgs& a, int64_t b0, int64_t b1, int64_t c0, int64_t c1, const F& others) {
  constexpr int64_t LINE = 64 / sizeof(T), LATER = AHEAD / sizeof(T);
  alignas(64) float turned[TURNED];
  const int64_t taps = KNOWN ? KNOWN : a.taps, stride = c1 - c0 + APART;
  for (int64_t c = c0; c < c1; c += VL) {
    vf w[KNOWN ? KNOWN : TAPS];
    turned_taps<T, KNOWN>(static_cast<const T*>(a.weight) + c * taps, taps, w);
    FB_UNROLL for (int64_t j = 0; j < taps; ++j) store(turned + j * stride + c - c0, w[j]);
  }
  const T* bias = static_cast<const T*>(a.bias);
  const int64_t channels = a.channels;
  const bool activation = a.activation;
  for (int64_t b = b0; b < b1; ++b) {
    if (a.count[b] < 1 || a.start[b] == 0) {
      others(b);
      continue;
    }
    const T* x = static_cast<const T*>(a.x) + b * a.x_batch;
    T* state = static_cast<T*>(a.state) + b * (taps - 1) * a.channels;
    T* out = static_cast<T*>(a.out) + b * a.out_batch;
    const auto vector_at = [&](int64_t c) {
      one_vector<T, KNOWN>(taps, channels, activation, turned + c - c0, stride, bias ? bias + c : nullptr, x + c,
                           state + c, out + c);
    };
    int64_t c = c0;
    for (; c + LINE <= c1; c += LINE) {
      const bool next = c + LATER >= c1;  // the lines wanted then are the next sequence's
      const int64_t l = next ? std::min(c + LATER - (c1 - c0), c1) : c + LATER;
      const T* kept = state + (next ? (taps - 1) * channels : 0) + l;
      FB_UNROLL for (int64_t j = 0; j + 1 < taps; ++j) __builtin_prefetch(kept + j * channels, 0, 2);
      __builtin_prefetch(x + (next ? a.x_batch : 0) + l, 0, 2);
      __builtin_prefetch(out + (next ? a.out_batch : 0) + l, 1, 2);
      FB_UNROLL for (int i = 0; i < LINE; i += VL) vector_at(c + i);
    }
    for (; c < c1; c += VL) vector_at(c);
  }
}

template <class T> void channels_between(const ShortConvArgs& a, int64_t b, int64_t c, int64_t end) {
  const auto whole = [&](auto taps) {
    for (; c + VL <= end; c += VL) channels_of<T, true, decltype(taps)::value>(a, b, c, VL);
  };
  switch (a.taps) {
    case 2: whole(std::integral_constant<int, 2>{}); break;
    case 3: whole(std::integral_constant<int, 3>{}); break;
    case 4: whole(std::integral_constant<int, 4>{}); break;
    default: whole(std::integral_constant<int, 0>{});
  }
  if (c < end) channels_of<T, false, 0>(a, b, c, int(end - c));
}

template <class T, int KNOWN> void short_steps(const ShortConvArgs& a, int threads) {
  if (!a.batch || !a.channels) return;
  const int64_t most = (TURNED / (KNOWN ? KNOWN : a.taps) - APART) / BLOCK * BLOCK, wanted = 4 * threads;
  const int64_t cut = (wanted + a.batch - 1) / a.batch, part = (a.channels + cut - 1) / cut;
  const int64_t fit = (a.channels + most - 1) / most, even = (a.channels + fit - 1) / fit;  // no span of a few channels
  const int64_t span = std::max<int64_t>(1, (std::min(part, even) + BLOCK - 1) / BLOCK) * BLOCK;
  const int64_t spans = (a.channels + span - 1) / span;
  const int64_t runs = threads > 1 ? std::min(a.batch, wanted / spans + 1) : 1;  // each turns the weights
  parallel_for(runs * spans, threads, a.batch * a.channels * a.taps / 4, [&](int64_t i) {
    const int64_t run = i / spans, c0 = i % spans * span, end = std::min(a.channels, c0 + span);
    const int64_t b0 = a.batch * run / runs, b1 = a.batch * (run + 1) / runs, c1 = end - (end - c0) % VL;
    one_token<T, KNOWN>(a, b0, b1, c0, c1, [&](int64_t b) { channels_between<T>(a, b, c0, c1); });
    for (int64_t b = b0; b < b1 && c1 < end; ++b) channels_between<T>(a, b, c1, end);
  });
}

template <class T> void short_conv(const ShortConvArgs& a, int threads) {
  if (a.tokens == 1 && a.taps <= TAPS) {
    switch (a.taps) {
      case 2: return short_steps<T, 2>(a, threads);
      case 3: return short_steps<T, 3>(a, threads);
      case 4: return short_steps<T, 4>(a, threads);
      default: return short_steps<T, 0>(a, threads);
    }
  }
  const int64_t blocks = (a.channels + BLOCK - 1) / BLOCK;
  parallel_for(a.batch * blocks, threads, a.batch * a.channels * (a.tokens + 2) * a.taps / 8, [&](int64_t i) {
    channels_between<T>(a, i / blocks, i % blocks * BLOCK, std::min(a.channels, (i % blocks + 1) * BLOCK));
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
