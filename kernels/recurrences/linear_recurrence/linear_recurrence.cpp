// A state [width, columns] a head, which each token decays, corrects and adds to; results are its products with q.
//
// Columns of a state do not see each other, so a task has a panel of them, which stays in the first cache for all
// tokens of a step: what each token costs is then the arithmetic of three products with the panel.
#include <algorithm>
#include <cmath>

#include "team.h"
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
constexpr int NV = VL >= 16 ? 2 : 4;  // vectors of a panel's row
constexpr int PANEL = NV * VL;
constexpr int ROWS = 8 / NV;  // sums apart, as one sum alone would wait for itself

// `decay` are exp(log_decay) of the token, one for every row of the state or one in all.
struct Token {
  const float *q, *k, *decay;
  float beta;
};

template <int STEP, bool BY_CHANNEL>
FB_INLINE void seen(const float* panel, int64_t stride, int64_t i, const Token& t, vf (&sum)[ROWS][NV]) {
  FB_UNROLL for (int r = 0; r < STEP; ++r) {
    const float by = BY_CHANNEL ? t.k[i + r] * t.decay[i + r] : t.k[i + r];
    FB_UNROLL for (int n = 0; n < NV; ++n) sum[r][n] += by * load(panel + (i + r) * stride + n * VL);
  }
}

template <int STEP, bool BY_CHANNEL>
FB_INLINE void renewed(float* panel, int64_t stride, int64_t i, const Token& t, const vf (&value)[NV],
                       vf (&sum)[ROWS][NV]) {
  FB_UNROLL for (int r = 0; r < STEP; ++r) {
    const float decay = BY_CHANNEL ? t.decay[i + r] : t.decay[0];
    FB_UNROLL for (int n = 0; n < NV; ++n) {
      float* at = panel + (i + r) * stride + n * VL;
      const vf made = load(at) * decay + t.k[i + r] * value[n];
      store(at, made);
      sum[r][n] += t.q[i + r] * made;
    }
  }
}

FB_INLINE void added(vf (&sum)[ROWS][NV], vf (&to)[NV]) {
  FB_UNROLL for (int r = 1; r < ROWS; ++r)
    FB_UNROLL for (int n = 0; n < NV; ++n) sum[0][n] += sum[r][n];
  FB_UNROLL for (int n = 0; n < NV; ++n) to[n] = sum[0][n];
}

// One token over a panel: `value` is v, and becomes the result.
template <bool BY_CHANNEL>
void step(float* panel, int64_t stride, int64_t width, const Token& t, bool corrects, vf (&value)[NV]) {
  int64_t i = 0;
  if (corrects) {
    vf sum[ROWS][NV] = {}, known[NV];
    for (; i + ROWS <= width; i += ROWS) seen<ROWS, BY_CHANNEL>(panel, stride, i, t, sum);
    for (; i < width; ++i) seen<1, BY_CHANNEL>(panel, stride, i, t, sum);
    added(sum, known);
    FB_UNROLL for (int n = 0; n < NV; ++n)
      value[n] = t.beta * (value[n] - (BY_CHANNEL ? known[n] : known[n] * t.decay[0]));
  }
  vf sum[ROWS][NV] = {};
  for (i = 0; i + ROWS <= width; i += ROWS) renewed<ROWS, BY_CHANNEL>(panel, stride, i, t, value, sum);
  for (; i < width; ++i) renewed<1, BY_CHANNEL>(panel, stride, i, t, value, sum);
  added(sum, value);
}

void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, n * sizeof(float));
}

FB_INLINE void read_row(const float* p, int64_t n, vf (&to)[NV]) {
  float row[PANEL] = {};
  if (n < PANEL) std::memcpy(row, p, n * sizeof(float));
  FB_UNROLL for (int i = 0; i < NV; ++i) to[i] = load((n < PANEL ? row : p) + i * VL);
}

FB_INLINE void write_row(float* p, int64_t n, const vf (&from)[NV]) {
  float row[PANEL];
  FB_UNROLL for (int i = 0; i < NV; ++i) store((n < PANEL ? row : p) + i * VL, from[i]);
  if (n < PANEL) std::memcpy(p, row, n * sizeof(float));
}

template <bool BY_CHANNEL> void panel_of(const LinearRecurrenceArgs& a, int64_t b, int64_t h, int64_t c) {
  const int64_t n = std::min<int64_t>(PANEL, a.columns - c), few = h / a.group;
  const int64_t count = std::min(std::max<int64_t>(a.count[b], 0), a.tokens);
  float* state = a.state + (b * a.heads + h) * a.width * a.columns + c;
  const float* q = a.q + b * a.q_batch + few * a.q_head;
  const float* k = a.k + b * a.k_batch + few * a.k_head;
  const float* v = a.v + b * a.v_batch + h * a.v_head + c;
  const float* log_decay = a.log_decay + b * a.decay_batch + h * a.decay_head;
  float* out = a.out + b * a.out_batch + h * a.out_head + c;
  alignas(64) float apart[MOST_WIDTH * PANEL], decay[MOST_WIDTH + VL];
  const bool begins = a.start[b] == 0, in_place = n == PANEL && count < 3;
  float* panel = in_place ? state : apart;
  const int64_t stride = in_place ? a.columns : PANEL;
  if (begins || n < PANEL)
    for (int64_t i = 0; i < a.width; ++i) std::fill(panel + i * stride, panel + i * stride + PANEL, 0.0f);
  if (!begins && !in_place) copy_rows(state, a.columns, panel, stride, a.width, n);
  for (int64_t t = 0; t < count; ++t) {
    const float* logs = log_decay + t * a.decay_token;
    if (BY_CHANNEL)
      for (int64_t i = 0; i < a.width; i += VL)
        store(decay + i, exp_nonpositive(load_partial(logs + i, int(std::min<int64_t>(VL, a.width - i)))));
    else decay[0] = std::exp(*logs);
    vf value[NV];
    read_row(v + t * a.v_token, n, value);
    const float beta = a.beta ? a.beta[b * a.beta_batch + t * a.beta_token + h] : 0.0f;
    step<BY_CHANNEL>(panel, stride, a.width, {q + t * a.q_token, k + t * a.k_token, decay, beta}, a.beta, value);
    write_row(out + t * a.out_token, n, value);
  }
  for (int64_t t = count; t < a.tokens; ++t) std::fill(out + t * a.out_token, out + t * a.out_token + n, 0.0f);
  if (!in_place && (count || begins)) copy_rows(panel, stride, state, a.columns, a.width, n);
}

}  // namespace

// Needs dense last dimensions, a dense state, and a width of MOST_WIDTH at most.
extern "C" int forebay_linear_recurrence(const LinearRecurrenceArgs* a, float*, int64_t, int threads) {
  if (a->width > MOST_WIDTH) return 1;
  const int64_t panels = (a->columns + PANEL - 1) / PANEL, tasks = a->batch * a->heads * panels;
  const int64_t serial_ns = tasks * (a->tokens + 1) * a->width / 4;
  parallel_for(tasks, threads, serial_ns, [&](int64_t i) {
    const int64_t head = i / panels, c = i % panels * PANEL;
    if (a->by_channel) panel_of<true>(*a, head / a->heads, head % a->heads, c);
    else panel_of<false>(*a, head / a->heads, head % a->heads, c);
  });
  return 0;
}
