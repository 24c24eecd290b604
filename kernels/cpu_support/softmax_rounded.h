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

// scores[0, n), n at most SEGMENT_STEP, become probabilities relative to the running maximum, rounded to bf16 in `to` and
// zeros up to row_nbytes(n); returns the factor for what was gathered before. The sum is of what was not rounded.
static float soften_rounded(const float* scores, int64_t n, Row& row, int64_t t0, float scale, float softcap, char* to) {
  constexpr int STEPS = SEGMENT_STEP / 16;
  constexpr float none = -std::numeric_limits<float>::infinity();
  const int64_t low = std::clamp<int64_t>(row.low - t0, 0, n), high = std::clamp<int64_t>(row.high - t0, 0, n);
  const uint64_t below = high == 64 ? ~0ull : (1ull << high) - 1, seen = low == 64 ? 0 : below >> low << low;
  __m512 s[STEPS], most = _mm512_set1_ps(none);
  FB_UNROLL for (int i = 0; i < STEPS; ++i) {
    s[i] = _mm512_maskz_loadu_ps(__mmask16(seen >> 16 * i), scores + 16 * i);
    s[i] = _mm512_mul_ps(s[i], _mm512_set1_ps(scale));
    if (softcap > 0) s[i] = (__m512)(tanh_of((vf)s[i] / softcap) * softcap);
    most = _mm512_mask_max_ps(most, __mmask16(seen >> 16 * i), s[i], most);  // the second where one is NaN
  }
  const float here = _mm512_reduce_max_ps(most), largest = here > row.largest ? here : row.largest;
  const float base = largest == none ? 0.0f : largest;
  const float factor = row.largest == largest ? 1.0f : row.largest == none ? 0.0f : std::exp(row.largest - base);
  __m512 sum = _mm512_setzero_ps();
  FB_UNROLL for (int i = 0; i < STEPS; ++i) {
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(s[i], _mm512_set1_ps(base)), _mm512_set1_ps(1.44269504f));
    s[i] = _mm512_maskz_mov_ps(__mmask16(seen >> 16 * i), exp2_nonpositive(x));
    sum = _mm512_add_ps(sum, s[i]);
  }
  const char* end = to + bf16_products::row_nbytes(n);
  FB_UNROLL for (int i = 0; i < STEPS; i += 2, to += 64)
    if (to < end) _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(s[i + 1], s[i]));
  if (to < end) std::memset(to, 0, size_t(end - to));
  row.sum = row.sum * factor + _mm512_reduce_add_ps(sum);
  row.largest = largest;
  return factor;
}

}  // namespace forebay
#endif
