// Threads that look for work for a while after each loop, and sleep only then. A decode step of a small model is hundreds
// of loops of 5 to 50 µs: waking an OpenMP thread for each (30 to 50 µs on a virtual machine, GOMP_SPINCOUNT=0) makes two
// threads slower than one. A thread that is late costs nothing: the caller does the loop meanwhile, and waits only for
// iterations that were taken.
#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace forebay {
namespace {

constexpr int64_t WAKING_NS = 20000;                     // waking a sleeper costs the caller some 5 µs
constexpr auto WATCH = std::chrono::microseconds(50);    // how long a thread looks for work before it sleeps
constexpr int PAUSES = 64;                               // between looks at the clock
// Of each thread, whatever `ulimit -s` says. Attention over packed rows keeps 0.33 MiB there, the most of all kernels: a
// caller's thread may have as little as 512 KiB.
constexpr size_t STACK_NBYTES = 1 << 20;
constexpr int PATIENCE = 1024;                           // pauses before the processor is offered to others
constexpr int PLACES = 64;                               // threads whose processors are known to each other
constexpr auto STAY = std::chrono::milliseconds(2);      // how long a thread stays where it has moved to, at least

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads that wake up on one processor share it until the system looks at it again, for 0.3 s as measured: a thread that
// finds itself where another of the team is goes elsewhere, as far as it may run there.
#if defined(__linux__)
inline int processor() { return sched_getcpu(); }
inline void leave(int processor) {
  cpu_set_t may, others;
  if (processor >= CPU_SETSIZE || sched_getaffinity(0, sizeof may, &may)) return;
  others = may;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others)) return;
  sched_setaffinity(0, sizeof may, &may);
}
#else
inline int processor() { return -1; }
inline void leave(int) {}
#endif

// The loop being run. A ticket is its number << 32 | iterations not yet taken. Who takes one (compare and exchange) knows
// that the loop is not over, so that what was read of it before is what was written for it: not what was before, which
// was overwritten ahead of the ticket that was read (acquire), nor what the next loop writes, which begins after the end
// of all that was taken (ended_). So it is on processors that order reads and writes weakly, such as ARM's, too.
class Team {
 public:
  void share(int64_t count, int threads, int64_t serial_ns, Task task, const void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) {  // another thread's loop has the team
      for (int64_t i = 0; i < count; ++i) task(context, i);
      return;
    }
    while (members_ < threads - 1 && !full_) full_ = !start(members_ + 1);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    threads_.store(threads, std::memory_order_relaxed);
    ended_.store(0, std::memory_order_relaxed);
    processors_[0].store(processor(), std::memory_order_relaxed);
    ticket_.store((number(ticket_.load(std::memory_order_relaxed)) + 1) << 32 | uint64_t(count));
    if (serial_ns >= WAKING_NS && sleeping_.load()) {
      { std::lock_guard<std::mutex> held(mutex_); }  // a thread about to sleep has seen the ticket or hears the call
      work_.notify_all();
    }
    for (uint64_t ticket = ticket_.load(); left(ticket);) take(ticket);
    for (int n = 0; ended_.load(std::memory_order_acquire) != count; ++n) n < PATIENCE ? pause() : (void)sched_yield();
    busy_.store(false, std::memory_order_release);
  }

  void rest() { resting_.store(number(ticket_.load(std::memory_order_relaxed)), std::memory_order_relaxed); }

 private:
  struct Member {
    Team* team;
    int number;
  };

  // Whether one more thread serves; where the system gives none, those there are (none at all, it may be) do the loops.
  bool start(int member) {
    pthread_attr_t how;
    if (pthread_attr_init(&how)) return false;
    pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&how, STACK_NBYTES);
    auto* mine = new (std::nothrow) Member{this, member};
    pthread_t thread;
    const bool made = mine && !pthread_create(&thread, &how, [](void* given) -> void* {
      const Member me = *static_cast<Member*>(given);
      delete static_cast<Member*>(given);
      me.team->serve(me.number);
      return nullptr;
    }, mine);
    pthread_attr_destroy(&how);
    if (made) members_ = member;
    else delete mine;
    return made;
  }

  static uint64_t number(uint64_t ticket) { return ticket >> 32; }
  static int64_t left(uint64_t ticket) { return int64_t(ticket & 0xffffffffu); }

  // Takes and runs one iteration unless another thread was quicker; `ticket` becomes the present one.
  void take(uint64_t& ticket) {
    const Task task = task_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    const int64_t count = count_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) return;
    task(context, count - left(ticket));
    ended_.fetch_add(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }

  // Whether another thread of the team was last seen on the processor that this one is on.
  bool crowded(int member) {
    const int here = processor();
    processors_[member].store(here, std::memory_order_relaxed);
    if (here < 0) return false;
    for (int i = 0; i < member; ++i)
      if (processors_[i].load(std::memory_order_relaxed) == here) return true;
    return false;
  }

  void serve(int member) {
    uint64_t ticket = 0;
    auto moved = std::chrono::steady_clock::now() - STAY;
    for (;;) {
      if (left(ticket) && member < PLACES && crowded(member)) {
        const auto now = std::chrono::steady_clock::now();
        if (now - moved >= STAY) leave(processors_[member].load(std::memory_order_relaxed)), moved = now;
      }
      while (left(ticket) && member < threads_.load(std::memory_order_relaxed)) take(ticket);
      ticket = wait(number(ticket));
    }
  }

  // The ticket of a loop after `last`.
  uint64_t wait(uint64_t last) {
    const auto end = std::chrono::steady_clock::now() + WATCH;
    do {
      for (int n = 0; n < PAUSES; ++n) {
        const uint64_t ticket = ticket_.load(std::memory_order_acquire);
        if (number(ticket) != last) return ticket;
        pause();
      }
    } while (resting_.load(std::memory_order_relaxed) != last && std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> held(mutex_);
    ++sleeping_;
    work_.wait(held, [&] { return number(ticket_.load()) != last; });
    --sleeping_;
    return ticket_.load(std::memory_order_acquire);
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> ended_{0};
  alignas(64) std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> count_{0};
  std::atomic<int> threads_{0};
  std::atomic<int> processors_[PLACES] = {};  // where threads were when they last began a loop
  alignas(64) std::atomic<uint64_t> resting_{0};  // the number of the loop after which nobody looks for work
  std::atomic<bool> busy_{false};
  int members_ = 0;
  bool full_ = false;  // a thread could not be started: none is tried again, which would cost every loop a system call
  std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable work_;
};

// Never destroyed, since its threads outlive main; a forked process has none of them and begins anew, in the same memory:
// none is asked for, since `bad_alloc` would end a process that calls from Python.
alignas(Team) unsigned char memory[sizeof(Team)];

void begin() { new (memory) Team; }

Team& the_team() {
  static const bool made = [] {
    begin();
    pthread_atfork(nullptr, nullptr, begin);
    return true;
  }();
  (void)made;
  return *std::launder(reinterpret_cast<Team*>(memory));
}

}  // namespace

void share(int64_t count, int threads, int64_t serial_ns, Task task, const void* context) {
  the_team().share(count, threads, serial_ns, task, context);
}

}  // namespace forebay

// Threads that look for work go to sleep now: the processors are wanted by others.
extern "C" void forebay_rest() { forebay::the_team().rest(); }
