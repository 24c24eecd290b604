"""Answers to the prompts of one call, as columns of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.runtime.run.drafts import Drafter, PromptLookup
from forebay.runtime.run.logits_processing import Constraint
from forebay.runtime.run.prefill import prefill
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import OneCall, Request
from forebay.runtime.run.room import refuse_crossing
from forebay.runtime.run.sampling import Generators, Sampling
from forebay.runtime.run.scheduler import Scheduler
from forebay.runtime.run.session import Session

OnColumn = Callable[[torch.Tensor], None]  # the next token of each sequence


@dataclass(frozen=True)
class Stop:
    """The end of generation: after `max_new_tokens`, or for a sequence at any of `eos`; ended sequences are filled with
    `pad`."""

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    pad: int = 0


@dataclass(frozen=True)
class EachAnswer:
    """Further settings of each answer.

    Attributes:
        constrain: Makes what constrains it.
        adapters: The name of each one's adapter; "": the base alone.
    """

    constrain: Callable[[], Constraint] | None = None
    adapters: Sequence[str] = ()


def next_logits(session: Session, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits [len(prompts), V] of the token after each prompt; RuntimeFault as for `generate_tokens`."""
    refuse_crossing(session.plan, prompts, 1)
    return prefill(session, dict(enumerate(prompts)))


def speculates(plan: Plan, sampling: Sampling, count: int, generator: Generators) -> bool:
    """Return whether steps of `plan` check drafts for `count` sequences whose draws come from `generator`: with one of
    torch's for several that begin together, each column of tokens is one draw."""
    own = count == 1 or isinstance(generator, Sequence) or bool(plan.schedule.batching.admitted)
    return bool(plan.schedule.speculative_steps) and (own or not sampling.do_sample)


def generate_as_planned(
    session: Session, prompts: Sequence[torch.Tensor], sampling: Sampling, stop: Stop, generator: Generators = None,
    on_token: OnColumn | None = None, tally: WorkDone | None = None, drafter: Drafter | None = None,
    each: EachAnswer = EachAnswer(),
) -> torch.Tensor:
    """`generate_tokens`, whose drafts, where the plan's steps check any, are those of `drafter` or looked up."""
    drafts = speculates(session.plan, sampling, len(prompts), generator)
    return generate_tokens(session, prompts, sampling, stop, generator, on_token,
                           (drafter or PromptLookup()) if drafts else None, tally, each)


def generate_tokens(
    session: Session, prompts: Sequence[torch.Tensor], sampling: Sampling, stop: Stop, generator: Generators = None,
    on_token: OnColumn | None = None, drafter: Drafter | None = None, tally: WorkDone | None = None,
    each: EachAnswer = EachAnswer(),
) -> torch.Tensor:
    """New tokens [len(prompts), N] int64 for prompts of unequal length (each int64 [P], P >= 1), N <= max_new_tokens.

    Where the plan admits requests one after the other there may be more prompts than slots, and each is a call by
    itself; else they are one call, whose length, where a model follows it, is that of the longest.

    Args:
        generator: One for all, which then draws a column at a time (or, of requests that are admitted one after the
            other, the seed of each), or one for each prompt.
        on_token: Sees each column [len(prompts)] once all sequences have it.
        drafter: Its drafts are checked by the plan's speculative steps: the tokens are the same where they are not
            drawn, else the same distribution.
        tally: What was done is added to it.
        each: What more is asked for each answer.

    Raises:
        RuntimeFault: The cache has no room for the sequences; nothing has run.
        ValueError: Drafts for a plan or draws that cannot check any (`speculates`).
    """
    if drafter is not None and not speculates(session.plan, sampling, len(prompts), generator):
        raise ValueError("drafts are checked by a plan with speculative steps, and where tokens are drawn, with a "
                         "generator for each prompt")
    call = None
    if not session.plan.schedule.batching.admitted:
        refuse_crossing(session.plan, prompts, stop.max_new_tokens, session.rope_switch_length)
        longest, own = max(prompt.numel() for prompt in prompts), isinstance(generator, Sequence)
        call = OneCall(longest, len(prompts), not own, None if isinstance(generator, Sequence) else generator)
    elif sampling.do_sample and not isinstance(generator, Sequence):
        seeds = torch.randint(1 << 62, (len(prompts),), generator=generator).tolist()
        generator = [torch.Generator().manual_seed(seed) for seed in seeds]
    makers = [lambda g=g: g for g in generator] if isinstance(generator, Sequence) else [None] * len(prompts)
    answers = _Answers(len(prompts), stop.pad, on_token)
    scheduler = Scheduler(session, sampling, stop.eos, answers.end, answers.add, drafter=drafter, call=call,
                          work=tally)
    names = each.adapters or [""] * len(prompts)
    scheduler.enqueue({number: Request(ids, stop.max_new_tokens, maker, constraint=each.constrain, adapter=name,
                                       lasting_generator=True)
                       for number, (ids, maker, name) in enumerate(zip(prompts, makers, names, strict=True))})
    while scheduler.busy:
        scheduler.step()
        answers.show()
    return torch.stack([answers.column(i) for i in range(answers.shown)], 1)


class _Answers:
    """The tokens of sequences so far, and how many columns of them were `shown` to `on_token`."""

    def __init__(self, count: int, pad: int, on_token: OnColumn | None) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.going, self.pad, self.on_token, self.shown = set(range(count)), pad, on_token, 0

    def add(self, number: int, token: int) -> bool:
        self.tokens[number].append(token)
        return True

    def end(self, number: int, tokens: list[int]) -> None:
        self.going.remove(number)

    def column(self, i: int) -> torch.Tensor:
        """Token `i` of all sequences; ended ones are filled."""
        return torch.tensor([tokens[i] if i < len(tokens) else self.pad for tokens in self.tokens])

    def show(self) -> None:
        """Hand out the columns that all sequences have by now."""
        known = min((len(self.tokens[number]) for number in self.going), default=max(map(len, self.tokens)))
        if self.on_token is not None:
            for i in range(self.shown, known):
                self.on_token(self.column(i))
        self.shown = known
