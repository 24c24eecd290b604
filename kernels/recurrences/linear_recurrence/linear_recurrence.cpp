// The recurrence over chunks of tokens, as products of matrices (arXiv 2412.06464, section 3.3; without beta
// 2405.21060, section 6), or token by token where few tokens count.
//
// With p[t] the decay from the chunk's begin through token t and d[t, i] = p[t] / p[i], a chunk's added rows u solve
//   u[t] = beta[t] * (v[t] - p[t] * k[t] state - sum over i < t of d[t, i] * (k[t] k[i]) * u[i])
// and then
//   out[t] = p[t] * q[t] state + sum over i <= t of d[t, i] * (q[t] k[i]) * u[i]
//   state = p[last] * state + sum over i of d[last, i] * k[i] u[i]^T
// Quotients d are never divided: they are products of decays, none above 1.
#include <atomic>
#include <new>

#include "channel_decays.h"
#include "subnormals.h"
#include "team.h"

namespace {

constexpr int64_t FEW_TOKENS = 8;  // from so many on chunks pay
constexpr int64_t HELD = 1 << 17;  // numbers of the states of a task's heads, at most: a part of L2
static_assert(SPREAD % WIDE == 0 && WIDE % PANEL == 0 && SPREAD * CHUNK_WIDTH <= HELD);

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

// Columns of v, of the state in a panel, and of the results.
struct Columns {
  const float* v;
  int64_t v_token;
  float* held;  // [width, PANEL]
  float* out;
  int64_t out_token;
};

// u of tokens [t, t + MB), from those before t and from each other.
template <int MB> FB_INLINE void correct_block(const Chunk& c, const Columns& p, int64_t t, float* u, Ahead& ahead) {
  vf acc[MB][2] = {};
  sums<MB>(c.k + t * ROW, ROW, p.held, c.width, acc, ahead);
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < 2; ++n)
      acc[m][n] = c.beta[t + m] * (load(p.v + (t + m) * p.v_token + n * VL) - acc[m][n] * c.from_begin[t + m]);
  const float* corrects = c.corrects + t * TOKENS;
  sums<MB>(corrects, TOKENS, u, t, acc, ahead);
  FB_UNROLL for (int i = 0; i < MB; ++i)
    FB_UNROLL for (int m = i + 1; m < MB; ++m)
      FB_UNROLL for (int n = 0; n < 2; ++n) acc[m][n] += corrects[m * TOKENS + t + i] * acc[i][n];
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < 2; ++n) store(u + (t + m) * PANEL + n * VL, acc[m][n]);
}

// Their results; `odd` is 0 where all are finite.
template <int MB>
FB_INLINE void result_block(const Chunk& c, const Columns& p, int64_t t, const float* u, vf& odd, Ahead& ahead) {
  vf acc[MB][2] = {};
  sums<MB>(c.q + t * ROW, ROW, p.held, c.width, acc, ahead);
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < 2; ++n) acc[m][n] *= c.from_begin[t + m];
  sums<MB>(c.adds + t * TOKENS, TOKENS, u, t + MB, acc, ahead);
  vf all[2] = {};
  FB_UNROLL for (int m = 0; m < MB; ++m)
    FB_UNROLL for (int n = 0; n < 2; ++n) {
      all[n] += acc[m][n];
      store(p.out + (t + m) * p.out_token + n * VL, acc[m][n]);
    }
  odd += (all[0] + all[1]) * 0.0f;
}

// MB rows of the state, decayed, and what the tokens add to them.
template <int MB> FB_INLINE void renew_block(const Chunk& c, int64_t row, const float* u, float* held, Ahead& ahead) {
  vf acc[MB][2];
  FB_UNROLL for (int i = 0; i < MB; ++i)
    FB_UNROLL for (int n = 0; n < 2; ++n) acc[i][n] = load(held + (row + i) * PANEL + n * VL) * c.whole[row + i];
  sums<MB>(c.turned + row * TOKENS, TOKENS, u, c.tokens, acc, ahead);
  FB_UNROLL for (int i = 0; i < MB; ++i)
    FB_UNROLL for (int n = 0; n < 2; ++n) store(held + (row + i) * PANEL + n * VL, acc[i][n]);
}

// A chunk for some columns: false, and the state as it was, where any number is not finite. There tokens would see what
// comes after them, as 0 times it.
bool columns_of(const Chunk& c, const Columns& p, bool corrects, Ahead& ahead) {
  alignas(64) float u[TOKENS * PANEL];
  vf odd = {};
  if (!corrects) take_rows(p.v, p.v_token, c.tokens, PANEL, u);
  equal_blocks(0, c.tokens, [&](auto rows, int64_t t) {
    constexpr int MB = decltype(rows)::value;
    if (corrects) correct_block<MB>(c, p, t, u, ahead);
    result_block<MB>(c, p, t, u, odd, ahead);
  });
  for (int64_t t = 0; t < c.tokens; ++t)
    FB_UNROLL for (int i = 0; i < PANEL; i += VL) {
      const vf added = load(u + t * PANEL + i) * c.to_end[t];
      odd += added * 0.0f;
      store(u + t * PANEL + i, added);
    }
  if (lane_sum(odd) != 0.0f) return false;
  equal_blocks(0, c.width,
               [&](auto rows, int64_t i) { renew_block<decltype(rows)::value>(c, i, u, p.held, ahead); });
  return true;
}

// Heads [h0, h1), and columns [c0, c1) of their states, at most SPREAD. Heads side by side have numbers of a token on
// one page of memory, whose address is then looked up once.
struct Piece { int64_t b, h0, h1, c0, c1; };

// The states of a piece's heads in panels, [head][panel][width][PANEL].
struct Held {
  float* panels;
  float* of(const Piece& p, int64_t h, int64_t i, int64_t width) {
    return panels + ((h - p.h0) * round_up(p.c1 - p.c0, PANEL) + i - p.c0) * width;
  }
};

// f(state, panel, columns): where each panel of a piece lies in memory, and apart.
template <class F> void each_panel(const LinearRecurrenceArgs& a, const Piece& p, Held held, const F& f) {
  for (int64_t h = p.h0; h < p.h1; ++h)
    for (int64_t i = p.c0; i < p.c1; i += PANEL)
      f(a.state + (p.b * a.heads + h) * a.width * a.columns + i, held.of(p, h, i, a.width),
        std::min<int64_t>(PANEL, p.c1 - i));
}

// Tokens [from, to) of a sequence.
struct Span { int64_t from, to; };

// Where rows lie while they are used, and where those lie that come after them.
struct Staged {
  Keys keys[2];
  Values values[2];
  int key = 0, value = 0;
};

// A worker's scratch. The states of its heads follow it: callers' threads may have stacks too small for them.
struct Scratch {
  Staged staged;
  Chunk chunk;
  Held held() { return {reinterpret_cast<float*>(this + 1)}; }
};

int64_t panel_floats(int64_t width, int64_t columns) {
  return std::max<int64_t>(1, std::min(SPREAD, round_up(columns, PANEL)) * width);
}

// Floats of a worker's scratch; 0 where no call of so many tokens takes chunks.
int64_t scratch_floats(int64_t tokens, int64_t heads, int64_t width, int64_t columns) {
  if (tokens < FEW_TOKENS || width > CHUNK_WIDTH) return 0;
  return int64_t(sizeof(Scratch) / 4) + round_up(std::min(HELD, heads * panel_floats(width, columns)), 16);
}

// Tokens [from, from + some) of q and k head `few`, which become rows `at` on.
void stage_keys(const LinearRecurrenceArgs& a, int64_t b, int64_t few, int64_t from, int64_t at, int64_t some, Keys& to,
                Ahead& ahead) {
  const int64_t padded = round_up(a.width, 16), t = from + at;
  ahead.add({a.q + b * a.q_batch + t * a.q_token + few * a.q_head, a.q_token, some, a.width, to.q + at * ROW, ROW,
             padded});
  ahead.add({a.k + b * a.k_batch + t * a.k_token + few * a.k_head, a.k_token, some, a.width, to.k + at * ROW, ROW,
             padded});
}

// Tokens of the columns of head h, and those of its results.
void stage_values(const LinearRecurrenceArgs& a, const Piece& p, int64_t h, const Span& s, Values& to, Ahead& ahead) {
  const int64_t tokens = s.to - s.from, n = p.c1 - p.c0;
  if (a.by_channel)
    ahead.add({a.log_decay + p.b * a.decay_batch + s.from * a.decay_token + h * a.decay_head, a.decay_token, tokens,
               a.width, to.logs, ROW, round_up(a.width, 16)});
  ahead.add({a.v + p.b * a.v_batch + s.from * a.v_token + h * a.v_head + p.c0, a.v_token, tokens, n, to.v, SPREAD_ROW,
             round_up(n, std::max<int64_t>(PANEL, 16))});
  ahead.add({a.out + p.b * a.out_batch + s.from * a.out_token + h * a.out_head + p.c0, a.out_token, tokens, n, nullptr,
             0, n});
}

// Heads that one after another use the same rows of q and k, which channels' decays change.
int64_t alike(const LinearRecurrenceArgs& a) { return a.by_channel ? 1 : a.group; }

// What comes after head h of tokens `now`: the next head, or the first one of the tokens `next`. Heads alike stage a part
// each of q and k of those after them.
Ahead ahead_of(const LinearRecurrenceArgs& a, const Piece& p, int64_t h, const Span& now, const Span& next,
               Staged& staged) {
  Ahead ahead;
  const int64_t few = alike(a), begin = std::max(p.h0, h / few * few), end = std::min(p.h1, (h / few + 1) * few);
  const bool last = h + 1 == p.h1, last_group = end == p.h1;
  const Span& s = last_group ? next : now;
  const int64_t part = (h - begin) * (s.to - s.from) / (end - begin);
  const int64_t to = (h + 1 - begin) * (s.to - s.from) / (end - begin);
  stage_keys(a, p.b, (last_group ? p.h0 : end) / a.group, s.from, part, to - part, staged.keys[!staged.key], ahead);
  stage_values(a, p, last ? p.h0 : h + 1, last ? next : now, staged.values[!staged.value], ahead);
  return ahead;
}

template <bool BY_CHANNEL>
void chunk_of(const LinearRecurrenceArgs& a, const Piece& p, const Span& now, const Span& next, Scratch& scratch) {
  Chunk& c = scratch.chunk;
  Staged& staged = scratch.staged;
  Held held = scratch.held();
  c.tokens = now.to - now.from, c.width = a.width;
  for (int64_t h = p.h0; h < p.h1; ++h) {
    c.q = staged.keys[staged.key].q, c.k = staged.keys[staged.key].k;
    const Values& values = staged.values[staged.value];
    if (h == p.h0 || h % alike(a) == 0) meet_all<BY_CHANNEL>(a.beta, c);
    for (int64_t t = 0; t < c.tokens; ++t)
      c.beta[t] = a.beta ? a.beta[p.b * a.beta_batch + (now.from + t) * a.beta_token + h] : 0.0f;
    if (BY_CHANNEL) decay_channels(values.logs, ROW, a.beta, c);
    else decay_tokens(a.log_decay + p.b * a.decay_batch + now.from * a.decay_token + h * a.decay_head, a.decay_token,
                      a.beta, c);
    float* out = a.out + p.b * a.out_batch + now.from * a.out_token + h * a.out_head;
    float* state = a.state + (p.b * a.heads + h) * a.width * a.columns;
    Ahead ahead = ahead_of(a, p, h, now, next, staged);
    for (int64_t i = p.c0; i < p.c1; i += PANEL) {
      const int64_t n = std::min<int64_t>(PANEL, p.c1 - i);
      alignas(64) float made[TOKENS * PANEL];  // of columns that are no whole panel
      const Columns at = {values.v + i - p.c0, SPREAD_ROW, held.of(p, h, i, a.width), n < PANEL ? made : out + i,
                          n < PANEL ? PANEL : a.out_token};
      if (columns_of(c, at, a.beta, ahead)) {
        if (n < PANEL) put_rows(made, c.tokens, n, out + i, a.out_token);
        continue;
      }
      put_rows(at.held, a.width, n, state + i, a.columns);
      walk_columns<BY_CHANNEL>(a, {p.b, h, now.from, now.to, false}, i, i + n);
      take_rows(state + i, a.columns, a.width, n, at.held);
    }
    ahead.finish();
    staged.value ^= 1;
    staged.key ^= h + 1 == p.h1 || (h + 1) % alike(a) == 0;
  }
}

template <bool BY_CHANNEL>
void run_chunks(const LinearRecurrenceArgs& a, const Piece& p, int64_t count, bool begins, float* memory) {
  Scratch& scratch = *new (memory) Scratch;
  Staged& staged = scratch.staged;
  const Held held = scratch.held();
  each_panel(a, p, held, [&](const float* state, float* panel, int64_t n) {
    if (begins) std::memset(panel, 0, size_t(a.width * PANEL) * 4);
    else take_rows(state, a.columns, a.width, n, panel);
  });
  const int64_t chunks = (count + TOKENS - 1) / TOKENS;
  const auto begin = [&](int64_t i) { return count * std::min(i, chunks) / chunks; };
  Ahead first;
  stage_keys(a, p.b, p.h0 / a.group, 0, 0, begin(1), staged.keys[0], first);
  stage_values(a, p, p.h0, {0, begin(1)}, staged.values[0], first);
  first.finish();
  for (int64_t i = 0; i < chunks; ++i)
    chunk_of<BY_CHANNEL>(a, p, {begin(i), begin(i + 1)}, {begin(i + 1), begin(i + 2)}, scratch);
  each_panel(a, p, held, [&](float* state, const float* panel, int64_t n) {
    put_rows(panel, a.width, n, state, a.columns);
  });
}

template <bool BY_CHANNEL> void run_piece(const LinearRecurrenceArgs& a, const Piece& p, float* scratch) {
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
    run_chunks<BY_CHANNEL>(a, p, count, begins, scratch);
  }
}

}  // namespace

// Floats of scratch for one thread.
extern "C" int64_t forebay_linear_recurrence_scratch(int64_t tokens, int64_t heads, int64_t width, int64_t columns) {
  return scratch_floats(tokens, heads, width, columns);
}

// Needs dense last dimensions, a dense state, a width of MOST_WIDTH at most, and scratch for one worker at least.
extern "C" int forebay_linear_recurrence(const LinearRecurrenceArgs* a, float* scratch, int64_t floats, int threads) {
  const int64_t each = scratch_floats(a->tokens, a->heads, a->width, a->columns);
  const int64_t workers = each ? std::min<int64_t>(threads, floats / each) : threads;
  if (a->width > MOST_WIDTH || workers < 1) return 1;
  if (!a->heads) return 0;
  // tasks enough for all threads: few heads are cut by columns, of many some go together
  const int64_t heads = a->batch * a->heads, wanted = 4 * workers;
  const int64_t wides = std::max<int64_t>(1, (a->columns + WIDE - 1) / WIDE);
  const int64_t cut = std::clamp<int64_t>(wanted / std::max<int64_t>(heads, 1), 1, wides);
  const bool chunked = a->tokens >= FEW_TOKENS;
  const int64_t most_wides = chunked ? SPREAD / WIDE : wides, part = std::min((wides + cut - 1) / cut, most_wides);
  const int64_t parts = (wides + part - 1) / part;
  const int64_t held = panel_floats(a->width, a->columns);
  int64_t run = std::clamp<int64_t>(heads / wanted, 1, std::clamp<int64_t>(HELD / held, 1, a->heads));
  if (run > a->group) run -= run % a->group;  // heads that share q and k stay together, or are cut apart from others
  const int64_t cut_of = run < a->group ? a->group : a->heads, runs = (cut_of + run - 1) / run;
  const int64_t tasks = a->batch * (a->heads / cut_of) * runs * parts;
  std::atomic<int64_t> next{0};
  parallel_for(std::min(workers, tasks), threads, heads * a->columns * (a->tokens + 1) * a->width / 128,
               [&](int64_t worker) {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
      const int64_t c = i % parts * part * WIDE, r = i / parts % runs * run, of = i / parts / runs;
      const int64_t b = of / (a->heads / cut_of), h = of % (a->heads / cut_of) * cut_of;
      const Piece piece = {b, h + r, h + std::min(cut_of, r + run), c, std::min(a->columns, c + part * WIDE)};
      if (a->by_channel) run_piece<true>(*a, piece, scratch + worker * each);
      else run_piece<false>(*a, piece, scratch + worker * each);
    }
  });
  return 0;
}
