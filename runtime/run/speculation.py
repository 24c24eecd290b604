"""Several tokens for one pass over the weights: drafted tokens are checked by one step, and what it gives is what
decoding one by one would have given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.runtime.run.acceptance import Draws, accepted
from forebay.runtime.run.draft_choice import DraftChoice
from forebay.runtime.run.drafts import Drafted, Drafter
from forebay.runtime.run.generation import Stop, refuse_crossing
from forebay.runtime.run.prefill import prefill
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import WorkDone
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs


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
    one). Sequences go on by as many tokens as were right of their own drafts, which `DraftChoice` chooses. `on_token`
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
        self.lengths = torch.zeros(session.plan.workload.batch, dtype=torch.int64)
        self.lengths[:count] = torch.tensor([p.numel() for p in prompts])
        self.held = torch.zeros(count, int(self.lengths.max()) + stop.max_new_tokens, dtype=torch.int64)
        for row, prompt in zip(self.held, prompts, strict=True):
            row[: prompt.numel()] = prompt
        self.prompt = [p.numel() for p in prompts]
        self.new: list[list[int]] = [[] for _ in prompts]
        self.shown = 0  # columns that were handed out
        self.choice = DraftChoice(session.plan, drafter)
        self.choice.steps = tally.steps

    def begin(self, prompts: Sequence[torch.Tensor]) -> None:
        """Run the prompts; the first token of each."""
        if self.stop.max_new_tokens > 1:
            self.choice.begin(dict(enumerate(prompts)), self.stop.max_new_tokens)
        logits = prefill(self.session, dict(enumerate(prompts)))
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
        size, drafts = self.choice.choose(
            {row: self.held[row, : self.prompt[row] + len(self.new[row])] for row in going},
            {row: self.stop.max_new_tokens - len(self.new[row]) for row in going},
            context - max(int(self.lengths[row]) for row in going))
        ids = torch.zeros(len(self.lengths), size, dtype=torch.int64)
        for row in going:
            known = [self.new[row][-1], *drafts[row].tokens[: size - 1]]
            ids[row, : len(known)] = torch.tensor(known)
        start = self.lengths.clamp(max=context - size)  # of what has ended, the cache is no longer read
        logits = self.session.step(StepInputs(ids, start, torch.zeros_like(start)))
        logits = logits.view(len(start), size, -1)
        given = {row: self._check(row, logits[row], drafts[row]) for row in going}
        self.tally.drafting_s += self.choice.count(size, drafts, given)
        self._show()

    def _check(self, row: int, logits: torch.Tensor, draft: Drafted) -> int:
        """Keep what stands of a draft by the logits [size, V]; how many tokens that gives."""
        offered = min(len(logits) - 1, len(draft.tokens))
        found = accepted(logits[: offered + 1], draft, self.sampling, self.draws[row])
        right = len(found) - 1
        self.choice.note(row, draft, offered, right)
        self.tally.offered += offered
        self.tally.accepted += right
        self.tally.refused += right < offered
        self.lengths[row] += len(found)
        self.tally.tokens += self._append(row, found)
        return len(found)

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
