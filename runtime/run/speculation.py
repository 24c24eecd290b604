"""Several tokens for one pass over the weights: drafted tokens are checked by one step, and what it gives is what
decoding one by one would have given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.runtime.run.acceptance import Acceptance, Draws, Stakes, accepted, best_rate, best_size
from forebay.runtime.run.drafts import LONGEST_MATCH, MODEL, Drafted, Drafter, PromptLookup
from forebay.runtime.run.generation import Stop, prefill, refuse_crossing
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.session import Session


@dataclass
class Tally:
    """What speculative decoding did: steps, by their tokens per sequence, tokens that they gave, drafted tokens that
    they checked, those of them that stood, and those that were refused where all before them stood."""

    steps: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    offered: int = 0
    accepted: int = 0
    refused: int = 0

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


def speculates(plan: Plan, sampling: Sampling, count: int, generator: object) -> bool:
    """Whether steps of `plan` check drafts for `count` sequences whose draws come from `generator`: with one of torch's
    for several, each column of tokens is one draw."""
    alone = not sampling.do_sample or count == 1 or isinstance(generator, Sequence)
    return bool(plan.schedule.speculative_steps) and alone


def generate_speculatively(
    session: Session,
    prompts: Sequence[torch.Tensor],
    sampling: Sampling,
    stop: Stop,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    on_token: Callable[[torch.Tensor], None] | None,
    drafter: Drafter,
    tally: Tally | None = None,
) -> torch.Tensor:
    """`generate_tokens`, with drafts of `drafter` checked by the plan's speculative steps: the same tokens where they
    are not drawn, else the same distribution, each sequence from its own generator (ValueError where several share
    one). Sequences go on by as many tokens as were right of their own drafts; how many a step checks follows from its
    predicted time and from how many were right so far; `Stakes` bounds what drafts that take time may lose. `on_token`
    sees a column once all sequences have it."""
    if not speculates(session.plan, sampling, len(prompts), generator):
        raise ValueError("drafts are checked by a plan with speculative steps, and where tokens are drawn, with a "
                         "generator for each prompt")
    refuse_crossing(session.plan, prompts, stop.max_new_tokens, session.renewed_at)
    call = _DraftedCall(session, prompts, sampling, stop, generator, on_token, Tally() if tally is None else tally,
                        drafter)
    call.begin(prompts)
    while not call.ended():
        call.step()
    return call.columns(max(map(len, call.new)))


class _DraftedCall:
    """The sequences of a call: tokens so far, and how many of them the cache holds."""

    def __init__(
        self, session: Session, prompts: Sequence[torch.Tensor], sampling: Sampling, stop: Stop,
        generator: torch.Generator | Sequence[torch.Generator] | None,
        on_token: Callable[[torch.Tensor], None] | None, tally: Tally, drafter: Drafter,
    ) -> None:
        self.session, self.sampling, self.stop, self.on_token, self.tally = session, sampling, stop, on_token, tally
        count = len(prompts)
        each = isinstance(generator, Sequence)
        self.draws: list[Draws] = [[g] for g in generator] if each else [generator] * count  # type: ignore[union-attr]
        self.lengths = torch.ones(session.plan.workload.batch, dtype=torch.int64)  # idle rows count one
        self.lengths[:count] = torch.tensor([p.numel() for p in prompts])
        self.held = torch.zeros(count, int(self.lengths.max()) + stop.max_new_tokens, dtype=torch.int64)
        for row, prompt in zip(self.held, prompts, strict=True):
            row[: prompt.numel()] = prompt
        self.prompt = [p.numel() for p in prompts]
        self.new: list[list[int]] = [[] for _ in prompts]
        self.shown = 0  # columns that were handed out
        self.seen = {row: Acceptance(drafter.chance) for row in range(count)}
        self.times_s, self.drafter = step_times_s(session.plan), drafter
        self.stakes, self.tried = Stakes(self.times_s[1]), False
        self.behind = [0] * count  # tokens that the drafter has not been shown

    def begin(self, prompts: Sequence[torch.Tensor]) -> None:
        """Run the prompts; the first token of each."""
        logits = prefill(self.session, prompts, self.lengths)
        for row in range(len(prompts)):
            self._append(row, accepted(logits[row : row + 1], Drafted(), self.sampling, self.draws[row]))
        self._show()
        if not self.ended():
            self.session.grow()

    def ended(self, row: int | None = None) -> bool:
        """Whether a sequence, or all of them, have all their tokens."""
        if row is None:
            return all(map(self.ended, range(len(self.new))))
        new = self.new[row]
        return len(new) >= self.stop.max_new_tokens or bool(new and new[-1] in self.stop.eos)

    def step(self) -> None:
        """One pass: draft, check, keep what stands."""
        context = self.session.plan.workload.context
        going = [row for row in range(len(self.new)) if not self.ended(row)]
        room = context - max(int(self.lengths[row]) for row in going)
        times_s = {size: time_s for size, time_s in self.times_s.items() if size <= room}
        most = [0 if self.ended(row) else min(max(times_s), self.stop.max_new_tokens - len(new)) - 1
                for row, new in enumerate(self.new)]
        rows = [tokens[: self.prompt[i] + len(self.new[i])] for i, tokens in enumerate(self.held)]
        drafts = self._drafts(rows, most, going, times_s)
        # what was drawn is checked whatever it is: leaving out by its value what is unlikely would favour it
        drawn = max((len(drafts[row].tokens) for row in going if drafts[row].chances is not None), default=0)
        size = best_size({row: drafts[row] for row in going}, self.seen,
                         {size: time_s for size, time_s in times_s.items() if size > drawn})
        ids = torch.zeros(len(self.lengths), size, dtype=torch.int64)
        for row in going:
            known = [self.new[row][-1], *drafts[row].tokens[: size - 1]]
            ids[row, : len(known)] = torch.tensor(known)
        start = self.lengths.clamp(max=context - size)  # of what has ended, the cache is no longer read
        logits = self.session.step({"input_ids": ids, "start": start, "last": torch.zeros_like(start)})
        logits = logits.view(len(start), size, -1)
        given = {row: self._check(row, logits[row], drafts[row]) for row in going}
        self._count(times_s[size], drafts, given)
        self.tally.steps[size] = self.tally.steps.get(size, 0) + 1
        self._show()

    def _drafts(
        self, rows: Sequence[torch.Tensor], most: Sequence[int], going: Sequence[int], times_s: Mapping[int, float]
    ) -> list[Drafted]:
        """What may follow: where each drafted token takes time, what followed the last tokens before is taken instead
        if that is expected to give as many tokens per second."""
        if not self.drafter.token_time_s:
            return self.drafter.draft(rows, most)
        found = PromptLookup().draft(rows, most)
        each_s = self.drafter.token_time_s
        slow = [row for row in going if found[row].kind < LONGEST_MATCH or best_rate(
            self.seen[row].chance(found[row].kind), times_s) < best_rate(self.seen[row].chance(MODEL), times_s, each_s)]
        worth, least = self._worth(each_s, slow, times_s) if slow else (0, 0.0)
        made = self.drafter.draft(rows, [min(most[i], worth) if i in slow else 0 for i in range(len(rows))], least)
        return [made[i] if i in slow else draft for i, draft in enumerate(found)]

    def _count(self, step_s: float, drafts: Sequence[Drafted], given: Mapping[int, int]) -> None:
        """Note what a pass and its drafts took and gave."""
        made = {row: len(drafts[row].tokens) for row in given if drafts[row].kind == MODEL and drafts[row].tokens}
        fed = max((self.behind[row] + count for row, count in made.items()), default=0)
        self.stakes.note(step_s + fed * self.drafter.token_time_s, sum(given.values()) / len(given),
                         self.tried and bool(made))
        for row, count in given.items():
            self.behind[row] = int(count > made[row]) if row in made else self.behind[row] + count

    def _check(self, row: int, logits: torch.Tensor, draft: Drafted) -> int:
        """Keep what stands of a draft by the logits [size, V]; how many tokens that gives."""
        offered = min(len(logits) - 1, len(draft.tokens))
        found = accepted(logits[: offered + 1], draft, self.sampling, self.draws[row])
        right = len(found) - 1
        self.seen[row].note(draft, offered, right)
        if draft.kind == MODEL:
            self.drafter.note(draft, offered, right)
        self.tally.offered += offered
        self.tally.accepted += right
        self.tally.refused += right < offered
        self.lengths[row] += len(found)
        self.tally.tokens += self._append(row, found)
        return len(found)

    def _worth(self, token_time_s: float, going: Sequence[int], times_s: Mapping[int, float]) -> tuple[int, float]:
        """How many tokens to draft at most where each takes its time too, and the least chance to stand of a further
        one: what it takes, and adds to a step, in tokens of the pace so far. At most twice as many as pay where all
        have one chance; where none does and that may be lost, a few, to see whether they do by now."""
        longest = max(times_s)
        if self.session.plan.prediction.decode_time_s <= 0 or len(times_s) == 1:
            return longest - 1, 0.0
        drafts = dict.fromkeys(going, Drafted((0,) * (longest - 1)))
        both_s = {size: time_s + (size - 1) * token_time_s for size, time_s in times_s.items()}
        size = best_size(drafts, self.seen, both_s)
        self.tried = size == 1
        cost_s = max(self.behind[row] for row in going) * token_time_s
        if self.tried:
            size = sorted(times_s)[1]
            cost_s += both_s[size] - times_s[1]
            return (size - 1 if self.stakes.allow(cost_s, True) else 0), 0.0
        tokens = sum(self.seen[row].expected(draft, size - 1) for row, draft in drafts.items()) / len(going)
        least = tokens / both_s[size] * (token_time_s + (times_s[longest] - times_s[1]) / (longest - 1))
        return (min(2 * size, longest) - 1 if self.stakes.allow(cost_s, False) else 0), least

    def _append(self, row: int, tokens: Sequence[int]) -> int:
        """Add tokens to a sequence up to the one that ends it; how many."""
        before = len(self.new[row])
        for token in tokens:
            if not self.ended(row):
                self.held[row, self.prompt[row] + len(self.new[row])] = token
                self.new[row].append(token)
        return len(self.new[row]) - before

    def columns(self, count: int) -> torch.Tensor:
        """The first `count` tokens of all sequences, [n, count]; ended ones are filled."""
        return torch.tensor([[*new, *[self.stop.pad] * count][:count] for new in self.new])

    def _show(self) -> None:
        known = min((len(new) for row, new in enumerate(self.new) if not self.ended(row)),
                    default=max(map(len, self.new)))
        if self.on_token is not None and known > self.shown:
            for column in self.columns(known)[:, self.shown :].T:
                self.on_token(column)
        self.shown = max(self.shown, known)


def step_times_s(plan: Plan) -> dict[int, float]:
    """Predicted seconds of decode steps and of those that check drafts, by their tokens per sequence; alike where the
    plan predicts nothing."""
    said = plan.prediction
    sizes = (1, *plan.schedule.speculative_steps)
    times = (said.decode_time_s, *said.speculative_times_s)
    return dict(zip(sizes, times, strict=True)) if said.decode_time_s > 0 else dict.fromkeys(sizes, 1.0)
