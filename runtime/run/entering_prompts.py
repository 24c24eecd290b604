"""Prompts on their way into batch slots: which of them the next chunk computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forebay.rewriter.ir.turns import StepTurns
from forebay.runtime.run.prefill import PrefillChunk


@dataclass(eq=False)
class PromptGroup:
    """Prompts that were admitted together.

    Attributes:
        slots: Numbers of their requests by slot.
        chunks: The steps that are left.
        longest: Tokens of the longest one.
        done: Tokens of each that were computed.
    """

    slots: dict[int, int]
    chunks: Iterator[PrefillChunk]
    longest: int
    done: int


class EnteringPrompts:
    """Groups of prompts that are computed chunk by chunk: the one that was admitted first, and at most one of shorter
    prompts that overtakes it. The first has every other chunk, however many overtake it.

    Args:
        turns: Whether any may overtake.
        sizes: Tokens of the planned chunks.

    Attributes:
        groups: As they were admitted.
    """

    def __init__(self, turns: StepTurns, sizes: Sequence[int]) -> None:
        self.turns, self.sizes = turns, sizes
        self.groups: list[PromptGroup] = []
        self._overtaken = False  # by the last chunk

    def take(
        self, waiting: list[int], length: Callable[[int], int], begins: Callable[[int], int]
    ) -> list[int]:
        """Take from `waiting`, whose last is the next, the requests that are admitted now.

        Args:
            waiting: Numbers of requests.
            length: The tokens of each.
            begins: How many of so many requests begin together.
        """
        if not self.groups:
            return [waiting.pop() for _ in range(begins(len(waiting)))]
        if not self.turns.overtakes:
            return []
        left = [self._chunks(group.longest - group.done) for group in self.groups]
        shorter = [each for each in reversed(waiting) if self.turns.admits(self._chunks(length(each)), left)]
        numbers = shorter[: begins(len(shorter))]
        for number in numbers:
            waiting.remove(number)
        return numbers

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // max(self.sizes))

    def next(self) -> PromptGroup:
        """The group whose chunk is next."""
        return self.groups[0 if self._overtaken else -1]

    def computed(self, group: PromptGroup, chunk: PrefillChunk) -> None:
        """Note that a chunk of a group was computed; with its last one the group is done."""
        self._overtaken = group is not self.groups[0]
        group.done = chunk.at + chunk.inputs.tokens
        if chunk.final:
            self.groups.remove(group)

    def done(self) -> dict[int, int]:
        """The tokens of each slot that were computed."""
        return {slot: group.done for group in self.groups for slot in group.slots}
