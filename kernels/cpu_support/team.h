// A loop's iterations shared between the calling thread and threads that stand ready.
#pragma once

#include <cstdint>

namespace forebay {

// Shorter loops run on the calling thread alone: handing a part over and hearing of its end takes about 1 µs.
constexpr int64_t SHARED_NS = 3000;

using Task = void (*)(const void* context, int64_t i);
void share(int64_t count, int threads, int64_t serial_ns, Task task, const void* context);

// f(i) for i in [0, count), by up to `threads` threads, taken in ascending order. `serial_ns` is roughly what one thread
// alone would need. Ends when every call has ended.
template <class F> void parallel_for(int64_t count, int threads, int64_t serial_ns, const F& f) {
  if (threads < 2 || count < 2 || serial_ns < SHARED_NS) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  share(count, threads, serial_ns, [](const void* held, int64_t i) { (*static_cast<const F*>(held))(i); }, &f);
}

// The same in `threads` equal parts of [0, count): f(begin, end).
template <class F> void parallel_parts(int64_t count, int threads, int64_t serial_ns, const F& f) {
  const int64_t parts = serial_ns < SHARED_NS ? 1 : count < threads ? count : threads;
  parallel_for(parts, threads, serial_ns, [&](int64_t i) { f(count * i / parts, count * (i + 1) / parts); });
}

}  // namespace forebay
