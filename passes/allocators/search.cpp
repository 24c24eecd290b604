// Exact search for static memory allocation: lifetimes are given, offsets are free, one capacity.
//
// Time is a row of sections (the maximal sets of buffers live together). Every section keeps a floor: the top of what
// is placed there, below everything still to be placed. A buffer's earliest offset is the highest floor over its
// sections. A valley is a run of equal floors with higher floors, or no crossing buffer, on both sides: whatever lies
// directly on it lies wholly inside it, so for any section of a valley either one of the buffers whose earliest offset
// is the valley's floor lies there, or the floor of that section rises to the next offset that can occur. Branching on
// this loses no solution in which every buffer rests on another one, and each solution can be brought to that form.
//
// Exhausted states (unplaced buffers and floors of an independent run of sections) are remembered by a 64-bit hash
// across restarts; a collision could only lose a solution, never produce a wrong one.
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace {
using i32 = std::int32_t;
using i64 = std::int64_t;
using u64 = std::uint64_t;
using Clock = std::chrono::steady_clock;
using std::vector;

constexpr i64 kNone = INT64_MAX;
constexpr i64 kRoundNodes = 1000;    // nodes of the shortest round, which must place all; longer ones: the Luby sequence
constexpr int kMaxDepth = 20000;     // about 6 MB of stack; deeper rounds are given up, not proved
constexpr size_t kStackLeft = 64 << 10;  // of a thread's stack, whose size a shell's limit may set, not recursed into
constexpr double kNoise = 0.3;       // relative disorder of the buffer ordering after each strategy ran once
constexpr double kWeightGrowth = 1.1;  // later failures weigh more, per round
constexpr u64 kTableSize = u64{1} << 21;

u64 mix(u64 x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

i64 luby(int i) {  // 1 1 2 1 1 2 4 …, i counted from 1
  for (;;) {
    int p = 1;
    while ((1 << p) - 1 < i) p++;
    if ((1 << p) - 1 == i) return i64{1} << (p - 1);
    i -= (1 << (p - 1)) - 1;
  }
}

// The address below which this thread's stack is not to be used; null where the system does not tell.
const char* stack_end() {
#ifdef __linux__
  pthread_attr_t how;
  void* lowest = nullptr;
  size_t nbytes = 0;
  if (pthread_getattr_np(pthread_self(), &how)) return nullptr;
  pthread_attr_getstack(&how, &lowest, &nbytes);
  pthread_attr_destroy(&how);
  return static_cast<char*>(lowest) + kStackLeft;
#else
  return nullptr;
#endif
}

enum class Order { kArea, kWidth, kSize, kTall };          // which buffer to try first; kTall = √width × size
enum class Section { kFewest, kNarrow, kConflicts };       // which section to branch on
struct Strategy {
  Order order;
  Section section;
  bool flush;  // prefer buffers that touch a wall of the valley
};
constexpr Strategy kStrategies[] = {
    {Order::kSize, Section::kConflicts, false}, {Order::kWidth, Section::kFewest, false},
    {Order::kTall, Section::kConflicts, false}, {Order::kArea, Section::kConflicts, true},
    {Order::kSize, Section::kFewest, false},    {Order::kWidth, Section::kConflicts, false},
    {Order::kSize, Section::kConflicts, true},  {Order::kArea, Section::kConflicts, false},
    {Order::kWidth, Section::kConflicts, true}, {Order::kArea, Section::kFewest, false},
    {Order::kTall, Section::kConflicts, true},  {Order::kArea, Section::kNarrow, false},
};
constexpr int kNumStrategies = sizeof(kStrategies) / sizeof(kStrategies[0]);

class Search {
 public:
  Search(int n, int m, const i32* lo, const i32* hi, const i64* size, i64 capacity)
      : n_(n), m_(m), lo_(lo), hi_(hi), size_(size), capacity_(capacity), live_(m), pos_(n), count_(m), cross_(m),
        floor_(m), sum_(m), earliest_(n), offset_(n), in_check_(m), in_raised_(m), weight_(m, 1.0), key_(n),
        ending_(m + 2), starting_(m + 2), hash_buffer_(n), hash_section_(m), table_(kTableSize) {
    for (int b = 0; b < n; b++) {
      hash_buffer_[b] = mix(mix(b) + 17);
      pos_[b].resize(hi[b] - lo[b]);
      for (int s = lo[b]; s < hi[b]; s++) {
        pos_[b][s - lo[b]] = static_cast<i32>(live_[s].size());
        live_[s].push_back(b);
        count_[s]++;
        sum_[s] += size[b];
        cross_[s] += s + 1 < hi[b];
      }
    }
    for (int s = 0; s < m; s++) hash_section_[s] = mix(mix(s) + 0xabcdef) | 1;
  }

  // 1: found, offsets() hold; 0: no allocation fits the capacity; -1: out of time.
  int run(double limit_s, u64 seed) {
    end_ = Clock::now() + std::chrono::microseconds(static_cast<i64>(limit_s * 1e6));
    random_ = seed;
    stack_end_ = stack_end();
    for (int s = 0; s < m_; s++) mark(s);
    if (!propagate()) return 0;
    const size_t root = trail_.size();
    for (int round = 0;; round++) {
      begin_round(round);
      if (components(0, m_, 0)) return 1;
      if (!stop_) return 0;
      undo(root);
      if (timeout_) return -1;
    }
  }
  const vector<i64>& offsets() const { return offset_; }
  i64 nodes() const { return nodes_; }
 private:
  enum class Kind : i32 { kFloor, kEarliest, kPlaced };
  struct Change {
    Kind kind;
    i32 index;
    i64 old;
  };

  int n_, m_;
  const i32 *lo_, *hi_;  // buffer b is live in sections [lo, hi)
  const i64* size_;
  i64 capacity_;
  vector<vector<i32>> live_;  // per section: the first count_ buffers are unplaced
  vector<vector<i32>> pos_;   // where buffer b stands in live_[lo + i]
  vector<i32> count_, cross_;  // unplaced buffers of section s; those also live in s + 1
  vector<i64> floor_, sum_;    // per section: height reached; bytes still to place
  vector<i64> earliest_, offset_;
  vector<Change> trail_;
  vector<i32> raised_, check_;  // sections whose floor rose; sections to re-examine
  vector<char> in_check_, in_raised_;
  vector<double> weight_, key_;  // failures per section; preference per buffer
  vector<i64> ending_, starting_;
  vector<std::pair<i64, i64>> sorted_;
  vector<u64> hash_buffer_, hash_section_, table_;
  Strategy strategy_{};
  double noise_ = 0, increment_ = 1;
  u64 random_ = 1;
  i64 nodes_ = 0, round_end_ = 0;
  const char* stack_end_ = nullptr;
  bool stop_ = false, timeout_ = false, backward_ = false;
  Clock::time_point end_;

  void begin_round(int round) {
    strategy_ = kStrategies[round % kNumStrategies];
    backward_ = (round + round / kNumStrategies) % 2;
    noise_ = round < kNumStrategies ? 0 : kNoise;
    round_end_ = nodes_ + std::max(kRoundNodes, i64{2} * n_) * luby(round / kNumStrategies + 1);
    stop_ = false;
    for (int b = 0; b < n_; b++) {
      const double width = hi_[b] - lo_[b], size = static_cast<double>(size_[b]);
      switch (strategy_.order) {
        case Order::kArea: key_[b] = width * size; break;
        case Order::kWidth: key_[b] = width + 1e-3 * size / static_cast<double>(capacity_); break;
        case Order::kSize: key_[b] = size; break;
        case Order::kTall: key_[b] = std::sqrt(width) * size; break;
      }
    }
    if ((increment_ *= kWeightGrowth) < 1e100) return;
    for (double& w : weight_) w *= 1e-100;
    increment_ *= 1e-100;
  }

  double uniform() {
    random_ = mix(random_);
    return static_cast<double>(random_ >> 11) * (1.0 / 9007199254740992.0);
  }

  void mark(int s) {
    if (!in_check_[s]) check_.push_back(s);
    in_check_[s] = 1;
  }
  void raise(int s, i64 height) {
    trail_.push_back({Kind::kFloor, s, floor_[s]});
    floor_[s] = height;
    if (!in_raised_[s]) raised_.push_back(s);
    in_raised_[s] = 1;
  }

  void clear_queues() {
    for (int s : raised_) in_raised_[s] = 0;
    for (int s : check_) in_check_[s] = 0;
    raised_.clear();
    check_.clear();
  }
  bool fail(int s) {
    weight_[s] += increment_;
    clear_queues();
    return false;
  }

  // Stacking a section's buffers in order of earliest offset gives the least height any order can reach.
  bool fits(int s) {
    const vector<i32>& live = live_[s];
    i64 last = 0;
    for (int i = 0, k = count_[s]; i < k; i++) last = std::max(last, earliest_[live[i]]);
    if (last + sum_[s] <= capacity_) return true;
    sorted_.clear();
    for (int i = 0, k = count_[s]; i < k; i++) sorted_.push_back({earliest_[live[i]], size_[live[i]]});
    std::sort(sorted_.begin(), sorted_.end());
    i64 top = 0;
    for (const auto& [start, size] : sorted_) top = std::max(top, start) + size;
    return top <= capacity_;
  }

  // Floors push earliest offsets up; the least earliest offset of a section is its floor; until nothing moves.
  bool propagate() {
    for (bool moved = true; moved;) {
      while (!raised_.empty()) {
        const int s = raised_.back();
        raised_.pop_back();
        in_raised_[s] = 0;
        const i64 height = floor_[s];
        if (count_[s] && height + sum_[s] > capacity_) return fail(s);
        for (int i = 0, k = count_[s]; i < k; i++) {
          const int b = live_[s][i];
          if (earliest_[b] >= height) continue;
          if (height + size_[b] > capacity_) return fail(s);
          trail_.push_back({Kind::kEarliest, b, earliest_[b]});
          earliest_[b] = height;
          for (int q = lo_[b]; q < hi_[b]; q++) mark(q);
        }
      }
      moved = false;
      for (int s : check_) {
        if (in_check_[s] != 1 || !count_[s]) continue;
        in_check_[s] = 2;
        i64 least = kNone;
        for (int i = 0, k = count_[s]; i < k; i++) least = std::min(least, earliest_[live_[s][i]]);
        if (least <= floor_[s]) continue;
        raise(s, least);
        moved = true;
      }
    }
    for (int s : check_)
      if (count_[s] && !fits(s)) return fail(s);
    clear_queues();
    return true;
  }

  void place(int b) {
    offset_[b] = earliest_[b];
    trail_.push_back({Kind::kPlaced, b, 0});
    for (int s = lo_[b]; s < hi_[b]; s++) {
      const int i = pos_[b][s - lo_[b]], j = --count_[s], moved = live_[s][j];
      std::swap(live_[s][i], live_[s][j]);
      pos_[moved][s - lo_[moved]] = i;
      pos_[b][s - lo_[b]] = j;
      sum_[s] -= size_[b];
      cross_[s] -= s + 1 < hi_[b];
      raise(s, offset_[b] + size_[b]);
      mark(s);
    }
  }

  void undo(size_t mark) {
    for (; trail_.size() > mark; trail_.pop_back()) {
      const auto [kind, i, old] = trail_.back();
      if (kind == Kind::kFloor) floor_[i] = old;
      if (kind == Kind::kEarliest) earliest_[i] = old;
      if (kind == Kind::kPlaced)
        for (int s = lo_[i]; s < hi_[i]; s++) {
          count_[s]++;
          sum_[s] += size_[i];
          cross_[s] += s + 1 < hi_[i];
        }
    }
  }

  u64 hash(int l, int r) const {
    u64 h = mix(static_cast<u64>(l) << 32 | static_cast<u64>(r));
    for (int s = l; s < r; s++) {
      h += hash_section_[s] * static_cast<u64>(floor_[s] + 1);
      for (int i = 0; i < count_[s]; i++)
        if (s == l || lo_[live_[s][i]] == s) h += hash_buffer_[live_[s][i]];
    }
    h = mix(h);
    return h ? h : 1;
  }

  // Runs of sections that no unplaced buffer joins are solved each by itself, shortest first.
  bool components(int l, int r, int depth) {
    vector<std::pair<i32, i32>> runs;
    for (int s = l, e; s < r; s = e) {
      for (e = s + 1; e < r && cross_[e - 1]; e++) {}
      if (count_[s]) runs.push_back({s, e});
    }
    std::stable_sort(runs.begin(), runs.end(),
                     [](const auto& a, const auto& b) { return a.second - a.first < b.second - b.first; });
    for (const auto& run : runs)
      if (!solve(run.first, run.second, depth)) return false;
    return true;
  }

  struct Branch {
    int section = -1, left = 0, right = 0;  // the section and its valley [left, right)
    i64 next = kNone;                       // height its floor rises to when nothing lies on it
    double score = 0;
  };

  // For each border of the valley: the lowest top of a buffer that ends by it, or starts at or after it.
  void tops_beside(int left, int right) {
    std::fill(ending_.begin() + left, ending_.begin() + right + 1, kNone);
    std::fill(starting_.begin() + left, starting_.begin() + right + 1, kNone);
    for (int s = left; s < right; s++)
      for (int i = 0; i < count_[s]; i++) {
        const int b = live_[s][i];
        const i64 top = earliest_[b] + size_[b];
        if (hi_[b] == s + 1) ending_[s + 1] = std::min(ending_[s + 1], top);
        if (lo_[b] == s) starting_[s] = std::min(starting_[s], top);
      }
    for (int s = left + 1; s <= right; s++) ending_[s] = std::min(ending_[s], ending_[s - 1]);
    for (int s = right - 1; s >= left; s--) starting_[s] = std::min(starting_[s], starting_[s + 1]);
  }

  void look_into(int left, int right, Branch& best) {
    const i64 height = floor_[left];
    bool have_tops = false;
    for (int s = left; s < right; s++) {
      if (s > left && count_[s] == count_[s - 1] && cross_[s - 1] == count_[s]) continue;  // the same live set
      int choices = 0;
      i64 next = kNone;
      for (int i = 0; i < count_[s]; i++) {
        const i64 start = earliest_[live_[s][i]];
        if (start == height) choices++;
        else next = std::min(next, start);
      }
      const i64 slack = capacity_ - height - sum_[s];
      if (slack > 0) {
        if (!have_tops) tops_beside(left, right);
        have_tops = true;
        next = std::min({next, ending_[s], starting_[s + 1]});
      }
      if (next == kNone || next - height > slack) next = kNone;
      else choices++;
      double score = choices;
      switch (strategy_.section) {
        case Section::kFewest: score += 0.99 * static_cast<double>(height) / static_cast<double>(capacity_); break;
        case Section::kNarrow: score += static_cast<double>(right - left) / (m_ + 1); break;
        case Section::kConflicts: score /= weight_[s]; break;
      }
      if (best.section < 0 || score < best.score || (backward_ && score == best.score))
        best = {s, left, right, next, score};
    }
  }

  Branch choose(int l, int r) {
    Branch best;
    for (int left = l; left < r;) {
      int right = left + 1;
      while (right < r && floor_[right] == floor_[left]) right++;
      if ((left == l || floor_[left - 1] > floor_[left]) && (right == r || floor_[right] > floor_[left]))
        look_into(left, right, best);
      left = right;
    }
    return best;
  }

  bool twin(int a, int b) const { return lo_[a] == lo_[b] && hi_[a] == hi_[b] && size_[a] == size_[b]; }
  bool solve(int l, int r, int depth) {
    if (stop_) return false;
    if ((++nodes_ & 63) == 0 && Clock::now() > end_) stop_ = timeout_ = true;
    const char here = 0;
    if ((stop_ |= nodes_ > round_end_ || depth > kMaxDepth || &here < stack_end_)) return false;
    const u64 state = hash(l, r);
    u64 &first = table_[state & (kTableSize - 1)], &second = table_[(state & (kTableSize - 1)) ^ 1];
    if (first == state || second == state) return false;

    const Branch branch = choose(l, r);
    vector<std::pair<double, i32>> candidates;
    for (int i = 0; i < count_[branch.section]; i++) {
      const int b = live_[branch.section][i];
      if (earliest_[b] != floor_[branch.section]) continue;
      double key = key_[b];
      if (strategy_.flush) key *= 1 + (lo_[b] == branch.left) + (hi_[b] == branch.right);
      if (noise_ > 0) key *= 1 + noise_ * (uniform() - 0.5);
      candidates.push_back({-key, backward_ ? n_ - 1 - b : b});
    }
    std::sort(candidates.begin(), candidates.end());
    const size_t before = trail_.size();
    for (size_t i = 0; i < candidates.size(); i++) {
      const int b = backward_ ? n_ - 1 - candidates[i].second : candidates[i].second;
      bool tried = false;
      for (size_t j = 0; j < i && !tried; j++)
        tried = twin(b, backward_ ? n_ - 1 - candidates[j].second : candidates[j].second);
      if (tried) continue;
      place(b);
      if (propagate() && components(l, r, depth + 1)) return true;
      undo(before);
      if (stop_) return false;
    }
    if (branch.next != kNone) {
      raise(branch.section, branch.next);
      mark(branch.section);
      if (propagate() && solve(l, r, depth + 1)) return true;
      undo(before);
      if (stop_) return false;
    }
    (first == 0 || (state >> 40 & 1) ? first : second) = state;
    return false;
  }
};

}  // namespace

// What a caller, which knows no exceptions, is told where the system gives no memory.
constexpr int kNoMemory = -2;

extern "C" int forebay_search(int n, int sections, const i32* lo, const i32* hi, const i64* size, i64 capacity,
                              double limit_s, u64 seed, i64* offsets, i64* nodes) try {
  Search search(n, sections, lo, hi, size, capacity);
  const int found = search.run(limit_s, seed);
  *nodes = search.nodes();
  if (found == 1) std::copy(search.offsets().begin(), search.offsets().end(), offsets);
  return found;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
