// Weights, keys and values that are read once are called into the caches before their use, in the order in which they
// lie: rows read side by side are as many streams for the processor, which it follows at half of the memory's rate or
// less.
#pragma once

#include <algorithm>

#include "micro.h"

namespace forebay {

// How far ahead of its use a line is called into L2, where few rows of x meet weights. Two cores of Zen 4 decode a model of
// 0.7 GB in w4g32 1.12 to 1.18 times as fast so as with 8 KiB into L1, where they wait for room to ask in; with 4 or 32
// KiB it is between. One core reads at 5 to 9 GB/s if left to itself, at 22 to 26 so. What lies beyond does no harm.
constexpr int64_t AHEAD_NBYTES = 16384;

// Calls `nbytes` that are read so much later in.
FB_INLINE void call_ahead(const void* reading, int64_t nbytes) {
  FB_UNROLL for (int64_t b = 0; b < nbytes; b += 64)
    __builtin_prefetch(static_cast<const char*>(reading) + AHEAD_NBYTES + b, 0, 2);
}

// To be called before the first of rows that are read so.
FB_INLINE void begin_reading(const void* rows, int64_t nbytes) {
  for (int64_t b = 0; b < std::min(AHEAD_NBYTES, nbytes); b += 64)
    __builtin_prefetch(static_cast<const char*>(rows) + b, 0, 2);
}

// Calls bytes [begin, end) from `at` on into L2: a panel and rows of x pass through L1 meanwhile.
FB_INLINE void call_in(const void* at, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; b += 64) __builtin_prefetch(static_cast<const char*>(at) + b, 0, 2);
}

}  // namespace forebay
