"""Drafts for the sequences that run in places: a step over several tokens of each checks what was looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.runtime.run.acceptance import Acceptance, best_size
from forebay.runtime.run.drafts import Drafted, PromptLookup
from forebay.runtime.run.speculation import step_times_s


@dataclass(frozen=True)
class Running:
    """A sequence that runs: its tokens so far, and how many it may still get."""

    tokens: torch.Tensor
    left: int


class PlaceDrafts:
    """What followed the last tokens before, for sequences by number, as far as the plan's steps check it and it is
    expected to pay."""

    def __init__(self, plan: Plan) -> None:
        self.times_s, self.context = step_times_s(plan), plan.workload.context
        self.seen: dict[int, Acceptance] = {}
        self.lookup = PromptLookup()

    def choose(self, running: Mapping[int, Running]) -> tuple[int, dict[int, Drafted]]:
        """Tokens per sequence of the next step, 1 where none is checked, and each sequence's draft."""
        if len(self.times_s) == 1 or not running:
            return 1, {}
        room = self.context - max(len(each.tokens) for each in running.values()) + 1  # the last one is not appended yet
        times_s = {size: time_s for size, time_s in self.times_s.items() if size <= room}
        most = [min(max(times_s), each.left) - 1 for each in running.values()]
        found = self.lookup.draft([each.tokens for each in running.values()], most)
        drafts = dict(zip(running, found, strict=True))
        for number in running:
            self.seen.setdefault(number, Acceptance(self.lookup.chance))
        return best_size(drafts, self.seen, times_s), drafts

    def note(self, number: int, draft: Drafted, offered: int, right: int) -> None:
        """Of the first `offered` tokens of a sequence's draft the first `right` stood."""
        self.seen[number].note(draft, offered, right)

    def end(self, number: int) -> None:
        """A sequence is done."""
        self.seen.pop(number, None)
