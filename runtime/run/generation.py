"""Prefill in chunks, then decode token by token, on a Session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.meeting import meeting_of
from forebay.rewriter.ir.plan import Plan
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.prefill import prefill
from forebay.runtime.run.sampling import Sampling, choose
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs


@dataclass(frozen=True)
class Stop:
    """When to end: after `max_new_tokens`, or for a sequence at any of `eos`; ended sequences are filled with `pad`."""

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    pad: int = 0


def generate_tokens(
    session: Session,
    prompts: Sequence[torch.Tensor],
    sampling: Sampling,
    stop: Stop,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    on_token: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """New tokens [len(prompts), N] int64 for prompts of unequal length (each int64 [P], P >= 1), N <= max_new_tokens.

    Fewer prompts than the plan's batch leave rows idle. The length of the call, where a model follows it, is that of
    the longest row. `generator` is one for all, or one for each prompt. `on_token`
    sees each column [len(prompts)] as it is chosen.
    RuntimeFault, before anything runs, for sequences whose cache would reach into the activations.
    """
    rows, count = session.plan.workload.batch, len(prompts)
    refuse_crossing(session.plan, prompts, stop.max_new_tokens, session.renewed_at)
    position = torch.ones(rows, dtype=torch.int64)
    position[:count] = torch.tensor([p.numel() for p in prompts])
    logits = prefill(session, dict(enumerate(prompts)))
    ended = torch.zeros(count, dtype=torch.bool)
    eos = torch.tensor(sorted(stop.eos), dtype=torch.int64)
    columns: list[torch.Tensor] = []
    last = torch.zeros(rows, dtype=torch.int64)
    grown = False
    while True:
        one = isinstance(generator, torch.Generator)
        scores = logits[:count].to(generator.device) if one else logits[:count]  # type: ignore[union-attr]
        token = choose(scores, sampling, generator).cpu()
        token = torch.where(ended, torch.full_like(token, stop.pad), token)
        columns.append(token)
        if on_token is not None:
            on_token(token)
        ended |= torch.isin(token, eos)
        if len(columns) == stop.max_new_tokens or bool(ended.all()):
            return torch.stack(columns, 1)
        longest = int(position.max())
        if session.renews(longest, longest + 1):
            new = torch.stack(columns, 1)
            logits = prefill(session, {i: torch.cat((prompt, new[i])) for i, prompt in enumerate(prompts)})
            grown = False
        else:
            if not grown:
                session.grow()
                grown = True
            ids = torch.zeros(rows, 1, dtype=torch.int64)
            ids[:count, 0] = token
            logits = session.step(StepInputs(ids, position, last, torch.full_like(position, longest + 1)))
        position = position + 1


def next_logits(session: Session, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits [len(prompts), V] of the token after each prompt; RuntimeFault as for `generate_tokens`."""
    refuse_crossing(session.plan, prompts, 1)
    return prefill(session, dict(enumerate(prompts)))


def with_renewal(prompt: int, new_tokens: int, renewed_at: int) -> tuple[int, int]:
    """Tokens of the longest prompt and of the answer to it, where the prompt and what has followed it begin anew once
    they exceed `renewed_at` (0: never)."""
    if prompt <= renewed_at < prompt + new_tokens - 1:
        return renewed_at + 1, prompt + new_tokens - renewed_at - 1
    return prompt, new_tokens


def refuse_crossing(plan: Plan, prompts: Sequence[torch.Tensor], new_tokens: int, renewed_at: int = 0) -> None:
    """RuntimeFault if the plan's cache has no room for so many prompts, or for them and their new tokens."""
    w, count, longest = plan.workload, len(prompts), max(p.numel() for p in prompts)
    need = longest + new_tokens - 1  # the last token is never appended
    begun, _ = with_renewal(longest, new_tokens, renewed_at)
    if count <= w.batch and need <= w.context and (begun <= w.prompt or not plan.lends):
        return
    meeting = meeting_of(plan)
    where = "" if meeting is None else (
        f": its cache ends at byte {meeting.cache_top} of the device arena, the activations of a decode step begin at "
        f"byte {meeting.activation_base}, and with {meeting.sequences} sequences they would meet at {meeting.tokens} "
        "tokens each")
    raise RuntimeFault(
        f"{count} prompts of up to {longest} tokens with {new_tokens} new ones do not fit the plan, which is for "
        f"{w.batch} of {w.prompt} with {w.new_tokens}{where}; plan for more (LanguageModel.reserve)")
