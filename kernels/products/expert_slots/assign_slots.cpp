// Which of the experts that a step has picked are in slots, and which are to be fetched into which slots.
#include <algorithm>
#include <cstdint>

constexpr int64_t ONCE = 1 << 20;  // what a use counts
constexpr int DECAY_SHIFT = 5;     // each step forgets the count shifted right by so many bits

extern "C" struct AssignSlotsArgs {
  const int64_t* index;   // [picks]
  const int64_t* places;  // [experts]: where each begins in a slot; may be null
  int64_t* state;         // owner [slots], uses [experts], then of each round want [slots], entries [experts]
  int64_t picks, slots, rounds, experts, first, count;  // slots are for `count` experts from `first` on
  int64_t stride;                                       // from slot to slot
};

// Scratch: of each expert its slot, its number among those named (-1: it is not), and those named; of each slot the
// round that has it. Returns 1, and writes nothing, where rounds cannot hold all that is named.
extern "C" int forebay_assign_slots(const AssignSlotsArgs* a, float* scratch, int64_t floats, int) {
  if (floats < 3 * a->experts + a->slots) return 1;
  int32_t* slot_of = reinterpret_cast<int32_t*>(scratch);
  int32_t *number = slot_of + a->experts, *named = number + a->experts, *round_of = named + a->experts;
  std::fill(slot_of, slot_of + 2 * a->experts, -1);
  std::fill(round_of, round_of + a->slots, -1);
  for (int64_t i = 0; i < a->picks; ++i)
    if (a->index[i] >= a->first && a->index[i] < a->first + a->count) number[a->index[i]] = 0;
  int64_t count = 0;
  for (int64_t e = 0; e < a->experts; ++e)
    if (number[e] == 0) number[e] = int32_t(count), named[count++] = int32_t(e);
  if (count > a->slots * a->rounds) return 1;
  int64_t *owner = a->state, *uses = owner + a->slots, *told = uses + a->experts;
  for (int64_t s = 0; s < a->slots; ++s)
    if (owner[s] > 0) slot_of[owner[s] - 1] = int32_t(s);
  for (int64_t e = 0; e < a->experts; ++e) uses[e] += (number[e] >= 0 ? ONCE : 0) - (uses[e] >> DECAY_SHIFT);
  std::fill(told, told + a->rounds * (a->slots + a->experts), int64_t(-1));
  for (int64_t r = 0; r < a->rounds; ++r) {
    int64_t *want = told + r * (a->slots + a->experts), *entries = want + a->slots;
    const int64_t first = std::min(r * a->slots, count), end = std::min(first + a->slots, count);
    for (int64_t i = first; i < end; ++i)
      if (slot_of[named[i]] >= 0) round_of[slot_of[named[i]]] = int32_t(r);
    for (int64_t i = first; i < end; ++i) {
      const int32_t e = named[i];
      if (slot_of[e] < 0) {
        int64_t best = -1, least = 0;
        bool needed = false;  // what is in the best is, by a later round
        for (int64_t s = 0; s < a->slots; ++s) {
          if (round_of[s] == r) continue;
          const bool later = owner[s] > 0 && number[owner[s] - 1] >= end;
          const int64_t count = owner[s] > 0 ? uses[owner[s] - 1] : -1;
          if (best < 0 || (later == needed ? count < least : needed)) best = s, needed = later, least = count;
        }
        if (owner[best] > 0) slot_of[owner[best] - 1] = -1;
        owner[best] = e + 1, slot_of[e] = int32_t(best), round_of[best] = int32_t(r), want[best] = e;
      }
      entries[e] = slot_of[e] * a->stride + (a->places ? a->places[e] : 0);
    }
  }
  return 0;
}
