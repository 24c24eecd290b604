// A state [width, columns] a head, which each token decays, corrects and adds to; results are its products with q.
//
// Columns of a state do not see each other. Of several tokens those that lie in a few vectors are walked together, and
// stay in the first cache for all of them. One or two tokens walk over the state where it lies, in rows as wide as
// registers hold, and meanwhile call in the state of the next head: then memory is what they wait for.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector_math.h"

using namespace forebay;

extern "C" struct LinearRecurrenceArgs {
  const float* q;          // [batch, tokens, heads / group, width]
  const float* k;          // the same
  const float* v;          // [batch, tokens, heads, columns]
  const float* log_decay;  // [batch, tokens, heads], or [.., width] by_channel
  const float* beta;       // [batch, tokens, heads] or null
  float* state;            // [batch, heads, width, columns]
  const int64_t* start;
  const int64_t* count;
  float* out;  // [batch, tokens, heads, columns]
  int64_t batch, tokens, heads, group, width, columns;
  int64_t q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head;
  int64_t decay_batch, decay_token, decay_head, beta_batch, beta_token, out_batch, out_token, out_head;
  int32_t by_channel;
};

namespace {

constexpr int64_t MOST_WIDTH = 512;
constexpr int SPAN_NV = VL >= 16 ? 2 : 4;  // vectors of a row that is walked apart
constexpr int SPAN = SPAN_NV * VL;
constexpr int WIDE_NV = 8;              // and in place
constexpr int64_t WIDE = WIDE_NV * VL;  // sums of a column depend on where it lies in so many
constexpr int64_t FEW_STEPS = 2;        // of tokens, in place

// sums apart, as one sum alone would wait for itself
template <int NV> constexpr int rows_of() { return NV < 8 ? 8 / NV : 1; }

// `decay` are exp(log_decay) of the token, one for every row of the state or one in all.
struct Token {
  const float *q, *k, *decay;
  float beta;
};

// A panel: columns of a state [width, ..], and the way to the same of the next head.
struct Panel {
  float* at;
  int64_t stride, width, next;
};

// Calls in a half of a row of the next head's state, by its number: in order, as processors look ahead in it too.
template <int NV, bool IN_PLACE> FB_INLINE void call_next(const Panel& p, int64_t half) {
  if (!IN_PLACE) return;
  const float* at = p.at + p.next + half / 2 * p.stride + half % 2 * (NV * VL / 2);
  FB_UNROLL for (int n = 0; n < NV * VL / 2; n += 16) __builtin_prefetch(at + n, 0, 2);
}

template <int NV, int STEP, bool BY_CHANNEL, bool IN_PLACE>
FB_INLINE void seen(const Panel& p, int64_t i, const Token& t, vf (&sum)[rows_of<NV>()][NV]) {
  FB_UNROLL for (int r = 0; r < STEP; ++r) {
    const float by = BY_CHANNEL ? t.k[i + r] * t.decay[i + r] : t.k[i + r];
    const float* row = p.at + (i + r) * p.stride;
    FB_UNROLL for (int n = 0; n < NV; ++n) sum[r][n] += by * load(row + n * VL);
    call_next<NV, IN_PLACE>(p, i + r);
  }
}

template <int NV, int STEP, bool BY_CHANNEL, bool IN_PLACE>
FB_INLINE void renewed(const Panel& p, int64_t i, const Token& t, bool corrects, const vf (&value)[NV],
                       vf (&sum)[rows_of<NV>()][NV]) {
  FB_UNROLL for (int r = 0; r < STEP; ++r) {
    const float decay = BY_CHANNEL ? t.decay[i + r] : t.decay[0];
    float* row = p.at + (i + r) * p.stride;
    FB_UNROLL for (int n = 0; n < NV; ++n) {
      const vf made = load(row + n * VL) * decay + t.k[i + r] * value[n];
      store(row + n * VL, made);
      sum[r][n] += t.q[i + r] * made;
    }
    call_next<NV, IN_PLACE>(p, corrects ? p.width + i + r : 2 * (i + r));
    if (!corrects) call_next<NV, IN_PLACE>(p, 2 * (i + r) + 1);
  }
}

template <int NV> FB_INLINE void added(vf (&sum)[rows_of<NV>()][NV], vf (&to)[NV]) {
  FB_UNROLL for (int r = 1; r < rows_of<NV>(); ++r)
    FB_UNROLL for (int n = 0; n < NV; ++n) sum[0][n] += sum[r][n];
  FB_UNROLL for (int n = 0; n < NV; ++n) to[n] = sum[0][n];
}

// One token over a panel: `value` is v, and becomes the result.
template <int NV, bool BY_CHANNEL, bool IN_PLACE>
void step(const Panel& p, const Token& t, bool corrects, vf (&value)[NV]) {
  constexpr int ROWS = rows_of<NV>();
  int64_t i = 0;
  if (corrects) {
    vf sum[ROWS][NV] = {}, known[NV];
    for (; i + ROWS <= p.width; i += ROWS) seen<NV, ROWS, BY_CHANNEL, IN_PLACE>(p, i, t, sum);
    for (; i < p.width; ++i) seen<NV, 1, BY_CHANNEL, IN_PLACE>(p, i, t, sum);
    added<NV>(sum, known);
    FB_UNROLL for (int n = 0; n < NV; ++n)
      value[n] = t.beta * (value[n] - (BY_CHANNEL ? known[n] : known[n] * t.decay[0]));
  }
  vf sum[ROWS][NV] = {};
  for (i = 0; i + ROWS <= p.width; i += ROWS) renewed<NV, ROWS, BY_CHANNEL, IN_PLACE>(p, i, t, corrects, value, sum);
  for (; i < p.width; ++i) renewed<NV, 1, BY_CHANNEL, IN_PLACE>(p, i, t, corrects, value, sum);
  added<NV>(sum, value);
}

void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, n * sizeof(float));
}

template <int NV> FB_INLINE void read_row(const float* p, int64_t n, vf (&to)[NV]) {
  float row[NV * VL] = {};
  if (n < NV * VL) std::memcpy(row, p, n * sizeof(float));
  FB_UNROLL for (int i = 0; i < NV; ++i) to[i] = load((n < NV * VL ? row : p) + i * VL);
}

template <int NV> FB_INLINE void write_row(float* p, int64_t n, const vf (&from)[NV]) {
  float row[NV * VL];
  FB_UNROLL for (int i = 0; i < NV; ++i) store((n < NV * VL ? row : p) + i * VL, from[i]);
  if (n < NV * VL) std::memcpy(p, row, n * sizeof(float));
}

// exp(log_decay) of a token: of each row of the state, or one in all.
template <bool BY_CHANNEL> FB_INLINE void decays(const float* logs, int64_t width, float* to) {
  if (!BY_CHANNEL) to[0] = std::exp(*logs);
  else {
    int64_t i = 0;
    for (; i + VL <= width; i += VL) store(to + i, exp_nonpositive(load(logs + i)));
    if (i < width) store(to + i, exp_nonpositive(load_partial(logs + i, int(width - i))));
  }
}

// What is walked: tokens [from, to) of head h of sequence b.
struct Walk { int64_t b, h, from, to; bool begins; };

// Its tokens one by one over columns [c, c + n) of its state, which are not above NV vectors, and in place as many.
template <bool BY_CHANNEL, int NV, bool IN_PLACE>
void walk(const LinearRecurrenceArgs& a, const Walk& w, int64_t c, int64_t n) {
  const int64_t few = w.h / a.group;
  float* state = a.state + (w.b * a.heads + w.h) * a.width * a.columns + c;
  const float* q = a.q + w.b * a.q_batch + few * a.q_head;
  const float* k = a.k + w.b * a.k_batch + few * a.k_head;
  const float* v = a.v + w.b * a.v_batch + w.h * a.v_head + c;
  const float* log_decay = a.log_decay + w.b * a.decay_batch + w.h * a.decay_head;
  float* out = a.out + w.b * a.out_batch + w.h * a.out_head + c;
  alignas(64) float apart[IN_PLACE ? VL : MOST_WIDTH * NV * VL], decay[MOST_WIDTH + VL];
  const Panel panel = IN_PLACE ? Panel{state, a.columns, a.width, a.width * a.columns}
                               : Panel{apart, NV * VL, a.width, 0};
  if (w.begins || !IN_PLACE)
    for (int64_t i = 0; i < a.width; ++i) std::fill_n(panel.at + i * panel.stride, NV * VL, 0.0f);
  if (!w.begins && !IN_PLACE) copy_rows(state, a.columns, apart, panel.stride, a.width, n);
  for (int64_t t = w.from; t < w.to; ++t) {
    decays<BY_CHANNEL>(log_decay + t * a.decay_token, a.width, decay);
    vf value[NV];
    read_row<NV>(v + t * a.v_token, n, value);
    const float beta = a.beta ? a.beta[w.b * a.beta_batch + t * a.beta_token + w.h] : 0.0f;
    step<NV, BY_CHANNEL, IN_PLACE>(panel, {q + t * a.q_token, k + t * a.k_token, decay, beta}, a.beta, value);
    write_row<NV>(out + t * a.out_token, n, value);
  }
  if (!IN_PLACE && (w.from < w.to || w.begins)) copy_rows(apart, panel.stride, state, a.columns, a.width, n);
}

// The same over columns [begin, end) of the state.
template <bool BY_CHANNEL, int NV = WIDE_NV>
void walk_columns(const LinearRecurrenceArgs& a, const Walk& w, int64_t begin, int64_t end) {
  if constexpr (NV > 0) {
    if (w.to - w.from > FEW_STEPS) {
      for (int64_t c = begin; c < end; c += SPAN)
        walk<BY_CHANNEL, SPAN_NV, false>(a, w, c, std::min<int64_t>(SPAN, end - c));
      return;
    }
    for (; begin + NV * VL <= end; begin += NV * VL) walk<BY_CHANNEL, NV, true>(a, w, begin, NV * VL);
    walk_columns<BY_CHANNEL, NV / 2>(a, w, begin, end);
  } else if (begin < end) {
    walk<BY_CHANNEL, 1, false>(a, w, begin, end - begin);
  }
}

}  // namespace
