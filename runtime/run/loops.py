"""The loop that answers prompts as a plan has it: in places, with drafts that are checked, or one token a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forebay.runtime.run.balance import balanced_places
from forebay.runtime.run.drafts import Drafter, PromptLookup
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import Request, answer_all, entering
from forebay.runtime.run.session import Session
from forebay.runtime.run.speculation import Tally, generate_speculatively, speculates


def generate_as_planned(
    session: Session,
    prompts: Sequence[torch.Tensor],
    sampling: Sampling,
    stop: Stop,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    on_token: Callable[[torch.Tensor], None] | None = None,
    tally: Tally | None = None,
    drafter: Drafter | None = None,
) -> torch.Tensor:
    """`generate_tokens` by the loop that the session's plan is for; what drafts, those of `drafter` or else what is
    looked up in the prompt, brought is added to `tally`."""
    if entering(session.plan):
        return _generate_in_places(session, prompts, sampling, stop, generator, on_token, drafter, tally)
    if speculates(session.plan, sampling, len(prompts), generator):
        return generate_speculatively(session, prompts, sampling, stop, generator, on_token, drafter or PromptLookup(),
                                      tally)
    return _generate_balanced(session, prompts, sampling, stop, generator, on_token)


def _generate_in_places(
    session: Session, prompts: Sequence[torch.Tensor], sampling: Sampling, stop: Stop,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    on_token: Callable[[torch.Tensor], None] | None = None, drafter: Drafter | None = None, tally: Tally | None = None,
) -> torch.Tensor:
    """As `generate_tokens`, for any number of prompts: they enter the places of the session's plan as others end.

    One `generator` for all gives each prompt the seed of its own. `on_token` sees the columns when all have ended.
    """
    if sampling.do_sample and (generator is None or isinstance(generator, torch.Generator)):
        seeds = torch.randint(1 << 62, (len(prompts),), generator=generator).tolist()
        generator = [torch.Generator().manual_seed(seed) for seed in seeds]
    drawn = [lambda g=g: g for g in generator] if isinstance(generator, Sequence) else [None] * len(prompts)
    found = torch.full((len(prompts), stop.max_new_tokens), stop.pad, dtype=torch.int64)
    longest = 0

    def on_end(number: int, new: list[int]) -> None:
        nonlocal longest
        found[number, : len(new)] = torch.tensor(new)
        longest = max(longest, len(new))

    asked = [Request(ids, stop.max_new_tokens, g) for ids, g in zip(prompts, drawn, strict=True)]
    work = answer_all(session, asked, sampling, stop.eos, on_end=on_end, drafter=drafter)
    if tally is not None:
        tally.add(work)
    if on_token is not None:
        for column in found[:, :longest].T:
            on_token(column)
    return found[:, :longest]


def _generate_balanced(
    session: Session, prompts: Sequence[torch.Tensor], sampling: Sampling, stop: Stop,
    generator: torch.Generator | Sequence[torch.Generator] | None, on_token: Callable[[torch.Tensor], None] | None,
) -> torch.Tensor:
    """`generate_tokens`, with the prompts in rows whose micro-batches hold about as many tokens. Where one generator
    draws for all, rows stay as they are: it draws in their order."""
    plan = session.plan
    rows = plan.schedule.batching.sequences(plan.workload.batch, 1)
    lengths = [prompt.numel() for prompt in prompts]
    if len(prompts) <= rows or len(set(lengths)) == 1 or len(prompts) > plan.workload.batch or (
            sampling.do_sample and not isinstance(generator, Sequence)):
        return generate_tokens(session, prompts, sampling, stop, generator, on_token)
    at = balanced_places(lengths, range(len(prompts)), [0] * plan.schedule.batching.micro_batches.count, rows)
    back, order = torch.tensor(at), sorted(range(len(at)), key=at.__getitem__)
    found = generate_tokens(
        session, [prompts[i] for i in order], sampling, stop,
        [generator[i] for i in order] if isinstance(generator, Sequence) else generator,
        None if on_token is None else lambda column: on_token(column[back]))
    return found[back]
