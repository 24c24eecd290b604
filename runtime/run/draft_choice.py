"""Choice of the next drafts of running sequences, and of the number that a step checks, by expected gain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from forebay.rewriter.ir.drafts_beside import beside_s, pays_beside
from forebay.rewriter.ir.plan import Plan
from forebay.runtime.run.acceptance import Acceptance, SpeculationBudget, best_rate, best_size
from forebay.runtime.run.drafts import LONGEST_MATCH, MODEL, Drafted, Drafter, PromptLookup, alike
from forebay.runtime.run.drafts_ahead import DraftsAhead


class DraftChoice:
    """Drafts of `drafter` for sequences in rows of a plan's batch, as far as its speculative steps check them. How many
    tokens a step checks follows from its predicted time and from how many were right so far; `SpeculationBudget` bounds
    what may be lost by it. A row's record begins with its first draft and ends with `forget`. A drafter that can is
    asked for the drafts of the next pass before this one runs, where that is expected to pay."""

    def __init__(self, plan: Plan, drafter: Drafter) -> None:
        self.times_s, self.drafter, said = step_times_s(plan), drafter, plan.prediction
        self.busy_s = dict(zip(plan.schedule.speculative_steps, said.speculative_busy_s, strict=False))
        self.ahead = drafter if isinstance(drafter, DraftsAhead) and drafter.able and self.busy_s else None
        self.prefill_s = said.prefill_time_s, said.prefill_busy_s
        self.paces = said.decode_time_s > 0 and len(self.times_s) > 1
        self.seen: dict[int, Acceptance] = {}
        self.behind: dict[int, int] = {}  # tokens that the drafter has not been shown
        self.budget, self.tried = SpeculationBudget(self.times_s[1]), False
        self.steps: dict[int, int] = {}  # by their tokens per sequence
        self.looked: dict[int, tuple[int, Drafted]] = {}  # what was not checked, by the tokens that it was behind
        self.wanted = 0, 0.0  # tokens of a draft at most, and the least chance of the last, as last weighed
        self.longer_s = 0.0  # by what is drafted beside it the pass that runs takes longer
        self.begun = False  # whether what drafts has computed prompts

    def begin(self, prompts: Mapping[int, torch.Tensor], new_tokens: int) -> None:
        """Have the first drafts made while the prompts int64 [T] of rows are computed, for answers of so many tokens,
        where that is expected to pay: if the tokens that come first are guessed."""
        if (drafter := self.ahead) is None or not drafter.token_time_s:
            return
        self._meet(prompts)
        worth, least = self._worth(drafter.token_time_s, [*prompts], self.times_s)
        most = min(worth, max(self.times_s) - 1, new_tokens - 2)
        drafting_s = drafter.prefill_s + (most + 1) * drafter.token_time_s
        if most > 0 and pays_beside(*self.prefill_s, drafting_s, drafter.chance ** len(prompts)):
            drafter.begin(prompts, dict.fromkeys(prompts, most), least)
            self.begun = True

    def choose(
        self, held: Mapping[int, torch.Tensor], left: Mapping[int, int], room: int, replay: Mapping[int, int],
        least: int = 1,
    ) -> tuple[int, dict[int, Drafted]]:
        """Tokens per sequence of the next step, which may be over `least` to `room`, and each row's draft. `held` are
        its tokens int64 [T] so far, `left` how many it may still get, at least 1; of them it is to `replay` so many
        ahead of its last one."""
        times_s = {size: time_s for size, time_s in self.times_s.items() if size <= max(1, room)}
        self._meet(held)
        most = {row: max(0, min(max(times_s) - replay.get(row, 0), count) - 1) for row, count in left.items()}
        drafts = self._drafts(held, most, times_s)
        # what was drawn is checked whatever it is: leaving out by its value what is unlikely would favour it
        drawn = max((replay.get(row, 0) + len(draft.tokens) for row, draft in drafts.items()
                     if draft.chances is not None), default=0)
        able = {n: time_s for n, time_s in times_s.items() if n > drawn and n >= least}
        size, smallest = best_size(drafts, self.seen, able, replay), min(able)
        made = any(draft.kind == MODEL and draft.tokens for draft in drafts.values())  # which `_worth` has weighed
        if not made and not self.budget.allow(able[size] - able[smallest], False):
            size = smallest
        self._begin_next(held, left, size, drafts, replay)
        return size, drafts

    def note(self, row: int, draft: Drafted, offered: int, right: int) -> None:
        """Record that the first `right` of the first `offered` tokens of a row's draft were accepted."""
        self.seen[row].note(draft, offered, right)
        if draft.kind == MODEL:
            self.drafter.note(draft, offered, right)

    def count(self, size: int, drafts: Mapping[int, Drafted], given: Mapping[int, int]) -> float:
        """Note what a step over `size` tokens and its drafts took, which gave each row so many. Returns for how many
        seconds its drafts are predicted to have been waited for: of steps before it, by which it took longer for those
        beside it, and of the prompts, once, where they were not computed beside the model's own."""
        self.steps[size] = self.steps.get(size, 0) + 1
        made = {row: len(drafts[row].tokens) for row in given if drafts[row].kind == MODEL and drafts[row].tokens}
        fed = max((self.behind[row] + count for row, count in made.items() if not drafts[row].ahead), default=0)
        drafting_s = self.longer_s + fed * self.drafter.token_time_s
        self.budget.note(self.times_s[size] + drafting_s, sum(given.values()) / len(given), self.tried and bool(made))
        if made and not self.begun:
            self.begun, drafting_s = True, drafting_s + self.drafter.prefill_s
        for row, count in given.items():
            self.behind[row] = int(count > made[row]) if row in made else self.behind[row] + count
        return drafting_s

    def _meet(self, rows: Iterable[int]) -> None:
        """Begin records of rows that have none."""
        for row in rows:
            self.seen.setdefault(row, Acceptance(self.drafter.chance))
            self.behind.setdefault(row, 0)

    def forget(self, row: int) -> None:
        """A row's sequence is done; another may follow there."""
        self.seen.pop(row, None)
        self.behind.pop(row, None)
        self.looked.pop(row, None)

    def _drafts(
        self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], times_s: Mapping[int, float]
    ) -> dict[int, Drafted]:
        """Return the drafts: where each drafted token takes time, what followed the last tokens before is taken instead
        if that is expected to give as many tokens per second."""
        if not self.drafter.token_time_s:
            return self.drafter.draft(held, most)
        self._learn(held)
        found, each_s = PromptLookup().draft(held, most), self.drafter.token_time_s
        ready = {} if self.ahead is None else self.ahead.ready(held, most)
        slow = [row for row, draft in found.items() if draft.kind < LONGEST_MATCH or best_rate(
            self.seen[row].chance(draft.kind), times_s) < best_rate(
            self.seen[row].chance(MODEL), times_s, 0.0 if row in ready else each_s)]
        self.wanted = worth, least = self._worth(each_s, slow, times_s) if slow else (0, 0.0)
        made = self.drafter.draft(held, {
            row: min(most[row], worth) if row in slow and row not in ready else 0 for row in held}, least) | ready
        taken = {row: made[row] for row in slow if made[row].tokens}
        self.looked = {row: (len(held[row]), found[row]) for row in taken}
        return found | taken

    def _learn(self, held: Mapping[int, torch.Tensor]) -> None:
        """Note how far what was looked up for rows, and not checked, agrees with what came."""
        for row, (length, draft) in self.looked.items():
            if row in held and len(held[row]) > length:
                came = held[row][length:].tolist()
                right = alike(draft.tokens, came)
                self.seen[row].note(draft, min(right + 1, len(draft.tokens), len(came)), right)

    def _begin_next(
        self, held: Mapping[int, torch.Tensor], left: Mapping[int, int], size: int, drafts: Mapping[int, Drafted],
        replay: Mapping[int, int],
    ) -> None:
        """Have the next drafts made while the step over `size` tokens runs, of the rows of which it checks a model's
        draft, should it all stand, as long as it is expected to pay."""
        self.longer_s, (most, least) = 0.0, self.wanted
        rows = [row for row, draft in drafts.items() if draft.kind == MODEL and (
            0 < len(draft.tokens) < size - replay.get(row, 0))]
        more = {row: min(most, left[row] - len(drafts[row].tokens) - 2) for row in rows}
        drafter, tokens = self.ahead, max(more.values(), default=0)
        if drafter is None or size == 1 or tokens < 1:
            return
        stand = math.prod(chance for row in rows for chance in (*drafts[row].stands, drafter.chance))
        times = self.times_s[size], self.busy_s[size], (tokens + 1) * drafter.token_time_s
        if pays_beside(*times, stand):
            self.longer_s = beside_s(*times) - self.times_s[size]
            drafter.begin({row: torch.cat((held[row], torch.tensor(drafts[row].tokens))) for row in rows}, more, least)

    def _worth(self, token_time_s: float, slow: list[int], times_s: Mapping[int, float]) -> tuple[int, float]:
        """Return how many tokens to draft at most where each takes its time too, and the least chance to stand of a
        further one: what it takes, and adds to a step, in tokens of the pace so far. At most twice as many as pay where
        all have one chance; where none does and that may be lost, a few, to see whether they do by now."""
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
            return (size - 1 if self.budget.allow(cost_s, True) else 0), 0.0
        tokens = sum(self.seen[row].expected(draft, size - 1) for row, draft in drafts.items()) / len(slow)
        least = tokens / both_s[size] * (token_time_s + (times_s[longest] - times_s[1]) / (longest - 1))
        return (min(2 * size, longest) - 1 if self.budget.allow(cost_s, False) else 0), least


def step_times_s(plan: Plan) -> dict[int, float]:
    """Predicted seconds of decode steps and of those that check drafts, by their tokens per sequence; alike where the
    plan predicts nothing."""
    said = plan.prediction
    sizes = (1, *plan.schedule.speculative_steps)
    times = (said.decode_time_s, *said.speculative_times_s)
    return dict(zip(sizes, times, strict=True)) if said.decode_time_s > 0 else dict.fromkeys(sizes, 1.0)
