// Static allocation at any size: first fit in a given order, best fit over time, and local search from what they find.
//
// Time is cut into slices, each with the buffers that live in it, so that those that meet a buffer in time are found
// without looking at the others. Where these are many, first fit goes through all placed buffers by their offsets
// instead, which leaves nothing to sort and ends at the gap. The local search (large neighbourhoods: Shaw 1998) wants every buffer below a ceiling:
// around one that ends above it, it takes the buffers of some moments out and puts them back by first fit in another
// order, and keeps what does not reach further above than before. When nothing does, the ceiling is lowered.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <new>
#include <set>
#include <utility>
#include <vector>

namespace {
using i32 = std::int32_t;
using i64 = std::int64_t;
using u64 = std::uint64_t;
using Clock = std::chrono::steady_clock;
using std::vector;

constexpr i64 kEntries = 8;        // of slices for a buffer on average: long-lived ones have many
constexpr int kFewest = 6, kMost = 160;  // buffers that are taken out together
constexpr double kNoise = 0.5;     // relative disorder of the order in which they are put back
constexpr i64 kScanned = 64;       // placed buffers that are passed in the time that one takes that is met and sorted
constexpr size_t kChunk = 1024;    // placed buffers that are moved aside together, at most
constexpr size_t kCrowd = 4096;    // placed buffers beside one: from here on each is given a look at the time
constexpr int kPatience = 3000;    // rounds without gain before a ceiling half as far below is tried

struct Problem {
  i32 n;
  const i64 *lo, *hi, *size;  // buffer b is live in [lo, hi)
};

Clock::time_point after(double limit_s) { return Clock::now() + std::chrono::microseconds(i64(limit_s * 1e6)); }

class Slices {
 public:
  explicit Slices(const Problem& p) : p_(p), seen_(p.n) {
    vector<i64> times(p.lo, p.lo + p.n);
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    for (size_t stride = 1;; stride *= 2) {  // slices begin at every stride-th start of a buffer
      starts_.clear();
      for (size_t i = 0; i < times.size(); i += stride) starts_.push_back(times[i]);
      i64 entries = 0;
      for (int b = 0; b < p.n; b++) entries += last(b) - first(b) + 1;
      if (entries <= kEntries * p.n || starts_.size() < 2) break;
    }
    live_.resize(starts_.size());
    for (int b = 0; b < p.n; b++)
      for (int s = first(b), e = last(b); s <= e; s++) live_[s].push_back(b);
  }

  // How many of the buffers in the slices of one that is live there are looked at, on average.
  i64 crowd() const {
    i64 looks = 0;
    for (const auto& live : live_) looks += i64(live.size()) * i64(live.size());
    return looks / std::max<i64>(1, p_.n);
  }

  // Calls with every buffer that meets [lo, hi) in time, once each.
  template <class Call>
  void meeting(i64 lo, i64 hi, Call call) {
    stamp_++;
    const int e = slice(hi - 1);
    for (int s = slice(lo); s <= e; s++)
      for (int b : live_[s])
        if (seen_[b] != stamp_ && p_.lo[b] < hi && p_.hi[b] > lo) {
          seen_[b] = stamp_;
          call(b);
        }
  }

 private:
  const Problem& p_;
  vector<i64> starts_;
  vector<vector<i32>> live_;
  vector<u64> seen_;
  u64 stamp_ = 0;

  int slice(i64 time) const {
    const auto above = std::upper_bound(starts_.begin(), starts_.end(), time);
    return above == starts_.begin() ? 0 : int(above - starts_.begin()) - 1;
  }
  int first(int b) const { return slice(p_.lo[b]); }
  int last(int b) const { return slice(p_.hi[b] - 1); }
};

// Placed buffers by their offsets, in chunks, so that one more moves few of them.
class Stack {
 public:
  explicit Stack(const Problem& p) : p_(p), chunks_(1) {}

  void insert(int b, i64 offset) {
    size_t c = chunks_.size() - 1;
    if (offset < first_of(c))
      c = size_t(std::upper_bound(chunks_.begin(), chunks_.end(), offset,
                                  [](i64 at, const Chunk& chunk) { return at < chunk.front().offset; }) -
                 chunks_.begin());
    if (c > 0 && offset < first_of(c)) c--;
    Chunk& chunk = chunks_[c];
    const auto place = std::upper_bound(chunk.begin(), chunk.end(), offset,
                                        [](i64 at, const Placed& placed) { return at < placed.offset; });
    chunk.insert(place, {p_.lo[b], p_.hi[b], offset, offset + p_.size[b]});
    if (chunk.size() < kChunk) return;
    Chunk upper(chunk.begin() + kChunk / 2, chunk.end());
    chunk.resize(kChunk / 2);
    chunks_.insert(chunks_.begin() + i64(c) + 1, std::move(upper));
  }

  // The lowest gap that holds b among those that meet it in time.
  i64 lowest_gap(int b) const {
    const i64 lo = p_.lo[b], hi = p_.hi[b], size = p_.size[b];
    const Placed* met[kChunk];
    i64 floor = 0;
    for (const Chunk& chunk : chunks_) {
      size_t count = 0;
      for (const Placed& placed : chunk) {  // without a branch, which nothing would foresee
        met[count] = &placed;
        count += (placed.lo < hi) & (placed.hi > lo);
      }
      for (size_t i = 0; i < count; i++) {
        if (met[i]->offset - floor >= size) return floor;
        floor = std::max(floor, met[i]->top);
      }
    }
    return floor;
  }

 private:
  struct Placed {
    i64 lo, hi, offset, top;
  };
  using Chunk = vector<Placed>;
  const Problem& p_;
  vector<Chunk> chunks_;

  i64 first_of(size_t c) const { return chunks_[c].empty() ? 0 : chunks_[c].front().offset; }
};

class Packing {
 public:
  Packing(const Problem& p, i64* offsets) : p_(p), slices_(p), at_(offsets) {}

  // The lowest gap that holds b among the placed (those of no negative offset) that meet it in time.
  i64 lowest_gap(int b) {
    taken_.clear();
    slices_.meeting(p_.lo[b], p_.hi[b], [&](int other) {
      if (other != b && at_[other] >= 0) taken_.push_back({at_[other], at_[other] + p_.size[other]});
    });
    std::sort(taken_.begin(), taken_.end());
    i64 floor = 0;
    for (const auto& [offset, top] : taken_) {
      if (offset - floor >= p_.size[b]) break;
      floor = std::max(floor, top);
    }
    return floor;
  }

  bool first_fit(const i32* order, Clock::time_point end) {
    if (slices_.crowd() * kScanned > p_.n) return stacked(order, end);
    for (int i = 0; i < p_.n; i++) {
      if (at_[order[i]] < 0) at_[order[i]] = lowest_gap(order[i]);
      if ((i & 15) == 0 && Clock::now() > end) return false;
    }
    return true;
  }

  bool stacked(const i32* order, Clock::time_point end) {
    Stack stack(p_);
    for (int b = 0; b < p_.n; b++)
      if (at_[b] >= 0) stack.insert(b, at_[b]);
    for (int i = 0; i < p_.n; i++) {
      const int b = order[i];
      if (at_[b] < 0) stack.insert(b, at_[b] = stack.lowest_gap(b));
      if ((i & 15) == 0 && Clock::now() > end) return false;
    }
    return true;
  }

  i64 height() const {
    i64 top = 0;
    for (int b = 0; b < p_.n; b++) top = std::max(top, at_[b] + p_.size[b]);
    return top;
  }

  // Offsets of the least height found, of at least `target`.
  void improve(i64 target, Clock::time_point end, u64 seed) {
    random_ = seed;
    end_ = end;
    best_.assign(at_, at_ + p_.n);
    i64 best = height(), share = 16;
    while (best > target) {
      const i64 ceiling = std::max(target, best - std::max<i64>(1, (best - target) / share));
      if (below(ceiling, end)) {
        best = height();
        best_.assign(at_, at_ + p_.n);
        share = std::max<i64>(2, share / 2);
      } else if (Clock::now() > end) {
        break;
      } else {  // from the best again, to a ceiling nearer to it
        std::copy(best_.begin(), best_.end(), at_);
        share = share > (i64{1} << 40) ? 16 : share * 4;
      }
    }
    std::copy(best_.begin(), best_.end(), at_);
  }

 private:
  const Problem& p_;
  Slices slices_;
  i64* at_;
  vector<std::pair<i64, i64>> taken_;
  vector<i64> best_, old_;
  vector<i32> out_, above_, where_;
  vector<std::pair<double, i32>> order_;
  u64 random_ = 1;
  Clock::time_point end_;

  u64 next() {  // splitmix64
    u64 x = random_ += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
  }
  i64 below_of(i64 count) { return i64(next() % u64(count)); }
  double uniform() { return double(next() >> 11) * (1.0 / 9007199254740992.0); }

  void note(int b, i64 ceiling) {  // keep above_, the buffers that end above the ceiling
    const bool over = at_[b] + p_.size[b] > ceiling;
    if (over && where_[b] < 0) {
      where_[b] = i32(above_.size());
      above_.push_back(b);
    } else if (!over && where_[b] >= 0) {
      where_[above_.back()] = where_[b];
      above_[where_[b]] = above_.back();
      above_.pop_back();
      where_[b] = -1;
    }
  }
  // What lies low weighs little: of packings as high, the one with its gaps further up.
  double lever(int b) const { return double(p_.hi[b] - p_.lo[b]) * double(p_.size[b]) * double(at_[b]); }
  double excess(int b, i64 ceiling) const { return std::max(0.0, double(at_[b] + p_.size[b] - ceiling)); }

  // Whether every buffer came to end at or below the ceiling before time or patience ran out.
  bool below(i64 ceiling, Clock::time_point end) {
    above_.clear();
    where_.assign(p_.n, -1);
    for (int b = 0; b < p_.n; b++) note(b, ceiling);
    for (int idle = 0; !above_.empty(); idle++) {
      if (idle > kPatience || Clock::now() > end) return false;
      const bool any = below_of(3) == 0;
      if (round(any ? i32(below_of(p_.n)) : above_[below_of(i64(above_.size()))], ceiling)) idle = 0;
    }
    return true;
  }

  // Puts the buffers of some moments around one back otherwise; whether less of them is above the ceiling then.
  bool round(int around, i64 ceiling) {
    choose(around);
    double before = 0, now = 0, weight_before = 0, weight = 0;
    old_.clear();
    for (int b : out_) {
      before += excess(b, ceiling);
      weight_before += lever(b);
      old_.push_back(at_[b]);
    }
    arrange(around);
    for (int b : out_) at_[b] = -1;
    bool kept = true;
    for (const auto& [key, b] : order_) {
      at_[b] = lowest_gap(b);
      now += excess(b, ceiling);
      weight += lever(b);
      if (!(kept = now <= before && (taken_.size() < kCrowd || Clock::now() < end_))) break;
    }
    kept = kept && (now < before || weight <= weight_before);
    for (size_t i = 0; i < out_.size(); i++) {
      if (!kept) at_[out_[i]] = old_[i];
      else note(out_[i], ceiling);
    }
    return kept && (now < before || weight < weight_before);
  }

  void choose(int around) {
    const i64 life = p_.hi[around] - p_.lo[around];
    i64 lo = p_.lo[around], hi = p_.hi[around];
    switch (below_of(3)) {
      case 0: break;
      case 1: {  // a moment of its life
        lo += below_of(life);
        hi = lo + 1;
        break;
      }
      case 2: {  // more than its life
        const i64 more = 1 + i64(double(life) * uniform());
        lo -= more;
        hi += more;
      }
    }
    out_.clear();
    slices_.meeting(lo, hi, [&](int b) {
      if (b != around) out_.push_back(b);
    });
    const size_t most = size_t(kFewest + below_of(kMost - kFewest));
    for (size_t i = 0; i < std::min(most, out_.size()); i++)
      std::swap(out_[i], out_[i + size_t(below_of(i64(out_.size() - i)))]);
    if (out_.size() > most) out_.resize(most);
    out_.push_back(around);
  }

  void arrange(int around) {
    order_.clear();
    const int rule = int(below_of(5));
    for (int b : out_) {
      const double width = double(p_.hi[b] - p_.lo[b]), size = double(p_.size[b]);
      double key = rule == 0 ? size : rule == 1 ? width * size : rule == 2 ? std::sqrt(width) * size : width;
      if (rule == 4) key = -double(at_[b]) - (b == around ? -1e18 : 0);  // as they lie, but for the one
      else key *= 1 + kNoise * (uniform() - 0.5);
      order_.push_back({-key, b});
    }
    std::sort(order_.begin(), order_.end());
  }
};

// What a caller, which knows no exceptions, is told where the system gives no memory.
constexpr int kNoMemory = -2;
}  // namespace

// Places, in this order, each buffer whose offset is negative in the lowest gap among those placed that meet it in
// time. 0: out of time, and offsets mean nothing.
extern "C" int forebay_first_fit(const Problem* p, const i32* order, double limit_s, i64* offsets) try {
  return Packing(*p, offsets).first_fit(order, after(limit_s));
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

// Places each buffer, at its start, in the tightest gap among those that live then, in this order of equal starts.
extern "C" int forebay_best_fit(const Problem* p, const i32* order, i64* offsets) try {
  std::set<std::pair<i64, i64>> ending, gaps;  // (end, buffer); (bytes, offset)
  std::map<i64, i64> from;                     // of gaps, all below `top`: offset to end
  i64 top = 0;
  const auto forget = [&](std::map<i64, i64>::iterator gap) {
    gaps.erase({gap->second - gap->first, gap->first});
    from.erase(gap);
  };
  const auto free_bytes = [&](i64 begin, i64 end) {
    auto next = from.lower_bound(begin);
    if (next != from.end() && next->first == end) {
      end = next->second;
      forget(next);
    }
    next = from.lower_bound(begin);
    if (next != from.begin() && std::prev(next)->second == begin) {
      begin = std::prev(next)->first;
      forget(std::prev(next));
    }
    if (end == top) {
      top = begin;
    } else {
      from[begin] = end;
      gaps.insert({end - begin, begin});
    }
  };
  for (int i = 0; i < p->n; i++) {
    const int b = order[i];
    for (; !ending.empty() && ending.begin()->first <= p->lo[b]; ending.erase(ending.begin())) {
      const i64 gone = ending.begin()->second;
      free_bytes(offsets[gone], offsets[gone] + p->size[gone]);
    }
    const auto gap = gaps.lower_bound({p->size[b], -1});
    if (gap == gaps.end()) {
      offsets[b] = top;
      top += p->size[b];
    } else {
      const auto [nbytes, begin] = *gap;
      forget(from.find(begin));
      offsets[b] = begin;
      if (nbytes > p->size[b]) {
        from[begin + p->size[b]] = begin + nbytes;
        gaps.insert({nbytes - p->size[b], begin + p->size[b]});
      }
    }
    ending.insert({p->hi[b], b});
  }
  return 0;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

// Lowers the height of a packing, down to `target` at the least.
extern "C" int forebay_improve(const Problem* p, i64 target, double limit_s, u64 seed, i64* offsets) try {
  Packing(*p, offsets).improve(target, after(limit_s), seed);
  return 0;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
