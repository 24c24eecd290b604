// Each token's products with the few experts that its router chose: out[t] += w[t, k] * down_e(act(up_e(x[t]))), e being
// index[t, k]. Rows of x are gathered by expert, in blocks; each block meets its expert's matrices by the kernels of
// single products. Experts are taken by their number, so that sums do not depend on where their weights lie; launches over
// some of them in any order keep `results`, which the last of them adds up.
#include <algorithm>

#include "product_args.h"
#include "team.h"
#include "vector_math.h"

using namespace forebay;

extern "C" struct ExpertsMatrix {
  int64_t row;          // elements, or bytes of packed rows
  int64_t bits, group;  // 0 bits: weights as they are
  int32_t scale_dtype, symmetric, codebook, integer_nbytes, bf16_panels;
  int32_t transposed;   // [in_features, out_features], of weights as they are
};

extern "C" struct ExpertsArgs {
  const void* x;           // [tokens, hidden]
  const int64_t* index;    // [tokens, picks]
  const void* weights;     // [tokens, picks]
  const uint8_t* up;       // [entries, units, hidden], or [entries, hidden, units] where transposed
  const char* up_bias;     // [entries, units], may be null
  const uint8_t* down;     // [entries, hidden, inner], or [entries, inner, hidden] where it is
  const char* down_bias;   // [entries, hidden], may be null
  const int64_t* entries;  // [experts]: which entry an expert has, below 0 for none; null: its number less `first`
  void* out;               // [tokens, hidden]
  float* results;          // [tokens * picks, hidden]: where what each pick gives is kept, not added up; may be null
  int64_t tokens, picks, experts, entry_count, first, hidden, units, inner;
  int64_t x_stride, out_stride;
  int64_t up_entry, up_bias_entry, down_entry, down_bias_entry;  // bytes from one expert's to the next one's
  int64_t block;                                       // rows of x that scratch has room for
  ExpertsMatrix up_how, down_how;
  int32_t x_dtype, weights_dtype, out_dtype;  // of x, biases and weights that are not packed; of the picks'; of out
  int32_t activation, gated, interleaved, scales_input, accumulate;
  int32_t last;  // all picks have their results then, which are added up
  float alpha, limit;
};

namespace {

enum More : int32_t { RELU2 = 5, ALPHA_SWIGLU = 6 };  // beside those of vector_math.h

constexpr int64_t itemsize(int32_t dtype) { return dtype == F32 ? 4 : 2; }

float value_at(const void* p, int32_t dtype, int64_t i) {
  if (dtype == F32) return load_one(static_cast<const float*>(p) + i);
  if (dtype == BF16) return load_one(static_cast<const bf16*>(p) + i);
  return load_one(static_cast<const f16*>(p) + i);
}

FB_INLINE vf act(const ExpertsArgs& a, vf x) {
  if (a.activation == RELU2) { const vf y = x < 0.0f ? vf{} : x; return y * y; }
  return activate(a.activation, x);
}

// act(g) * u, each rounded to T, of g of at most `limit` and u of at most that magnitude, if there is one; or gpt-oss's
// (u + 1) * g * sigmoid(alpha * g).
template <class T> FB_INLINE vf gated(const ExpertsArgs& a, vf g, vf u) {
  const T* type = nullptr;
  if (a.limit > 0.0f) {
    g = g > a.limit ? vf{} + a.limit : g;
    u = u > a.limit ? vf{} + a.limit : u < -a.limit ? vf{} - a.limit : u;
  }
  if (a.activation != ALPHA_SWIGLU) return rounded(type, act(a, g)) * u;
  const vf z = rounded(type, a.alpha * g), e = exp_nonpositive(-absolute(z));
  const vf sigmoid = (z < 0.0f ? e : vf{} + 1.0f) / (1.0f + e);
  return rounded(type, u + 1.0f) * rounded(type, g * rounded(type, sigmoid));
}

template <class T> void activate_row(const ExpertsArgs& a, const T* y, T* to) {
  for (int64_t i = 0; i < a.inner; i += VL) {
    const int n = int(std::min<int64_t>(VL, a.inner - i));
    vf v;
    if (!a.gated) {
      v = act(a, load_partial(y + i, n));
    } else if (a.interleaved) {
      vf g = {}, u = {};
      for (int j = 0; j < n; ++j) { g[j] = load_one(y + 2 * (i + j)); u[j] = load_one(y + 2 * (i + j) + 1); }
      v = gated<T>(a, g, u);
    } else if (n == VL) {
      v = gated<T>(a, load(y + i), load(y + a.inner + i));
    } else {
      v = gated<T>(a, load_partial(y + i, n), load_partial(y + a.inner + i, n));
    }
    if (n == VL) store_whole(to + i, v);
    else store_partial(to + i, v, n);
  }
}

template <class T> void scale_row(const T* x, float by, T* to, int64_t n) {
  const T* type = nullptr;
  for (int64_t i = 0; i < n; i += VL) {
    const int m = int(std::min<int64_t>(VL, n - i));
    store_partial(to + i, load_partial(x + i, m) * rounded(type, vf{} + by), m);
  }
}

// One product of m rows with an expert's matrix.
int product(const ExpertsArgs& a, const ExpertsMatrix& how, const void* x, const uint8_t* w, const void* bias,
            void* out, int32_t out_dtype, int64_t m, int64_t n, int64_t k, float* scratch, int64_t floats,
            int threads) {
  if (how.bits) {
    QuantizedLinearArgs q = {x, w, bias, nullptr, nullptr, out, m, n, k, k, how.row, 0, 0, n, how.group};
    q.bits = int32_t(how.bits), q.scale_dtype = how.scale_dtype, q.x_dtype = a.x_dtype, q.bias_dtype = a.x_dtype;
    q.out_dtype = out_dtype, q.integer_nbytes = how.integer_nbytes, q.symmetric = how.symmetric;
    q.bf16_panels = how.bf16_panels, q.codebook = how.codebook;
    return forebay_linear_q(&q, scratch, floats, threads);
  }
  LinearArgs p = {x, w, bias, nullptr, nullptr, out, m, n, k, k, how.row, 0, 0, n, a.x_dtype, a.x_dtype, a.x_dtype};
  p.out_dtype = out_dtype, p.conv1d = how.transposed;
  return forebay_linear(&p, scratch, floats, threads);
}

struct Pick { int32_t token, pick; };

// Scratch of one call, in this order; what is left is the products'.
struct Scratch {
  float* sums;     // [tokens, hidden], where out is not fp32
  int32_t* ends;   // [experts + 1]: of each expert's picks in `order`
  Pick* order;     // [tokens * picks]
  char *rows, *wide, *narrow;  // of a block: x, what up gives, what down is given
  float* made;                 // and what down gives
  float* rest;
};

char* take(char*& at, int64_t nbytes) {
  char* found = at;
  at += (nbytes + 63) / 64 * 64;
  return found;
}

Scratch parts(const ExpertsArgs& a, float* scratch) {
  char* at = reinterpret_cast<char*>(scratch);
  const int64_t size = itemsize(a.x_dtype);
  Scratch s;
  s.sums = reinterpret_cast<float*>(take(at, a.out_dtype == F32 ? 0 : a.tokens * a.hidden * 4));
  s.ends = reinterpret_cast<int32_t*>(take(at, (a.experts + 1) * 4));
  s.order = reinterpret_cast<Pick*>(take(at, a.tokens * a.picks * int64_t(sizeof(Pick))));
  s.rows = take(at, a.block * a.hidden * size);
  s.wide = take(at, a.block * a.units * size);
  s.narrow = take(at, a.block * a.inner * size);
  s.made = reinterpret_cast<float*>(take(at, a.block * a.hidden * 4));
  s.rest = reinterpret_cast<float*>(at);
  return s;
}

int64_t entry_of(const ExpertsArgs& a, int64_t expert) {
  if (expert < 0 || expert >= a.experts) return -1;
  const int64_t entry = a.entries ? a.entries[expert] : expert - a.first;
  return entry < a.entry_count ? entry : -1;
}

// Sort picks by expert: those of expert e are order[ends[e], ends[e + 1]) in the order of tokens.
void sort_picks(const ExpertsArgs& a, Scratch& s) {
  std::fill(s.ends, s.ends + a.experts + 1, 0);
  const int64_t count = a.tokens * a.picks;
  for (int64_t i = 0; i < count; ++i)
    if (entry_of(a, a.index[i]) >= 0) ++s.ends[a.index[i] + 1];
  for (int64_t e = 0; e < a.experts; ++e) s.ends[e + 1] += s.ends[e];
  const int32_t total = s.ends[a.experts];
  for (int64_t i = count - 1; i >= 0; --i)  // from the back: ends[e + 1] counts down to where e begins
    if (entry_of(a, a.index[i]) >= 0) s.order[--s.ends[a.index[i] + 1]] = {int32_t(i / a.picks), int32_t(i % a.picks)};
  for (int64_t e = 0; e < a.experts; ++e) s.ends[e] = s.ends[e + 1];
  s.ends[a.experts] = total;
}

// Add what a pick gives to the sums of its token.
void add_result(const ExpertsArgs& a, int64_t pick, const float* y, float* to) {
  const vf by = vf{} + (a.scales_input ? 1.0f : value_at(a.weights, a.weights_dtype, pick));
  int64_t j = 0;
  for (; j + VL <= a.hidden; j += VL) store(to + j, load(to + j) + by * load(y + j));
  for (; j < a.hidden; ++j) to[j] += by[0] * y[j];
}

// Add the results of a token's picks in ascending order of their experts.
void add_results(const ExpertsArgs& a, int64_t token, float* to) {
  const int64_t* index = a.index + token * a.picks;
  for (int64_t before = -1, next; ; before = index[next]) {
    next = -1;
    for (int64_t k = 0; k < a.picks; ++k)
      if (index[k] > before && index[k] < a.experts && (next < 0 || index[k] < index[next])) next = k;
    if (next < 0) return;
    add_result(a, token * a.picks + next, a.results + (token * a.picks + next) * a.hidden, to);
  }
}

template <class T>
int run_block(const ExpertsArgs& a, Scratch& s, const Pick* picks, int64_t m, int64_t entry, float* sums,
              int64_t sums_stride, int64_t floats, int threads) {
  T *rows = reinterpret_cast<T*>(s.rows), *wide = reinterpret_cast<T*>(s.wide), *narrow = reinterpret_cast<T*>(s.narrow);
  parallel_for(m, threads, m * a.hidden / 8, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + picks[i].token * a.x_stride;
    if (a.scales_input)
      scale_row(x, value_at(a.weights, a.weights_dtype, picks[i].token * a.picks + picks[i].pick), rows + i * a.hidden,
                a.hidden);
    else
      std::memcpy(rows + i * a.hidden, x, size_t(a.hidden) * sizeof(T));
  });
  int refused = product(a, a.up_how, rows, a.up + entry * a.up_entry,
                        a.up_bias ? a.up_bias + entry * a.up_bias_entry : nullptr, wide, a.x_dtype, m,
                        a.units, a.hidden, s.rest, floats, threads);
  if (refused) return refused;
  parallel_for(m, threads, m * a.inner, [&](int64_t i) { activate_row(a, wide + i * a.units, narrow + i * a.inner); });
  refused = product(a, a.down_how, narrow, a.down + entry * a.down_entry,
                    a.down_bias ? a.down_bias + entry * a.down_bias_entry : nullptr, s.made, F32, m, a.hidden,
                    a.inner, s.rest, floats, threads);
  if (refused) return refused;
  parallel_for(m, threads, m * a.hidden / 8, [&](int64_t i) {  // a token chooses an expert once
    const int64_t pick = picks[i].token * a.picks + picks[i].pick;
    const float* y = s.made + i * a.hidden;
    if (a.results) std::memcpy(a.results + pick * a.hidden, y, size_t(a.hidden) * sizeof(float));
    else add_result(a, pick, y, sums + picks[i].token * sums_stride);
  });
  return 0;
}

template <class T> int run(const ExpertsArgs& a, float* scratch, int64_t scratch_floats, int threads) {
  Scratch s = parts(a, scratch);
  const int64_t floats = scratch_floats - (s.rest - scratch);
  if (floats < 0) return 1;
  sort_picks(a, s);
  const bool direct = a.out_dtype == F32;
  float* sums = direct ? static_cast<float*>(a.out) : s.sums;
  const int64_t stride = direct ? a.out_stride : a.hidden;
  T* out = static_cast<T*>(a.out);  // where it is not fp32, it is of the type of x
  for (int64_t t = 0; t < a.tokens && (!a.results || a.last); ++t) {
    if (!a.accumulate) std::fill(sums + t * stride, sums + t * stride + a.hidden, 0.0f);
    else if (!direct) for (int64_t j = 0; j < a.hidden; ++j) sums[t * stride + j] = load_one(out + t * a.out_stride + j);
  }
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t entry = s.ends[e] < s.ends[e + 1] ? entry_of(a, e) : -1;
    for (int64_t i = s.ends[e]; i < s.ends[e + 1]; i += a.block) {
      const int64_t m = std::min(a.block, s.ends[e + 1] - i);
      if (const int refused = run_block<T>(a, s, s.order + i, m, entry, sums, stride, floats, threads)) return refused;
    }
  }
  if (a.results && !a.last) return 0;
  if (a.results)
    parallel_for(a.tokens, threads, a.tokens * a.picks * a.hidden / 8, [&](int64_t t) {
      add_results(a, t, sums + t * stride);
    });
  if (!direct)
    parallel_for(a.tokens, threads, a.tokens * a.hidden / 8, [&](int64_t t) {
      for (int64_t j = 0; j < a.hidden; ++j) store_one(out + t * a.out_stride + j, sums[t * a.hidden + j]);
    });
  return 0;
}

}  // namespace

// Refuses, having written nothing but scratch, products that their kernels refuse, and too little scratch. A token's
// picks are of different experts.
extern "C" int forebay_experts(const ExpertsArgs* a, float* scratch, int64_t scratch_floats, int threads) {
  if (a->tokens == 0 || a->hidden == 0) return 0;
  if (a->x_dtype == F32) return run<float>(*a, scratch, scratch_floats, threads);
  if (a->x_dtype == BF16) return run<bf16>(*a, scratch, scratch_floats, threads);
  return run<f16>(*a, scratch, scratch_floats, threads);
}
