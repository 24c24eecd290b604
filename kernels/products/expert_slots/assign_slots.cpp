// Which of the experts that a step has picked are in slots, and which are to be fetched into which slots.
#include <algorithm>
#include <cstdint>

constexpr int64_t ONCE = 1 << 20;  // what a use counts
constexpr int DECAY_SHIFT = 6;     // each step forgets the count shifted right by so many bits

extern "C" struct AssignSlotsArgs {
  const int64_t* index;   // [picks]
  const int64_t* places;  // [experts]: where each begins in a slot; may be null
  const int64_t* listed;  // [ahead]: experts that were read ahead; may be null
  int64_t* state;         // owner [slots], uses [experts]
  int64_t* told;          // of each round want [slots], entries [experts]; then entries [experts], next list [ahead]
  int64_t picks, slots, experts, named;   // `named` at most
  int64_t rounds, most, beside;           // behind round 0; experts of one at most; rounds that it is fetched beside
  int64_t in_order, ahead;                // rounds are as full as they may be; experts that are read ahead
  int64_t stride;                         // from slot to slot
};

// Scratch: of each expert its slot, and whether it is named; those that are; of each slot the last round that has it.
// Returns 1, and writes nothing, where more are named than may be.
extern "C" int forebay_assign_slots(const AssignSlotsArgs* a, float* scratch, int64_t floats, int) {
  if (floats < 3 * a->experts + a->slots) return 1;
  int32_t* slot_of = reinterpret_cast<int32_t*>(scratch);
  int32_t *is_named = slot_of + a->experts, *missing = is_named + a->experts, *round_of = missing + a->experts;
  std::fill(slot_of, slot_of + 2 * a->experts, -1);
  std::fill(round_of, round_of + a->slots, -1);
  int64_t count = 0, left = 0;
  for (int64_t i = 0; i < a->picks; ++i)
    if (a->index[i] >= 0 && a->index[i] < a->experts) count += is_named[a->index[i]] < 0, is_named[a->index[i]] = 1;
  if (count > a->named) return 1;
  int64_t *owner = a->state, *uses = owner + a->slots;
  const int64_t block = a->slots + a->experts;
  for (int64_t s = 0; s < a->slots; ++s)
    if (owner[s] > 0) slot_of[owner[s] - 1] = int32_t(s);
  int64_t* const entries_ahead = a->told + (1 + a->rounds) * block;
  std::fill(a->told, entries_ahead + (a->ahead ? a->experts + a->ahead : 0), int64_t(-1));
  const auto begin = [&](int64_t slot, int64_t e) { return slot * a->stride + (a->places ? a->places[e] : 0); };
  const auto place = [&](int64_t round, int64_t e) {
    a->told[round * block + a->slots + e] = begin(slot_of[e], e);
    round_of[slot_of[e]] = int32_t(round);
  };
  for (int64_t i = 0; i < a->ahead; ++i) {
    const int64_t e = a->listed[i];
    if (e >= 0 && e < a->experts && is_named[e] > 0 && slot_of[e] < 0) entries_ahead[e] = begin(i, e);
  }
  for (int64_t e = 0; e < a->experts; ++e) {
    uses[e] += (is_named[e] > 0 ? ONCE : 0) - (uses[e] >> DECAY_SHIFT);
    if (is_named[e] < 0) continue;
    if (slot_of[e] >= 0) place(0, e);
    else if (!a->ahead || entries_ahead[e] < 0) missing[left++] = int32_t(e);
  }
  for (int64_t r = 1, next = 0; r <= a->rounds; ++r) {
    const int64_t end = std::min(next + a->most, a->in_order ? left : (left * r + a->rounds - 1) / a->rounds);
    for (; next < end; ++next) {
      int64_t best = -1, least = 0;
      for (int64_t s = 0; s < a->slots; ++s) {
        if (round_of[s] >= std::max<int64_t>(0, r - a->beside)) continue;
        const int64_t used = owner[s] > 0 ? uses[owner[s] - 1] : -1;
        if (best < 0 || used < least) best = s, least = used;
      }
      if (best < 0) break;  // rounds that have no slot leave the rest to later ones
      const int32_t e = missing[next];
      if (owner[best] > 0) slot_of[owner[best] - 1] = -1;
      owner[best] = e + 1, slot_of[e] = int32_t(best), a->told[r * block + best] = e;
      place(r, e);
    }
  }
  for (int64_t i = 0; i < a->ahead; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < a->experts; ++e)
      if (slot_of[e] < 0 && (best < 0 || uses[e] > uses[best])) best = e;
    if (best < 0) break;
    entries_ahead[a->experts + i] = best, slot_of[best] = 0;
  }
  return 0;
}
