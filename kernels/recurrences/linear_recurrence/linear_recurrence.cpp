// The recurrence over chunks of tokens, as products of matrices (arXiv 2412.06464, section 3.3; without beta
// 2405.21060, section 6), or token by token where few tokens count.
//
// With p[t] the decay from the chunk's begin through token t and d[t, i] = p[t] / p[i], a chunk's added rows u solve
//   u[t] = beta[t] * (v[t] - p[t] * k[t] state - sum over i < t of d[t, i] * (k[t] k[i]) * u[i])
// and then
//   out[t] = p[t] * q[t] state + sum over i <= t of d[t, i] * (q[t] k[i]) * u[i]
//   state = p[last] * state + sum over i of d[last, i] * k[i] u[i]^T
// Quotients d are never divided: they are products of decays, none above 1.
#include "channel_decays.h"
#include "subnormals.h"
#include "team.h"

namespace {

constexpr int64_t FEW_TOKENS = 8;  // from so many on chunks pay
constexpr int64_t SPREAD = 128;    // columns of a head that a task takes, at most
constexpr int64_t HELD = 1 << 17;  // numbers of the states of its heads: a part of L2, and 0.5 MB of its stack
static_assert(SPREAD % WIDE == 0 && WIDE % PANEL == 0 && SPREAD * CHUNK_WIDTH <= HELD);

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

// MB rows of the state, decayed, and what m tokens add to them.
template <int MB>
FB_INLINE void renew_block(const float* keys, const float* decay, const float* u, int64_t m, float* held) {
  vf acc[MB][2];
  FB_UNROLL for (int i = 0; i < MB; ++i)
    FB_UNROLL for (int n = 0; n < 2; ++n) acc[i][n] = load(held + i * PANEL + n * VL) * decay[i];
  panel_sums<MB>(keys, TOKENS, u, PANEL, m, acc);
  FB_UNROLL for (int i = 0; i < MB; ++i)
    FB_UNROLL for (int n = 0; n < 2; ++n) store(held + i * PANEL + n * VL, acc[i][n]);
}

// Rows of PANEL numbers, of which n are in memory, and back.
FB_INLINE void take_rows(const float* from, int64_t stride, int64_t rows, int64_t n, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    if (n == PANEL) {
      FB_UNROLL for (int j = 0; j < PANEL; j += VL) store(to + i * PANEL + j, load(from + i * stride + j));
    } else {
      std::memset(to + i * PANEL, 0, PANEL * 4);
      std::memcpy(to + i * PANEL, from + i * stride, size_t(n) * 4);
    }
}

FB_INLINE void put_rows(const float* from, int64_t rows, int64_t n, float* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i)
    if (n == PANEL) {
      FB_UNROLL for (int j = 0; j < PANEL; j += VL) store(to + i * stride + j, load(from + i * PANEL + j));
    } else {
      std::memcpy(to + i * stride, from + i * PANEL, size_t(n) * 4);
    }
}

// Columns of v, of the state in a panel, and of the results, of which n are in memory.
struct Columns {
  const float* v;
  int64_t v_token;
  float* held;  // [width, PANEL]
  float* out;
  int64_t out_token, n;
};

// A chunk for some columns: false, and nothing written, where any number is not finite. There tokens would see what
// comes after them, as 0 times it.
bool columns_of(const Chunk& c, const Columns& p, bool corrects, Ahead& ahead) {
  alignas(64) float u[TOKENS * PANEL], made[TOKENS * PANEL] = {};
  const int64_t m = c.tokens;
  const vf zero = {};
  vf odd = {};
  take_rows(p.v, p.v_token, m, p.n, u);
  if (corrects) {
    alignas(64) float known[TOKENS * PANEL] = {};
    meet(c.k, ROW, p.held, m, c.width, known, PANEL, PANEL);
    for (int64_t t = 0; t < m; ++t)
      FB_UNROLL for (int i = 0; i < PANEL; i += VL)
        store(u + t * PANEL + i,
              c.beta[t] * (load(u + t * PANEL + i) - load(known + t * PANEL + i) * c.from_begin[t]));
  }
  meet(c.q, ROW, p.held, m, c.width, made, PANEL, PANEL);
  for (int64_t t = 0; t < m; ++t)
    FB_UNROLL for (int i = 0; i < PANEL; i += VL)
      store(made + t * PANEL + i, load(made + t * PANEL + i) * c.from_begin[t]);
  equal_blocks(0, m, [&](auto rows, int64_t t) {
    constexpr int MB = decltype(rows)::value;
    if (corrects) {
      panel_block<MB>(c.corrects + t * TOKENS, TOKENS, u, t, u + t * PANEL, PANEL);
      correct_block<MB>(c.corrects + t * TOKENS + t, u + t * PANEL);
    }
    panel_block<MB>(c.adds + t * TOKENS, TOKENS, u, t + MB, made + t * PANEL, PANEL);
    ahead.call();
  });
  for (int64_t t = 0; t < m; ++t)
    FB_UNROLL for (int i = 0; i < PANEL; i += VL) {
      const vf added = load(u + t * PANEL + i) * c.to_end[t];
      odd += added * zero + load(made + t * PANEL + i) * zero;
      store(u + t * PANEL + i, added);
    }
  if (lane_sum(odd) != 0.0f) return false;
  put_rows(made, m, p.n, p.out, p.out_token);
  equal_blocks(0, c.width, [&](auto rows, int64_t i) {
    renew_block<decltype(rows)::value>(c.turned + i * TOKENS, c.whole + i, u, m, p.held + i * PANEL);
    ahead.call();
  });
  return true;
}

// Heads [h0, h1), and columns [c0, c1) of their states, at most SPREAD. Heads side by side have numbers of a token on
// one page of memory, whose address is then looked up once.
struct Piece { int64_t b, h0, h1, c0, c1; };

// The states of a piece's heads in panels, [head][panel][width][PANEL].
struct Held {
  alignas(64) float panels[HELD];
  float* of(const Piece& p, int64_t h, int64_t i, int64_t width) {
    return panels + ((h - p.h0) * round_up(p.c1 - p.c0, PANEL) + i - p.c0) * width;
  }
};

// f(state, panel, columns): where each panel of a piece lies in memory, and apart.
template <class F> void each_panel(const LinearRecurrenceArgs& a, const Piece& p, Held& held, const F& f) {
  for (int64_t h = p.h0; h < p.h1; ++h)
    for (int64_t i = p.c0; i < p.c1; i += PANEL)
      f(a.state + (p.b * a.heads + h) * a.width * a.columns + i, held.of(p, h, i, a.width),
        std::min<int64_t>(PANEL, p.c1 - i));
}

// Tokens [from, to) of a sequence.
struct Span { int64_t from, to; };

// What is read and written after head h of tokens `now`: of the next head, or of the first one of the tokens `next`. Of
// these each head calls in a part of q and k.
Ahead ahead_of(const LinearRecurrenceArgs& a, const Piece& p, int64_t h, const Span& now, const Span& next) {
  Ahead ahead;
  const bool last = h + 1 == p.h1;
  const int64_t n = p.c1 - p.c0, to = last ? p.h0 : h + 1, few = p.h0 / a.group;
  const Span& s = last ? next : now;
  const int64_t tokens = s.to - s.from;
  ahead.add(a.v + p.b * a.v_batch + s.from * a.v_token + to * a.v_head + p.c0, a.v_token, tokens, n);
  ahead.add(a.out + p.b * a.out_batch + s.from * a.out_token + to * a.out_head + p.c0, a.out_token, tokens, n);
  if (a.by_channel)
    ahead.add(a.log_decay + p.b * a.decay_batch + s.from * a.decay_token + to * a.decay_head, a.decay_token, tokens,
              a.width);
  const int64_t heads = p.h1 - p.h0, length = next.to - next.from;
  const int64_t first = next.from + (h - p.h0) * length / heads, end = next.from + (h - p.h0 + 1) * length / heads;
  ahead.add(a.q + p.b * a.q_batch + first * a.q_token + few * a.q_head, a.q_token, end - first, a.width);
  ahead.add(a.k + p.b * a.k_batch + first * a.k_token + few * a.k_head, a.k_token, end - first, a.width);
  return ahead;
}

template <bool BY_CHANNEL>
void chunk_of(const LinearRecurrenceArgs& a, const Piece& p, const Span& now, const Span& next, Held& held) {
  Chunk c;
  c.tokens = now.to - now.from, c.width = a.width;
  for (int64_t h = p.h0; h < p.h1; ++h) {
    if (BY_CHANNEL || h == p.h0 || h % a.group == 0) take<BY_CHANNEL>(a, p.b, h / a.group, now.from, c);
    for (int64_t t = 0; t < c.tokens; ++t)
      c.beta[t] = a.beta ? a.beta[p.b * a.beta_batch + (now.from + t) * a.beta_token + h] : 0.0f;
    const float* logs = a.log_decay + p.b * a.decay_batch + now.from * a.decay_token + h * a.decay_head;
    if (BY_CHANNEL) decay_channels(logs, a.decay_token, a.beta, c);
    else decay_tokens(logs, a.decay_token, a.beta, c);
    const float* v = a.v + p.b * a.v_batch + now.from * a.v_token + h * a.v_head;
    float* out = a.out + p.b * a.out_batch + now.from * a.out_token + h * a.out_head;
    float* state = a.state + (p.b * a.heads + h) * a.width * a.columns;
    Ahead ahead = ahead_of(a, p, h, now, next);
    for (int64_t i = p.c0; i < p.c1; i += PANEL) {
      const Columns at = {v + i, a.v_token, held.of(p, h, i, a.width), out + i, a.out_token,
                          std::min<int64_t>(PANEL, p.c1 - i)};
      if (columns_of(c, at, a.beta, ahead)) continue;
      put_rows(at.held, a.width, at.n, state + i, a.columns);
      walk_columns<BY_CHANNEL>(a, {p.b, h, now.from, now.to, false}, i, i + at.n);
      take_rows(state + i, a.columns, a.width, at.n, at.held);
    }
  }
}

template <bool BY_CHANNEL>
void run_chunks(const LinearRecurrenceArgs& a, const Piece& p, int64_t count, bool begins) {
  Held held;
  each_panel(a, p, held, [&](const float* state, float* panel, int64_t n) {
    if (begins) std::memset(panel, 0, size_t(a.width * PANEL) * 4);
    else take_rows(state, a.columns, a.width, n, panel);
  });
  const int64_t chunks = (count + TOKENS - 1) / TOKENS;
  const auto begin = [&](int64_t i) { return count * std::min(i, chunks) / chunks; };
  for (int64_t i = 0; i < chunks; ++i)
    chunk_of<BY_CHANNEL>(a, p, {begin(i), begin(i + 1)}, {begin(i + 1), begin(i + 2)}, held);
  each_panel(a, p, held, [&](float* state, const float* panel, int64_t n) {
    put_rows(panel, a.width, n, state, a.columns);
  });
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
  } else {
    run_chunks<BY_CHANNEL>(a, p, count, begins);
  }
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
  const bool chunked = a->tokens >= FEW_TOKENS;
  const int64_t most_wides = chunked ? SPREAD / WIDE : wides, part = std::min((wides + cut - 1) / cut, most_wides);
  const int64_t parts = (wides + part - 1) / part;
  const int64_t held = std::max<int64_t>(1, std::min(SPREAD, round_up(a->columns, PANEL)) * a->width);
  int64_t run = std::clamp<int64_t>(heads / wanted, 1, std::clamp<int64_t>(HELD / held, 1, a->heads));
  if (run > a->group) run -= run % a->group;  // heads that share q and k stay together, or are cut apart from others
  const int64_t cut_of = run < a->group ? a->group : a->heads, runs = (cut_of + run - 1) / run;
  const int64_t tasks = a->batch * (a->heads / cut_of) * runs * parts;
  parallel_for(tasks, threads, heads * a->columns * (a->tokens + 1) * a->width / 128, [&](int64_t i) {
    const int64_t c = i % parts * part * WIDE, r = i / parts % runs * run, of = i / parts / runs;
    const int64_t b = of / (a->heads / cut_of), h = of % (a->heads / cut_of) * cut_of;
    const Piece piece = {b, h + r, h + std::min(cut_of, r + run), c, std::min(a->columns, c + part * WIDE)};
    if (a->by_channel) run_piece<true>(*a, piece);
    else run_piece<false>(*a, piece);
  });
  return 0;
}
