// Weights that are read once are called into the caches before their use, in the order in which they lie: rows read side
// by side are as many streams for the processor, which it follows at half of the memory's rate or less.
#pragma once

#include <algorithm>

#include "micro.h"

namespace forebay {

// How far ahead of its use a line is called into L1, where few rows of x meet weights. One core of Zen 4 reads w4g64 at 22
// to 26 GB/s so, at 16 to 22 with 2 or 4 KiB, and at 5 to 9 if left to itself. What lies beyond the weights does no harm.
constexpr int64_t AHEAD_NBYTES = 8192;

// Calls `nbytes` that are read so much later into L1.
FB_INLINE void call_ahead(const void* reading, int64_t nbytes) {
  FB_UNROLL for (int64_t b = 0; b < nbytes; b += 64)
    __builtin_prefetch(static_cast<const char*>(reading) + AHEAD_NBYTES + b);
}

// To be called before the first of rows that are read so.
FB_INLINE void begin_reading(const void* rows, int64_t nbytes) {
  for (int64_t b = 0; b < std::min(AHEAD_NBYTES, nbytes); b += 64)
    __builtin_prefetch(static_cast<const char*>(rows) + b);
}

// Calls bytes [begin, end) from `at` on into L2: a panel and rows of x pass through L1 meanwhile.
FB_INLINE void call_in(const void* at, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; b += 64) __builtin_prefetch(static_cast<const char*>(at) + b, 0, 2);
}

}  // namespace forebay
