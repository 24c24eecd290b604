// The running softmax (softmax_rows.h) of many rows whose probabilities are rounded to bf16, as attention on matrix
// instructions rounds them everywhere: AVX-512, a third of the instructions.
#pragma once

#include "bf16_products.h"
#include "softmax_rows.h"

#if FB_BF16
namespace forebay {

// 2^x for x <= 0, relative error 4e-6; 0 far below.
FB_INLINE __m512 exp2_nonpositive(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // the second where one is NaN
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(0.00957007737f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0559178307f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240247451f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693121818f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

constexpr int64_t ROUNDED_STEP = 128;  // cache positions per step

// Bits [low, high) of 64, of which any may lie outside.
FB_INLINE uint64_t bits_between(int64_t low, int64_t high) {
  const auto below = [](int64_t n) { return n >= 64 ? ~0ull : n <= 0 ? 0ull : (1ull << n) - 1; };
  return below(high) & ~below(low);
}

// scores[0, n), n at most ROUNDED_STEP, become probabilities relative to the running maximum, rounded to bf16 in `to` and
// zeros up to row_nbytes(n); returns the factor for what was gathered before. The sum, of what was not rounded, is kept in
// lanes.
static float soften_rounded(const float* scores, int64_t n, Row& row, __m512& lanes, int64_t t0, float scale,
                            float softcap, char* to) {
  constexpr int STEPS = ROUNDED_STEP / 16;
  constexpr float none = -std::numeric_limits<float>::infinity(), log2e = 1.44269504f;
  const int64_t low = row.low - t0, high = std::min(row.high - t0, n);
  const uint64_t seen[2] = {bits_between(low, high), bits_between(low - 64, high - 64)};
  const auto lanes_of = [&](int i) { return __mmask16(seen[i / 4] >> 16 * (i % 4)); };
  __m512 s[STEPS], most = _mm512_set1_ps(none);
  FB_UNROLL for (int i = 0; i < STEPS; ++i) {
    s[i] = _mm512_maskz_loadu_ps(lanes_of(i), scores + 16 * i);
    if (softcap > 0) s[i] = (__m512)(tanh_of((vf)s[i] * scale / softcap) * softcap);
    else if (scale <= 0) s[i] = _mm512_mul_ps(s[i], _mm512_set1_ps(scale));
  }
  if (softcap > 0 || scale <= 0) scale = 1.0f;
  FB_UNROLL for (int i = 0; i < STEPS; ++i)
    most = _mm512_mask_max_ps(most, lanes_of(i), s[i], most);  // the second where one is NaN
  float factor = 1.0f;
  if (_mm512_cmp_ps_mask(_mm512_mul_ps(most, _mm512_set1_ps(scale)), _mm512_set1_ps(row.largest), _CMP_GT_OQ)) {
    const float largest = _mm512_reduce_max_ps(most) * scale;
    factor = row.largest == none ? 0.0f : std::exp(row.largest - largest);
    row.largest = largest;
  }
  const __m512 base = _mm512_set1_ps(row.largest == none ? 0.0f : -row.largest * log2e);
  __m512 sum = _mm512_mul_ps(lanes, _mm512_set1_ps(factor));
  FB_UNROLL for (int i = 0; i < STEPS; ++i) {
    const __m512 p = exp2_nonpositive(_mm512_fmadd_ps(s[i], _mm512_set1_ps(scale * log2e), base));
    s[i] = _mm512_maskz_mov_ps(lanes_of(i), p);
    sum = _mm512_add_ps(sum, s[i]);
  }
  lanes = sum;
  const char* end = to + bf16_products::row_nbytes(n);
  FB_UNROLL for (int i = 0; i < STEPS; i += 2, to += 64)
    if (to < end) _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(s[i + 1], s[i]));
  if (to < end) std::memset(to, 0, size_t(end - to));
  return factor;
}

}  // namespace forebay
#endif
