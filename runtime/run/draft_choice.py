"""What is drafted next for sequences that run, and how much of it a step checks: what is expected to pay."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.runtime.run.acceptance import Acceptance, Stakes, best_rate, best_size
from forebay.runtime.run.drafts import LONGEST_MATCH, MODEL, Drafted, Drafter, PromptLookup


class DraftChoice:
    """Drafts of `drafter` for sequences in rows of a plan's batch, as far as its speculative steps check them. How many
    tokens a step checks follows from its predicted time and from how many were right so far; `Stakes` bounds what may
    be lost by it. A row's record begins with its first draft and ends with `forget`."""

    def __init__(self, plan: Plan, drafter: Drafter) -> None:
        self.times_s, self.drafter = step_times_s(plan), drafter
        self.paces = plan.prediction.decode_time_s > 0 and len(self.times_s) > 1
        self.seen: dict[int, Acceptance] = {}
        self.behind: dict[int, int] = {}  # tokens that the drafter has not been shown
        self.stakes, self.tried = Stakes(self.times_s[1]), False
        self.steps: dict[int, int] = {}  # by their tokens per sequence

    def choose(
        self, held: Mapping[int, torch.Tensor], left: Mapping[int, int], room: int
    ) -> tuple[int, dict[int, Drafted]]:
        """Tokens per sequence of the next step, which may be over at most `room`, and each row's draft. `held` are its
        tokens int64 [T] so far, `left` how many it may still get, at least 1."""
        times_s = {size: time_s for size, time_s in self.times_s.items() if size <= max(1, room)}
        for row in held:
            self.seen.setdefault(row, Acceptance(self.drafter.chance))
            self.behind.setdefault(row, 0)
        drafts = self._drafts(held, {row: min(max(times_s), count) - 1 for row, count in left.items()}, times_s)
        # what was drawn is checked whatever it is: leaving out by its value what is unlikely would favour it
        drawn = max((len(draft.tokens) for draft in drafts.values() if draft.chances is not None), default=0)
        size = best_size(drafts, self.seen, {n: time_s for n, time_s in times_s.items() if n > drawn})
        made = any(draft.kind == MODEL and draft.tokens for draft in drafts.values())  # which `_worth` has weighed
        if size > 1 and not made and not self.stakes.allow(times_s[size] - times_s[1], False):
            size = 1
        return size, drafts

    def note(self, row: int, draft: Drafted, offered: int, right: int) -> None:
        """Of the first `offered` tokens of a row's draft the first `right` stood."""
        self.seen[row].note(draft, offered, right)
        if draft.kind == MODEL:
            self.drafter.note(draft, offered, right)

    def count(self, size: int, drafts: Mapping[int, Drafted], given: Mapping[int, int]) -> None:
        """Note what a step over `size` tokens and its drafts took, which gave each row so many."""
        self.steps[size] = self.steps.get(size, 0) + 1
        made = {row: len(drafts[row].tokens) for row in given if drafts[row].kind == MODEL and drafts[row].tokens}
        fed = max((self.behind[row] + count for row, count in made.items()), default=0)
        self.stakes.note(self.times_s[size] + fed * self.drafter.token_time_s, sum(given.values()) / len(given),
                         self.tried and bool(made))
        for row, count in given.items():
            self.behind[row] = int(count > made[row]) if row in made else self.behind[row] + count

    def forget(self, row: int) -> None:
        """A row's sequence is done; another may follow there."""
        self.seen.pop(row, None)
        self.behind.pop(row, None)

    def _drafts(
        self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], times_s: Mapping[int, float]
    ) -> dict[int, Drafted]:
        """What may follow: where each drafted token takes time, what followed the last tokens before is taken instead
        if that is expected to give as many tokens per second."""
        if not self.drafter.token_time_s:
            return self.drafter.draft(held, most)
        found, each_s = PromptLookup().draft(held, most), self.drafter.token_time_s
        slow = [row for row, draft in found.items() if draft.kind < LONGEST_MATCH or best_rate(
            self.seen[row].chance(draft.kind), times_s) < best_rate(self.seen[row].chance(MODEL), times_s, each_s)]
        worth, least = self._worth(each_s, slow, times_s) if slow else (0, 0.0)
        made = self.drafter.draft(held, {row: min(most[row], worth) if row in slow else 0 for row in held}, least)
        return found | {row: made[row] for row in slow}

    def _worth(self, token_time_s: float, slow: list[int], times_s: Mapping[int, float]) -> tuple[int, float]:
        """How many tokens to draft at most where each takes its time too, and the least chance to stand of a further
        one: what it takes, and adds to a step, in tokens of the pace so far. At most twice as many as pay where all
        have one chance; where none does and that may be lost, a few, to see whether they do by now."""
        longest = max(times_s)
        if not self.paces or longest == 1:
            return longest - 1, 0.0
        drafts = dict.fromkeys(slow, Drafted((0,) * (longest - 1)))
        both_s = {size: time_s + (size - 1) * token_time_s for size, time_s in times_s.items()}
        size = best_size(drafts, self.seen, both_s)
        self.tried = size == 1
        cost_s = max(self.behind[row] for row in slow) * token_time_s
        if self.tried:
            size = sorted(times_s)[1]
            cost_s += both_s[size] - times_s[1]
            return (size - 1 if self.stakes.allow(cost_s, True) else 0), 0.0
        tokens = sum(self.seen[row].expected(draft, size - 1) for row, draft in drafts.items()) / len(slow)
        least = tokens / both_s[size] * (token_time_s + (times_s[longest] - times_s[1]) / (longest - 1))
        return (min(2 * size, longest) - 1 if self.stakes.allow(cost_s, False) else 0), least


def step_times_s(plan: Plan) -> dict[int, float]:
    """Predicted seconds of decode steps and of those that check drafts, by their tokens per sequence; alike where the
    plan predicts nothing."""
    said = plan.prediction
    sizes = (1, *plan.schedule.speculative_steps)
    times = (said.decode_time_s, *said.speculative_times_s)
    return dict(zip(sizes, times, strict=True)) if said.decode_time_s > 0 else dict.fromkeys(sizes, 1.0)
