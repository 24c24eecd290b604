// A chunk of a head: rows of q and k, their products, and what decays make of them, for all columns of the state.
#pragma once

#include "panels.h"
#include "token_by_token.h"

namespace {

constexpr int64_t TOKENS = 64;        // of a chunk, at most
constexpr int64_t CHUNK_WIDTH = 256;  // widest keys of chunks
constexpr int64_t SPREAD = 128;       // columns of a head that a task takes, at most
constexpr int64_t SPREAD_ROW = apart(4 * SPREAD) / 4;
constexpr int64_t STEPS = 16;          // of a sum, between lines that are called in
constexpr int64_t ROW = apart(4 * CHUNK_WIDTH) / 4;

struct Keys { alignas(64) float q[TOKENS * ROW], k[TOKENS * ROW]; };  // zeros after the width, to a whole cache line
struct Values { alignas(64) float v[TOKENS * SPREAD_ROW], logs[TOKENS * ROW]; };  // `logs` of channels' decays

struct Chunk {
  float *q, *k;  // of a Keys
  alignas(64) float turned[CHUNK_WIDTH * TOKENS];      // k by channels, [width, TOKENS]; zeros after the tokens
  alignas(64) float kk[TOKENS * TOKENS], qk[TOKENS * TOKENS];  // [t, i]: the products of token t with k[i], i <= t
  alignas(64) float corrects[TOKENS * TOKENS];  // [t, i]: what of u[i] is added to u[t]
  alignas(64) float adds[TOKENS * TOKENS];      // and to out[t]
  alignas(64) float from_begin[TOKENS], to_end[TOKENS], whole[CHUNK_WIDTH], beta[TOKENS];
  int64_t tokens, width;
};

// Rows that are read or written next. Between products, as many as these hide, cache lines are called in, and those of
// rows that are read are put together soon after: rows of one head lie whole pages apart, and many share a set of L2.
class Ahead {
 public:
  struct Rows { const float* at; int64_t stride, rows, width; float* to; int64_t to_stride, padded; };

  void add(const Rows& rows) {
    if (rows.rows <= 0 || rows.width <= 0) return;
    sets_[count_++] = rows;
    if (rows.to) placed_ = count_;  // those that stay where they are come last
  }
  void call() {
    for (int i = 0; i < LINES; ++i)
      next(called_, count_, [](const Rows& s, int64_t row, int64_t column) {
        __builtin_prefetch(s.at + row * s.stride + column, 0, 2);
      });
    if (lag_ < LAG) ++lag_;
    else put(LINES);
  }
  void finish() { while (put(LINES)) {} }

 private:
  static constexpr int LINES = 4, LAG = 4;
  static constexpr int64_t LINE = 16;
  struct Place { int set; int64_t row, column; };

  // The line at a place, if any is left of `sets`, and on to the next.
  template <class F> bool next(Place& p, int sets, const F& f) {
    if (p.set == sets) return false;
    const Rows& s = sets_[p.set];
    f(s, p.row, p.column);
    if ((p.column += LINE) < s.padded) return true;
    p.column = 0;
    if (++p.row == s.rows) p.row = 0, ++p.set;
    return true;
  }
  bool put(int lines) {
    bool left = true;
    for (int i = 0; i < lines; ++i)
      left = next(put_, placed_, [](const Rows& s, int64_t row, int64_t column) {
        const float* from = s.at + row * s.stride + column;
        float* to = s.to + row * s.to_stride + column;
        FB_UNROLL for (int64_t j = 0; j < LINE; j += VL) {
          const int64_t n = s.width - column - j;
          store(to + j, n >= VL ? load(from + j) : load_partial(from + j, int(std::max<int64_t>(0, n))));
        }
      });
    return left;
  }

  Rows sets_[5];
  int count_ = 0, placed_ = 0, lag_ = 0;
  Place called_ = {}, put_ = {};
};

// acc[MB, PANEL] += x[MB, k] times a panel, during which lines are called in.
template <int MB>
FB_INLINE void sums(const float* x, int64_t xs, const float* panel, int64_t k, vf (&acc)[MB][2], Ahead& ahead) {
  int64_t i = 0;
  for (; i + STEPS <= k; i += STEPS) {
    panel_sums<MB>(x + i, xs, panel + i * PANEL, PANEL, STEPS, acc);
    ahead.call();
  }
  panel_sums<MB>(x + i, xs, panel + i * PANEL, PANEL, k - i, acc);
}

// c[m, PANEL] += x[m, k] times a panel of k rows, `ps` apart.
FB_INLINE void meet(const float* x, int64_t xs, const float* panel, int64_t m, int64_t k, float* c, int64_t cs,
                    int64_t ps) {
  for (int64_t i = 0; i < k; i += DEPTH)
    equal_blocks(0, m, [&](auto rows, int64_t r) {
      constexpr int MB = decltype(rows)::value;
      panel_block<MB>(x + r * xs + i, xs, panel + i * ps, std::min(DEPTH, k - i), c + r * cs, cs, ps);
    });
}

FB_INLINE void scale_row(float* row, const float* by, int64_t n) {
  for (int64_t i = 0; i < n; i += VL) store(row + i, load(row + i) * load(by + i));
}

// n rows [.., ROW] of up to 8 tokens as so many columns [width, TOKENS].
FB_INLINE void turn_rows(const float* rows, int64_t n, int64_t width, float* columns) {
  int64_t i = 0;
#if defined(__AVX__) || defined(__aarch64__)
  for (; n == 8 && i + 8 <= width; i += 8) transpose8(rows + i, ROW, columns + i * TOKENS, TOKENS);
#endif
  for (; i < width; ++i)
    for (int64_t t = 0; t < n; ++t) columns[i * TOKENS + t] = rows[t * ROW + i];
}

// What a chunk's rows of q and k give: their panels, and their products where decays are apart.
template <bool BY_CHANNEL> void meet_all(bool corrects, Chunk& c) {
  std::memset(c.kk, 0, size_t(c.tokens * TOKENS) * 4);
  std::memset(c.qk, 0, size_t(c.tokens * TOKENS) * 4);
  if (BY_CHANNEL) return;
  if (c.tokens < TOKENS) std::memset(c.turned, 0, size_t(c.width * TOKENS) * 4);
  for (int64_t t = 0; t < c.tokens; t += 8)
    turn_rows(c.k + t * ROW, std::min<int64_t>(8, c.tokens - t), c.width, c.turned + t);
  for (int64_t t = 0; t < c.tokens; t += PANEL) {
    const int64_t m = c.tokens - t, at = t * TOKENS + t;
    if (corrects) meet(c.k + t * ROW, ROW, c.turned + t, m, c.width, c.kk + at, TOKENS, TOKENS);
    meet(c.q + t * ROW, ROW, c.turned + t, m, c.width, c.qk + at, TOKENS, TOKENS);
  }
}

// One decay a token: of products known already. Numbers for tokens that come after, which are 0, are made to the end of
// a block of rows that are multiplied together.
inline void decay_tokens(const float* logs, int64_t logs_token, bool corrects, Chunk& c) {
  alignas(64) float by[TOKENS] = {}, decay[TOKENS] = {};
  for (int64_t t = 0; t < c.tokens; ++t) decay[t] = logs[t * logs_token];
  for (int64_t t = 0; t < c.tokens; t += VL) store(decay + t, exp_nonpositive(load(decay + t)));
  float begin = 1.0f;
  for (int64_t t = 0; t < c.tokens; ++t) {
    c.from_begin[t] = begin *= decay[t];
    const int64_t end = std::min(c.tokens, t + MOST_ROWS);
    for (int64_t i = 0; i < end; i += VL) {
      const vf passed = load(by + i) * decay[t];
      store(by + i, passed);
      if (corrects) store(c.corrects + t * TOKENS + i, -c.beta[t] * passed * load(c.kk + t * TOKENS + i));
    }
    by[t] = 1.0f;
    for (int64_t i = 0; i < end; i += VL) store(c.adds + t * TOKENS + i, load(by + i) * load(c.qk + t * TOKENS + i));
  }
  std::memcpy(c.to_end, by, sizeof by);
  std::fill(c.whole, c.whole + c.width, begin);
}

}  // namespace
