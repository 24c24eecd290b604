// What kernels for AVX-512 share: transposes, sums of lanes, loads of a few bytes.
#pragma once

#include "micro.h"

#if defined(__AVX512F__)

namespace forebay {

// Word j of r[i] goes to word i of r[j].
FB_INLINE void transpose16(__m512i r[16]) {
  __m512i s[16];
  FB_UNROLL for (int i = 0; i < 16; i += 2) {
    s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  // Of four rows: words 0, 1, 2 and 3 of each quarter.
  FB_UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
  }
  FB_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(r[j], r[j + 4], 0x88), b = _mm512_shuffle_i32x4(r[j], r[j + 4], 0xdd),
                  c = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0x88),
                  d = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0xdd);
    s[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    s[j + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    s[j + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    s[j + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  FB_UNROLL for (int i = 0; i < 16; ++i) r[i] = s[i];
}

// The first n (of at most 64) bytes at p, then zeros.
FB_INLINE __m512i load_bytes(const void* p, int64_t n) {
#if defined(__AVX512BW__)
  if (n < 64) return _mm512_maskz_loadu_epi8(n > 0 ? (1ull << n) - 1 : 0, p);
#else
  if (n < 64) {
    alignas(64) uint8_t held[64] = {};
    if (n > 0) std::memcpy(held, p, size_t(n));
    return _mm512_load_si512(held);
  }
#endif
  return _mm512_loadu_si512(p);
}

#if defined(__AVX512DQ__)
FB_INLINE __m256 half_sum(__m512 v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

// The sums of four vectors, and of one, in the same order.
FB_INLINE __m128 sum16(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(half_sum(a), half_sum(b)), _mm256_hadd_ps(half_sum(c), half_sum(d)));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
FB_INLINE float sum16(__m512 v) { return _mm_cvtss_f32(sum16(v, v, v, v)); }
#endif

}  // namespace forebay
#endif
