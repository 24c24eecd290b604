// The recurrence over chunks of tokens, as products of matrices (arXiv 2412.06464, section 3.3; without beta
// 2405.21060, section 6), or token by token where few tokens count.
//
// With p[t] the decay from the chunk's begin through token t and d[t, i] = p[t] / p[i], a chunk's added rows u solve
//   u[t] = beta[t] * (v[t] - p[t] * k[t] state - sum over i < t of d[t, i] * (k[t] k[i]) * u[i])
// and then
//   out[t] = p[t] * q[t] state + sum over i <= t of d[t, i] * (q[t] k[i]) * u[i]
//   state = p[last] * state + sum over i of d[last, i] * k[i] u[i]^T
// Quotients d are never divided: they are products of decays, none above 1.
#include "panels.h"
#include "subnormals.h"
#include "team.h"
#include "token_by_token.h"

namespace {

constexpr int64_t TOKENS = 64;        // of a chunk, at most
constexpr int64_t FEW_TOKENS = 8;     // from so many on chunks pay
constexpr int64_t CHUNK_WIDTH = 256;  // widest keys of chunks: a task holds some 0.4 MB
constexpr int64_t ROW = apart(4 * CHUNK_WIDTH) / 4;
constexpr int64_t MOST_RUN = 4;       // heads that share products of q and k

// A chunk of a head: rows of q and k, and what they give for all columns of the state.
struct Chunk {
  alignas(64) float q[TOKENS * ROW], k[TOKENS * ROW];
  alignas(64) float turned[TOKENS * CHUNK_WIDTH];  // k in panels of tokens, [panel][width][PANEL]
  alignas(64) float kk[TOKENS * TOKENS], qk[TOKENS * TOKENS];  // [t, i]: the products of token t with k[i], i <= t
  alignas(64) float corrects[TOKENS * TOKENS];  // [t, i]: what of u[i] is added to u[t]
  alignas(64) float adds[TOKENS * TOKENS];      // and to out[t]
  alignas(64) float from_begin[TOKENS], to_end[TOKENS], whole[CHUNK_WIDTH], beta[TOKENS];
  int64_t tokens, width;
  float* turned_at(int64_t t) { return turned + t * width; }  // the panel that begins with token t
};

// c[m, PANEL] += x[m, k] times a panel of k rows.
FB_INLINE void meet(const float* x, int64_t xs, const float* panel, int64_t m, int64_t k, float* c, int64_t cs) {
  for (int64_t i = 0; i < k; i += DEPTH)
    panel_rows(x + i, xs, panel + i * PANEL, m, std::min(DEPTH, k - i), c, cs);
}

// A chunk's tokens, from `from` on, of k head `few`: rows, their panels, and their products where decays are apart.
template <bool BY_CHANNEL> void take(const LinearRecurrenceArgs& a, int64_t b, int64_t few, int64_t from, Chunk& c) {
  const float* q = a.q + b * a.q_batch + from * a.q_token + few * a.q_head;
  const float* k = a.k + b * a.k_batch + from * a.k_token + few * a.k_head;
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::memcpy(c.q + t * ROW, q + t * a.q_token, size_t(c.width) * 4);
    std::memcpy(c.k + t * ROW, k + t * a.k_token, size_t(c.width) * 4);
  }
  std::memset(c.kk, 0, size_t(c.tokens * TOKENS) * 4);
  std::memset(c.qk, 0, size_t(c.tokens * TOKENS) * 4);
  for (int64_t t = 0; t < c.tokens && !BY_CHANNEL; t += PANEL) {
    for (int64_t i = 0; i < c.width; i += DEPTH) {
      const int64_t depth = std::min(DEPTH, c.width - i);
      fill_panel(std::min<int64_t>(PANEL, c.tokens - t), depth, c.turned_at(t) + i * PANEL,
                 [&](int64_t j, float* to) { std::memcpy(to, c.k + (t + j) * ROW + i, size_t(depth) * 4); });
    }
    const int64_t m = c.tokens - t, at = t * TOKENS + t;
    if (a.beta) meet(c.k + t * ROW, ROW, c.turned_at(t), m, c.width, c.kk + at, TOKENS);
    meet(c.q + t * ROW, ROW, c.turned_at(t), m, c.width, c.qk + at, TOKENS);
  }
}

// One decay a token: of products known already.
void decay_tokens(const float* logs, int64_t logs_token, Chunk& c) {
  alignas(64) float by[TOKENS] = {};
  float begin = 1.0f;
  for (int64_t t = 0; t < c.tokens; ++t) {
    const float decay = std::exp(logs[t * logs_token]);
    c.from_begin[t] = begin *= decay;
    for (int64_t i = 0; i < c.tokens; i += VL) {
      const vf passed = load(by + i) * decay;
      store(by + i, passed);
      store(c.corrects + t * TOKENS + i, -c.beta[t] * passed * load(c.kk + t * TOKENS + i));
    }
    by[t] = 1.0f;
    for (int64_t i = 0; i < c.tokens; i += VL)
      store(c.adds + t * TOKENS + i, load(by + i) * load(c.qk + t * TOKENS + i));
  }
  std::memcpy(c.to_end, by, sizeof by);
  std::fill(c.whole, c.whole + c.width, begin);
}

// The products of token t with the tokens of its panel before it, which `turned` has decayed until then, and itself.
void meet_panel(Chunk& c, int64_t t, const float* decay, float* turned) {
  const int64_t lane = t % PANEL, begin = t - lane;
  for (int64_t n = 0; n <= lane / VL; ++n) {
    vi at;
    for (int j = 0; j < VL; ++j) at[j] = int32_t(j + n * VL);
    const vi own = at == int32_t(lane);
    const float *q = c.q + t * ROW, *k = c.k + t * ROW;
    vf kk[2] = {}, qk[2] = {};
    const auto channel = [&](int64_t i, int sum) {
      float* held = turned + i * PANEL + n * VL;
      const vf key = k[i] - vf{}, before = load(held) * decay[i], now = own ? key : before;
      kk[sum] += before * key;
      qk[sum] += now * q[i];
      store(held, now);
    };
    int64_t i = 0;
    for (; i + 2 <= c.width; i += 2) channel(i, 0), channel(i + 1, 1);
    if (i < c.width) channel(i, 0);
    store(c.kk + t * TOKENS + begin + n * VL, kk[0] + kk[1]);
    store(c.qk + t * TOKENS + begin + n * VL, qk[0] + qk[1]);
  }
}

FB_INLINE void scale_row(float* row, const float* by, int64_t n) {
  for (int64_t i = 0; i < n; i += VL) store(row + i, load(row + i) * load(by + i));
}

// A decay for each channel of each token: products within a panel of tokens one by one, those with panels before it by
// rows decayed from the panel's begin, and columns decayed until there.
void decay_channels(const float* logs, int64_t logs_token, bool corrects, Chunk& c) {
  alignas(64) float decay[CHUNK_WIDTH + VL], since[CHUNK_WIDTH];
  std::fill(c.whole, c.whole + CHUNK_WIDTH, 1.0f);
  std::memset(c.turned, 0, size_t(round_up(c.tokens, PANEL) * c.width) * 4);
  for (int64_t begin = 0; begin < c.tokens; begin += PANEL) {
    const int64_t end = std::min<int64_t>(c.tokens, begin + PANEL);
    std::fill(since, since + CHUNK_WIDTH, 1.0f);
    for (int64_t t = begin; t < end; ++t) {
      decays<true>(logs + t * logs_token, c.width, decay);
      meet_panel(c, t, decay, c.turned_at(begin));
      scale_row(since, decay, c.width);
      scale_row(c.q + t * ROW, since, c.width);
      scale_row(c.k + t * ROW, since, c.width);
    }
    for (int64_t p = 0; p < begin; p += PANEL) {
      float* panel = c.turned_at(p);
      const int64_t at = begin * TOKENS + p;
      if (corrects) meet(c.k + begin * ROW, ROW, panel, end - begin, c.width, c.kk + at, TOKENS);
      meet(c.q + begin * ROW, ROW, panel, end - begin, c.width, c.qk + at, TOKENS);
      for (int64_t i = 0; i < c.width; ++i)
        FB_UNROLL for (int n = 0; n < PANEL; n += VL)
          store(panel + i * PANEL + n, load(panel + i * PANEL + n) * since[i]);
    }
    for (int64_t t = begin; t < end; ++t) {
      scale_row(c.q + t * ROW, c.whole, c.width);
      scale_row(c.k + t * ROW, c.whole, c.width);
    }
    scale_row(c.whole, since, c.width);
  }
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t i = 0; i < c.tokens; i += VL)
      store(c.corrects + t * TOKENS + i, -c.beta[t] * load(c.kk + t * TOKENS + i));
    c.from_begin[t] = c.to_end[t] = 1.0f;
  }
  std::memcpy(c.adds, c.qk, size_t(c.tokens * TOKENS) * 4);
}

// u of MB tokens, from which those before them are taken already: each takes its own from those after it.
template <int MB> FB_INLINE void correct_block(const float* corrects, float* u) {
  vf held[MB][2];
  FB_UNROLL for (int t = 0; t < MB; ++t)
    FB_UNROLL for (int n = 0; n < 2; ++n) held[t][n] = load(u + t * PANEL + n * VL);
  FB_UNROLL for (int i = 0; i < MB; ++i)
    FB_UNROLL for (int t = i + 1; t < MB; ++t)
      FB_UNROLL for (int n = 0; n < 2; ++n) held[t][n] += corrects[t * TOKENS + i] * held[i][n];
  FB_UNROLL for (int t = 0; t < MB; ++t)
    FB_UNROLL for (int n = 0; n < 2; ++n) store(u + t * PANEL + n * VL, held[t][n]);
}

// A row of PANEL numbers, of which n are in memory, and back.
FB_INLINE void take_row(const float* p, int64_t n, float* to) {
  if (n == PANEL) std::memcpy(to, p, PANEL * 4);
  else {
    std::memset(to, 0, PANEL * 4);
    std::memcpy(to, p, size_t(n) * 4);
  }
}

FB_INLINE void put_rows(const float* from, int64_t rows, int64_t n, float* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * stride, from + i * PANEL, size_t(n) * 4);
}

bool finite(const float* p, int64_t n) {
  vf sum = {};
  for (int64_t i = 0; i < n; i += VL) sum += load(p + i) * 0.0f;
  return lane_sum(sum) == 0.0f;
}

// A chunk for n columns of the state: false, and nothing written, where any number is not finite. There tokens would
// see what comes after them, as 0 times it.
bool columns_of(const Chunk& c, const float* v, int64_t v_token, bool corrects, bool begins, int64_t n, float* state,
                int64_t state_row, float* out, int64_t out_token) {
  alignas(64) float u[TOKENS * PANEL], made[TOKENS * PANEL] = {}, held[CHUNK_WIDTH * PANEL];
  const int64_t m = c.tokens;
  for (int64_t i = 0; i < c.width; ++i)
    if (begins) std::memset(held + i * PANEL, 0, PANEL * 4);
    else take_row(state + i * state_row, n, held + i * PANEL);
  std::memset(u, 0, sizeof u);
  if (corrects) meet(c.k, ROW, held, m, c.width, u, PANEL);
  meet(c.q, ROW, held, m, c.width, made, PANEL);
  for (int64_t t = 0; t < m; ++t) {
    alignas(64) float row[PANEL];
    take_row(v + t * v_token, n, row);
    FB_UNROLL for (int i = 0; i < PANEL; i += VL) {
      const vf known = load(u + t * PANEL + i) * c.from_begin[t];
      store(u + t * PANEL + i, corrects ? c.beta[t] * (load(row + i) - known) : load(row + i));
      store(made + t * PANEL + i, load(made + t * PANEL + i) * c.from_begin[t]);
    }
  }
  equal_blocks(0, m, [&](auto rows, int64_t t) {
    constexpr int MB = decltype(rows)::value;
    if (corrects) {
      panel_block<MB>(c.corrects + t * TOKENS, TOKENS, u, t, u + t * PANEL, PANEL);
      correct_block<MB>(c.corrects + t * TOKENS + t, u + t * PANEL);
    }
    panel_block<MB>(c.adds + t * TOKENS, TOKENS, u, t + MB, made + t * PANEL, PANEL);
  });
  for (int64_t t = 0; t < m; ++t)
    FB_UNROLL for (int i = 0; i < PANEL; i += VL) store(u + t * PANEL + i, load(u + t * PANEL + i) * c.to_end[t]);
  for (int64_t i = 0; i < c.width; ++i)
    FB_UNROLL for (int j = 0; j < PANEL; j += VL)
      store(held + i * PANEL + j, load(held + i * PANEL + j) * c.whole[i]);
  for (int64_t t = 0; t < m; t += PANEL)
    meet(c.turned + t * c.width, PANEL, u + t * PANEL, c.width, std::min<int64_t>(PANEL, m - t), held, PANEL);
  if (!finite(made, m * PANEL) || !finite(held, c.width * PANEL)) return false;
  put_rows(made, m, n, out, out_token);
  put_rows(held, c.width, n, state, state_row);
  return true;
}

// Heads [h0, h1), which share q and k, and columns [c0, c1) of their states.
struct Piece { int64_t b, h0, h1, c0, c1; };

template <bool BY_CHANNEL>
void chunk_of(const LinearRecurrenceArgs& a, const Piece& p, int64_t from, int64_t to, bool begins) {
  Chunk c;
  c.tokens = to - from, c.width = a.width;
  for (int64_t h = p.h0; h < p.h1; ++h) {
    if (BY_CHANNEL || h == p.h0) take<BY_CHANNEL>(a, p.b, h / a.group, from, c);
    for (int64_t t = 0; t < c.tokens; ++t)
      c.beta[t] = a.beta ? a.beta[p.b * a.beta_batch + (from + t) * a.beta_token + h] : 0.0f;
    const float* logs = a.log_decay + p.b * a.decay_batch + from * a.decay_token + h * a.decay_head;
    if (BY_CHANNEL) decay_channels(logs, a.decay_token, a.beta, c);
    else decay_tokens(logs, a.decay_token, c);
    const float* v = a.v + p.b * a.v_batch + from * a.v_token + h * a.v_head;
    float* out = a.out + p.b * a.out_batch + from * a.out_token + h * a.out_head;
    float* state = a.state + (p.b * a.heads + h) * a.width * a.columns;
    for (int64_t i = p.c0; i < p.c1; i += PANEL) {
      const int64_t n = std::min<int64_t>(PANEL, p.c1 - i);
      if (!columns_of(c, v + i, a.v_token, a.beta, begins, n, state + i, a.columns, out + i, a.out_token))
        walk_columns<BY_CHANNEL>(a, {p.b, h, from, to, begins}, i, i + n);
    }
  }
}

template <bool BY_CHANNEL> void run_piece(const LinearRecurrenceArgs& a, const Piece& p) {
  const WithoutSubnormals flushed;
  const int64_t count = std::min(std::max<int64_t>(a.count[p.b], 0), a.tokens);
  const bool begins = a.start[p.b] == 0;
  for (int64_t h = p.h0; h < p.h1; ++h)
    for (int64_t t = count; t < a.tokens; ++t) {
      float* out = a.out + p.b * a.out_batch + t * a.out_token + h * a.out_head;
      std::fill(out + p.c0, out + p.c1, 0.0f);
    }
  if (count < FEW_TOKENS || a.width > CHUNK_WIDTH) {
    for (int64_t h = p.h0; h < p.h1; ++h) walk_columns<BY_CHANNEL>(a, {p.b, h, 0, count, begins}, p.c0, p.c1);
    return;
  }
  const int64_t chunks = (count + TOKENS - 1) / TOKENS;
  for (int64_t i = 0; i < chunks; ++i)
    chunk_of<BY_CHANNEL>(a, p, count * i / chunks, count * (i + 1) / chunks, begins && i == 0);
}

}  // namespace

// Needs dense last dimensions, a dense state, and a width of MOST_WIDTH at most.
extern "C" int forebay_linear_recurrence(const LinearRecurrenceArgs* a, float*, int64_t, int threads) {
  if (a->width > MOST_WIDTH) return 1;
  if (!a->heads) return 0;
  // tasks enough for all threads: few heads are cut by columns, of many some go together
  const int64_t heads = a->batch * a->heads, wanted = 4 * threads;
  const int64_t wides = std::max<int64_t>(1, (a->columns + WIDE - 1) / WIDE);
  const int64_t cut = std::clamp<int64_t>(wanted / std::max<int64_t>(heads, 1), 1, wides);
  const int64_t part = (wides + cut - 1) / cut, parts = (wides + part - 1) / part;
  const int64_t most = a->by_channel && a->tokens >= FEW_TOKENS ? 1 : std::min(MOST_RUN, a->group);
  const int64_t run = std::clamp<int64_t>(heads / wanted, 1, most), runs = (a->group + run - 1) / run;
  const int64_t tasks = a->batch * (a->heads / a->group) * runs * parts;
  parallel_for(tasks, threads, heads * a->columns * (a->tokens + 1) * a->width / 128, [&](int64_t i) {
    const int64_t c = i % parts * part * WIDE, r = i / parts % runs * run, few = i / parts / runs;
    const int64_t b = few / (a->heads / a->group), h = few % (a->heads / a->group) * a->group;
    const Piece piece = {b, h + r, h + std::min(a->group, r + run), c, std::min(a->columns, c + part * WIDE)};
    if (a->by_channel) run_piece<true>(*a, piece);
    else run_piece<false>(*a, piece);
  });
  return 0;
}
