"""What is known of the slots that hold some experts of a table, and what a step is to fetch into them.

One row of int64 numbers: of each slot the expert in it, counted from 1 (0: none); of each expert how often steps named
it, those long ago counting less; then of each round of a step the expert to fetch into each slot (-1: it keeps what it
holds), and where each expert begins among the slots (-1: it is not of this round). Zeros mean that all slots are empty.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

ITEMSIZE = 8


class SlotState(NamedTuple):
    """The sizes of a state: slots, rounds of a step at most, experts of the table."""

    slots: int
    rounds: int
    experts: int

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return self.want(self.rounds)

    @property
    def nbytes(self) -> int:
        return self.numbers * ITEMSIZE

    def want(self, number: int) -> int:
        """Where a round's experts to fetch begin, one for each slot."""
        return (number + 1) * (self.slots + self.experts)

    def entries(self, number: int) -> int:
        """Where a round's slots begin, one for each expert."""
        return self.want(number) + self.slots


class PoolPart(NamedTuple):
    """A part of a pool: so many slots from `slot` on, for so many experts from `first` on."""

    first: int
    experts: int
    slot: int
    slots: int


def parts_of(experts: int, slots: int, parts: int) -> list[PoolPart]:
    """The parts of a pool, as equal as they can be, in ascending order of experts."""
    edges = [(experts * i // parts, slots * i // parts) for i in range(parts + 1)]
    return [PoolPart(first, end - first, slot, last - slot)
            for (first, slot), (end, last) in itertools.pairwise(edges)]


def rounds_of(experts: int, picks: int, slots: int) -> int:
    """Rounds of a step that makes so many picks among experts, of which each round holds as many as there are slots."""
    return -(-min(experts, picks) // slots)
