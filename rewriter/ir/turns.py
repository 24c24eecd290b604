"""Whose turn the next step is where sequences enter the slots of a plan: prompts' on their way, or that of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTurns:
    """Chunks of prompts go first while fewer than `busy` of the slots decode (a step that decodes takes about as long
    for fewer), and then `held` of them at most between two steps that decode. That suits jobs; with `busy` 0 answers
    that are under way wait for `held` chunks at most, whoever waits for a first token. With `overtakes`
    shorter prompts do not wait for the end of a longer one: every other chunk is theirs."""

    busy: float = 0.75
    held: int = 4
    overtakes: bool = False

    def prefills(self, held: int, running: int, batch_slots: int) -> bool:
        """Return whether the next step is a chunk, behind `held` of them since the last step that decoded."""
        return not running or held < self.held or running < self.busy * batch_slots

    def admits(self, chunks: int, left: Sequence[int]) -> bool:
        """Return whether prompts of so many chunks begin, where others that were admitted before have as many
        `left`."""
        return not left or (self.overtakes and len(left) == 1 and chunks < left[0])


DEFAULT_TURNS = StepTurns()
SERVER_TURNS = StepTurns(0.0, 2, overtakes=True)  # where no goals say
