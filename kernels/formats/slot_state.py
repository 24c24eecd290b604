"""The state of slots that hold some experts of a table, and the experts that a step fetches into them.

Two rows of int64 numbers. The state: of each slot the expert in it, counted from 1 (0: none); of each expert how often
steps named it, those long ago counting less. Zeros mean that all slots are empty. And what a step is told: of each of
its rounds the expert to fetch into each slot (-1: it keeps what it holds), and where each expert begins among the slots
(-1: it is not of this round).

Round 0 has the experts that are in slots, and fetches none. The others come in the rounds after it: in a few, where
there is a slot for each expert that a step may name, and all are fetched at once. The first of these rounds have the
most, because nothing is read while the last one is computed. With fewer slots a round fetches at most half as many
experts as there are slots, while the round before it is computed; with one slot, each after the other. Rounds share the
experts evenly, as far as slots are free, so that the last one is short.

A step may also read experts before it names any: those that a list names, into memory of their own. What is told ends
with where each of them begins there (-1: it is not named, or in no such slot), and with the list of the next step:
those that were named most often of late, and are in no slot (-1: there are no more).

A GPU fetches in order, so that no fetch ends before one that began earlier. There all experts come in one round, while
round 0 is computed. With fewer slots a round fetches into all of them, after the round before it was computed.
"""

from __future__ import annotations

from typing import NamedTuple

ITEMSIZE = 8
FETCHED = 3  # rounds in which experts come where there is a slot for each


class SlotState(NamedTuple):
    """The sizes of a state: slots, experts of the table, and how many of these a step names at most. `in_order` says
    whether fetches run in order. So many experts are read `ahead` of the step that names them."""

    slots: int
    experts: int
    named: int
    in_order: bool = False
    ahead: int = 0

    @property
    def numbers(self) -> int:
        """How many numbers the state has."""
        return self.slots + self.experts

    @property
    def at_once(self) -> bool:
        """Whether there is a slot for each expert that a step names."""
        return self.named <= self.slots

    @property
    def most(self) -> int:
        """Experts that a round fetches at most."""
        if self.at_once:
            return self.named
        return self.slots if self.in_order else max(1, self.slots // 2)

    @property
    def rounds(self) -> int:
        """Rounds that fetch experts."""
        if self.at_once:
            return 1 if self.in_order else min(FETCHED, self.named)
        return -(-self.named // self.most)

    @property
    def beside(self) -> int:
        """Rounds before it that one may be fetched beside, while these are computed."""
        if self.at_once:
            return self.rounds
        return 0 if self.in_order else min(1, self.slots - 1)

    @property
    def told(self) -> int:
        """How many numbers tell a step."""
        return self.entries_ahead + (self.experts + self.ahead if self.ahead else 0)

    @property
    def entries_ahead(self) -> int:
        """The offset of the numbers that say where each expert begins that was read ahead."""
        return (1 + self.rounds) * self.numbers

    @property
    def nbytes(self) -> int:
        """Bytes of the list, and of both rows."""
        return (self.ahead + self.numbers + self.told) * ITEMSIZE

    def want(self, number: int) -> int:
        """Return the offset of a round's experts to fetch, one for each slot, in the step's index tensor."""
        return number * self.numbers

    def entries(self, number: int) -> int:
        """Return the offset of the numbers that say where each expert of a round begins."""
        return self.want(number) + self.slots


def slot_state(slots: int, experts: int, picks: int, in_order: bool = False, ahead: int = 0) -> SlotState:
    """The sizes for steps that make so many picks among experts."""
    return SlotState(slots, experts, min(experts, picks), in_order, ahead)
