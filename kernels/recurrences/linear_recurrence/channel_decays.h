// A decay for each channel of each token. Products of tokens are made of rows that are decayed since a begin, and of
// columns that are decayed until there, so that no decay is divided by another. Begins are those of a few tokens, of a
// panel of PANEL, and of the chunk.
#pragma once

#include "chunk.h"

namespace {

constexpr int64_t NEAR = 8;  // tokens whose products with each other are made channel by channel

// The products of NEAR tokens with each other, from rows of q and k [NEAR, ROW], into rows of kk and qk. Rows become
// decayed since before the first, `keys` k decayed until after the last, `decays` those of all tokens up to each.
inline void meet_near(float* q, float* k, int64_t width, float* decays, float* keys, float* kk, float* qk) {
  FB_UNROLL for (int t = 0; t < NEAR; ++t) {
    vf sum[2 * NEAR] = {};  // of kk and qk
    for (int64_t c = 0; c < width; c += VL) {
      const vf decay = load(decays + t * ROW + c), query = load(q + t * ROW + c), key = load(k + t * ROW + c);
      FB_UNROLL for (int i = 0; i < t; ++i) {
        const vf now = load(keys + i * ROW + c) * decay;
        store(keys + i * ROW + c, now);
        sum[i] += now * key;
        sum[NEAR + i] += now * query;
      }
      sum[NEAR + t] += key * query;
      store(keys + t * ROW + c, key);
      const vf since = t ? load(decays + (t - 1) * ROW + c) * decay : decay;
      store(decays + t * ROW + c, since);
      store(q + t * ROW + c, query * since);
      store(k + t * ROW + c, key * since);
    }
    alignas(64) float made[2 * NEAR];
    FB_UNROLL for (int i = 0; i < 2 * NEAR; i += VL)
      store(made + i, lane_sums(reinterpret_cast<vf(&)[VL]>(sum[i])));
    std::memcpy(kk + t * TOKENS, made, NEAR * 4);
    std::memcpy(qk + t * TOKENS, made + NEAR, NEAR * 4);
  }
}

// The products of NEAR tokens with n of their panel before them, of which `columns` are k.
template <int NV> FB_INLINE void meet_vectors(const float* x, const float* columns, int64_t width, int64_t n, float* to) {
  vf acc[NEAR][NV] = {};
  for (int64_t i = 0; i < width; ++i) {
    vf w[NV];
    FB_UNROLL for (int v = 0; v < NV; ++v) w[v] = load(columns + i * TOKENS + v * VL);
    FB_UNROLL for (int t = 0; t < NEAR; ++t)
      FB_UNROLL for (int v = 0; v < NV; ++v) acc[t][v] += x[t * ROW + i] * w[v];
  }
  FB_UNROLL for (int t = 0; t < NEAR; ++t)
    for (int64_t i = 0; i < n; i += NEAR)
      std::memcpy(to + t * TOKENS + i, reinterpret_cast<const float*>(acc[t]) + i, NEAR * 4);
}

FB_INLINE void meet_before(const float* x, const float* columns, int64_t width, int64_t n, float* to) {
  if (n <= VL) meet_vectors<1>(x, columns, width, n, to);
  else meet_vectors<PANEL / VL>(x, columns, width, n, to);
}

// Columns [0, n) of [width, TOKENS], whole vectors, decayed by a number a row.
FB_INLINE void decay_columns(float* columns, int64_t n, const float* by, int64_t width) {
  for (int64_t i = 0; i < width; ++i)
    for (int64_t j = 0; j < n; j += VL)
      store(columns + i * TOKENS + j, load(columns + i * TOKENS + j) * by[i]);
}

// Tokens [begin, end) of a panel with each other; `since` becomes the decay of all of them.
inline void meet_panel(const float* logs, int64_t logs_token, bool corrects, int64_t begin, int64_t end, Chunk& c,
                       float* since) {
  alignas(64) float keys[NEAR * ROW], decayed[NEAR * ROW];
  const float* all = decayed + (NEAR - 1) * ROW;
  for (int64_t i = 0; i < c.width; ++i) std::memset(c.turned + i * TOKENS + begin, 0, PANEL * 4);
  std::fill(since, since + CHUNK_WIDTH, 1.0f);
  for (int64_t t = begin; t < end; t += NEAR) {
    for (int64_t i = 0; i < NEAR; ++i)
      if (t + i < end) decays<true>(logs + (t + i) * logs_token, c.width, decayed + i * ROW);
      else std::fill(decayed + i * ROW, decayed + (i + 1) * ROW, 1.0f);
    float *q = c.q + t * ROW, *k = c.k + t * ROW;
    meet_near(q, k, c.width, decayed, keys, c.kk + t * TOKENS + t, c.qk + t * TOKENS + t);
    if (t > begin) {
      const int64_t at = t * TOKENS + begin;
      if (corrects) meet_before(k, c.turned + begin, c.width, t - begin, c.kk + at);
      meet_before(q, c.turned + begin, c.width, t - begin, c.qk + at);
      for (int64_t i = 0; i < NEAR; ++i) {
        scale_row(q + i * ROW, since, c.width);
        scale_row(k + i * ROW, since, c.width);
      }
      decay_columns(c.turned + begin, round_up(t - begin, VL), all, c.width);
    }
    turn_rows(keys, NEAR, c.width, c.turned + t);
    scale_row(since, all, c.width);
  }
}

inline void decay_channels(const float* logs, int64_t logs_token, bool corrects, Chunk& c) {
  alignas(64) float since[CHUNK_WIDTH];
  const int64_t whole = round_up(c.tokens, NEAR), padded = round_up(c.width, VL);
  for (int64_t t = c.tokens; t < whole; ++t) {
    std::fill(c.q + t * ROW, c.q + t * ROW + padded, 0.0f);
    std::fill(c.k + t * ROW, c.k + t * ROW + padded, 0.0f);
  }
  std::fill(c.whole, c.whole + CHUNK_WIDTH, 1.0f);
  for (int64_t begin = 0; begin < c.tokens; begin += PANEL) {
    const int64_t end = std::min<int64_t>(c.tokens, begin + PANEL);
    meet_panel(logs, logs_token, corrects, begin, end, c, since);
    for (int64_t p = 0; p < begin; p += PANEL) {
      const int64_t at = begin * TOKENS + p;
      if (corrects) meet(c.k + begin * ROW, ROW, c.turned + p, end - begin, c.width, c.kk + at, TOKENS, TOKENS);
      meet(c.q + begin * ROW, ROW, c.turned + p, end - begin, c.width, c.qk + at, TOKENS, TOKENS);
    }
    decay_columns(c.turned, begin, since, c.width);
    for (int64_t t = begin; t < end && begin; ++t) {
      scale_row(c.q + t * ROW, c.whole, c.width);
      scale_row(c.k + t * ROW, c.whole, c.width);
    }
    scale_row(c.whole, since, c.width);
  }
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t i = 0; i < c.tokens; i += VL) {
      store(c.corrects + t * TOKENS + i, -c.beta[t] * load(c.kk + t * TOKENS + i));
      store(c.adds + t * TOKENS + i, load(c.qk + t * TOKENS + i));
    }
    c.from_begin[t] = c.to_end[t] = 1.0f;
  }
}

}  // namespace
