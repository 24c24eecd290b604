// A chunk of a head: rows of q and k, their products, and what decays make of them, for all columns of the state.
#pragma once

#include "panels.h"
#include "token_by_token.h"

namespace {

constexpr int64_t TOKENS = 64;        // of a chunk, at most
constexpr int64_t CHUNK_WIDTH = 256;  // widest keys of chunks
constexpr int64_t ROW = apart(4 * CHUNK_WIDTH) / 4;

struct Chunk {
  alignas(64) float q[TOKENS * ROW], k[TOKENS * ROW];  // zeros after the width, to a whole vector
  alignas(64) float turned[CHUNK_WIDTH * TOKENS];      // k by channels, [width, TOKENS]; zeros after the tokens
  alignas(64) float kk[TOKENS * TOKENS], qk[TOKENS * TOKENS];  // [t, i]: the products of token t with k[i], i <= t
  alignas(64) float corrects[TOKENS * TOKENS];  // [t, i]: what of u[i] is added to u[t]
  alignas(64) float adds[TOKENS * TOKENS];      // and to out[t]
  alignas(64) float from_begin[TOKENS], to_end[TOKENS], whole[CHUNK_WIDTH], beta[TOKENS];
  int64_t tokens, width;
};

// Rows that are read or written next: their cache lines are called in between products, as many as these hide.
class Ahead {
 public:
  void add(const float* at, int64_t stride, int64_t rows, int64_t width) {
    if (rows > 0) sets_[count_++] = {at, stride, rows, width};
  }
  void call() {
    for (int left = LINES; left > 0 && set_ < count_; --left) {
      const Rows& s = sets_[set_];
      __builtin_prefetch(s.at + row_ * s.stride + column_, 0, 2);
      if ((column_ += 16) < s.width) continue;
      column_ = 0;
      if (++row_ == s.rows) row_ = 0, ++set_;
    }
  }

 private:
  static constexpr int LINES = 8;
  struct Rows { const float* at; int64_t stride, rows, width; };
  Rows sets_[5];
  int count_ = 0, set_ = 0;
  int64_t row_ = 0, column_ = 0;
};

// c[m, PANEL] += x[m, k] times a panel of k rows, `ps` apart.
FB_INLINE void meet(const float* x, int64_t xs, const float* panel, int64_t m, int64_t k, float* c, int64_t cs,
                    int64_t ps) {
  for (int64_t i = 0; i < k; i += DEPTH)
    equal_blocks(0, m, [&](auto rows, int64_t r) {
      constexpr int MB = decltype(rows)::value;
      panel_block<MB>(x + r * xs + i, xs, panel + i * ps, std::min(DEPTH, k - i), c + r * cs, cs, ps);
    });
}

// n numbers, and zeros after them to a whole vector.
FB_INLINE void copy_row(const float* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store(to + i, load(from + i));
  if (i < n) store(to + i, load_partial(from + i, int(n - i)));
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

// A chunk's tokens, from `from` on, of k head `few`: rows, their panels, and their products where decays are apart.
template <bool BY_CHANNEL> void take(const LinearRecurrenceArgs& a, int64_t b, int64_t few, int64_t from, Chunk& c) {
  const float* q = a.q + b * a.q_batch + from * a.q_token + few * a.q_head;
  const float* k = a.k + b * a.k_batch + from * a.k_token + few * a.k_head;
  for (int64_t t = 0; t < c.tokens; ++t) {
    copy_row(q + t * a.q_token, c.width, c.q + t * ROW);
    copy_row(k + t * a.k_token, c.width, c.k + t * ROW);
  }
  std::memset(c.kk, 0, size_t(c.tokens * TOKENS) * 4);
  std::memset(c.qk, 0, size_t(c.tokens * TOKENS) * 4);
  if (BY_CHANNEL) return;
  if (c.tokens < TOKENS) std::memset(c.turned, 0, size_t(c.width * TOKENS) * 4);
  for (int64_t t = 0; t < c.tokens; t += 8)
    turn_rows(c.k + t * ROW, std::min<int64_t>(8, c.tokens - t), c.width, c.turned + t);
  for (int64_t t = 0; t < c.tokens; t += PANEL) {
    const int64_t m = c.tokens - t, at = t * TOKENS + t;
    if (a.beta) meet(c.k + t * ROW, ROW, c.turned + t, m, c.width, c.kk + at, TOKENS, TOKENS);
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
