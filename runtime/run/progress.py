"""Progress so far, in steps and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class WorkDone:
    """Steps and tokens of requests so far.

    Attributes:
        prefills: Steps that computed prompts.
        decodes: Steps that decoded.
        tokens: Tokens chosen, of which the first of each request is its prompt's.
        ended: Requests that ended.
        stopped: Those of them that ended before they had their most tokens.
        left: Tokens that the others may still take.
        cached: Tokens of prompts that were known before they were computed.
        offered: Drafted tokens that were checked.
        accepted: Those of them that were accepted.
        refused: Those that were refused where all before them were accepted.
        steps: Steps that checked drafts, or might have, by their tokens per sequence.
        drafting_s: Seconds for which a model's drafts are predicted to have been waited for (`DraftChoice.count`).
    """

    prefills: int = 0
    decodes: int = 0
    tokens: int = 0
    ended: int = 0
    stopped: int = 0
    left: int = 0
    cached: int = 0
    offered: int = 0
    accepted: int = 0
    refused: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    drafting_s: float = 0.0

    def __str__(self) -> str:
        """The pace of requests that have all ended."""
        if not self.decodes:
            return "no step was needed after the prompt"
        pace = f"{(self.tokens - self.ended) / self.decodes:.2f} tokens per pass over the weights"
        if not self.offered:
            return f"{pace}, no drafts"
        return f"{pace}, {100 * self.accepted / self.offered:.0f} % of {self.offered} drafted tokens accepted"
