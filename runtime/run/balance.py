"""Which sequences share a micro-batch: their caches take about as long to load and to make anew in each."""

from __future__ import annotations

from collections.abc import Sequence


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
