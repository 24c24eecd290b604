"""Whose turn the next step is where sequences enter the slots of a plan: prompts' on their way, or that of answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTurns:
    """Chunks of prompts go first while fewer than `busy` of the slots decode (a step that decodes takes about as long
    for fewer), and then `held` of them at most between two steps that decode. That suits jobs; with `busy` 0 answers
    that are under way wait for `held` chunks at most, whoever waits for a first token."""

    busy: float = 0.75
    held: int = 4

    def prefills(self, held: int, running: int, batch_slots: int) -> bool:
        """Whether the next step is a chunk, behind `held` of them since the last step that decoded."""
        return not running or held < self.held or running < self.busy * batch_slots


DEFAULT_TURNS = StepTurns()
