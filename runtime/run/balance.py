"""Which sequences are admitted first, and which share a micro-batch, whose caches then take about as long to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def balanced_slots(tokens: Sequence[int], free: Sequence[int], held: Sequence[int], rows: int) -> list[int]:
    """A slot of `free`, no slot twice, for each of the sequences of so many `tokens`. Micro-batch i has slots
    i * rows to (i + 1) * rows - 1, whose other sequences hold `held[i]` tokens.

    Greedy, the longest first, each into the micro-batch that holds the fewest tokens and has a free slot (HybridServe,
    section 4.3.3). There K and V and checkpoints are two loads to balance, equations 12 and 13; here each sequence has
    them in one proportion (equation 11), so that equal tokens are equal loads of both. ValueError where slots are too
    few.
    """
    if len(free) < len(tokens):
        raise ValueError(f"{len(free)} slots for {len(tokens)} sequences")
    room: dict[int, list[int]] = {}
    for slot in sorted(free, reverse=True):
        room.setdefault(slot // rows, []).append(slot)
    load = list(held)
    chosen = [0] * len(tokens)
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        part = min(room, key=lambda part: (load[part], part))
        chosen[i] = room[part].pop()
        load[part] += tokens[i]
        if not room[part]:
            del room[part]
    return chosen


def admission_order(lengths: Mapping[int, int], shared: Sequence[Sequence[bytes]] = ()) -> list[int]:
    """Numbers of requests of these `lengths`, the next one last: the longest, and with it those that begin alike.
    `shared` names what each has in common with others, from its beginning on."""
    path = dict(zip(lengths, shared, strict=True)) if shared else dict.fromkeys(lengths, ())
    longest = dict[bytes, int]()
    for i, keys in path.items():
        for key in keys[:1]:
            longest[key] = max(longest.get(key, 0), lengths[i])
    return sorted(lengths, key=lambda i: (longest[path[i][0]] if path[i] else lengths[i], path[i], lengths[i], -i))
