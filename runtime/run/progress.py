"""What was done so far, in steps and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class WorkDone:
    """What was done so far: steps that computed prompts, steps that decoded, tokens chosen, sequences that ended, and
    those of them that stopped before they had their most tokens; how many tokens the others may still take; how many
    drafted tokens were checked, and of them stood, and of the others were refused where all before them stood; and
    steps that checked drafts, or might have, by their tokens per sequence. `drafting_s` is that of a `Tally`."""

    prefills: int = 0
    decodes: int = 0
    tokens: int = 0
    ended: int = 0
    stopped: int = 0
    left: int = 0
    offered: int = 0
    accepted: int = 0
    refused: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    drafting_s: float = 0.0


@dataclass
class Tally:
    """What speculative decoding did: steps, by their tokens per sequence, tokens that they gave, drafted tokens that
    they checked, those of them that stood, and those that were refused where all before them stood; and for how many
    seconds what a model drafted is predicted to have been waited for (`DraftChoice.count`)."""

    steps: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    offered: int = 0
    accepted: int = 0
    refused: int = 0
    drafting_s: float = 0.0

    def add(self, work: WorkDone) -> None:
        """Count what was done in places."""
        others = work.decodes - sum(work.sizes.values())
        for size, count in {**work.sizes, 1: work.sizes.get(1, 0) + others}.items():
            self.steps[size] = self.steps.get(size, 0) + count
        self.tokens += work.tokens - work.ended  # the first of each is its prompt's
        self.offered, self.accepted = self.offered + work.offered, self.accepted + work.accepted
        self.refused += work.refused
        self.drafting_s += work.drafting_s

    @property
    def passes(self) -> int:
        """Passes over the weights behind the prompts."""
        return sum(self.steps.values())

    def __str__(self) -> str:
        if not self.passes:
            return "no step was needed behind the prompt"
        pace = f"{self.tokens / self.passes:.2f} tokens per pass over the weights"
        if not self.offered:
            return f"{pace}, nothing was drafted"
        return f"{pace}, {100 * self.accepted / self.offered:.0f} % of {self.offered} drafted tokens stood"
