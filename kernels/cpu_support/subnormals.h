// Products of many decays become subnormal, which some processors multiply a hundred times slower than other numbers.
#pragma once

#include <cstdint>

#include "micro.h"

namespace forebay {

// While it lives, subnormal numbers count as 0 on the calling thread, read or made.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(control()) { set(before_ | FLUSH); }
  ~WithoutSubnormals() { set(before_); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  WithoutSubnormals& operator=(const WithoutSubnormals&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  static constexpr uint64_t FLUSH = 0x8040;  // of MXCSR: results, and operands
  static uint64_t control() { return _mm_getcsr(); }
  static void set(uint64_t bits) { _mm_setcsr(uint32_t(bits)); }
#elif defined(__aarch64__)
  static constexpr uint64_t FLUSH = 1 << 24;  // of FPCR
  static uint64_t control() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void set(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits) : "memory"); }
#else
  static constexpr uint64_t FLUSH = 0;
  static uint64_t control() { return 0; }
  static void set(uint64_t) {}
#endif
  uint64_t before_;
};

}  // namespace forebay
