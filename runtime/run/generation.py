"""Prefill in chunks, then decode token by token, on a Session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.meeting import meeting_of
from forebay.rewriter.ir.plan import Plan
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.sampling import Sampling, choose
from forebay.runtime.run.session import Session


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
    lengths = _lengths(session, prompts)
    logits = prefill(session, prompts, lengths)
    ended = torch.zeros(count, dtype=torch.bool)
    eos = torch.tensor(sorted(stop.eos), dtype=torch.int64)
    columns: list[torch.Tensor] = []
    position = lengths.clone()
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
            logits = prefill(session, [torch.cat(both) for both in zip(prompts, new, strict=True)], position + 1)
            grown = False
        else:
            if not grown:
                session.grow()
                grown = True
            ids = torch.zeros(rows, 1, dtype=torch.int64)
            ids[:count, 0] = token
            logits = session.step({"input_ids": ids, "start": position, "last": last,
                                   "length": torch.full_like(position, longest + 1)})
        position = position + 1


def next_logits(session: Session, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits [len(prompts), V] of the token after each prompt; RuntimeFault as for `generate_tokens`."""
    refuse_crossing(session.plan, prompts, 1)
    return prefill(session, prompts, _lengths(session, prompts))[: len(prompts)].clone()


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


def _lengths(session: Session, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tokens in each row of the plan's batch; idle rows count one."""
    lengths = torch.ones(session.plan.workload.batch, dtype=torch.int64)
    lengths[: len(prompts)] = torch.tensor([p.numel() for p in prompts])
    return lengths


def prefill(
    session: Session, prompts: Sequence[torch.Tensor], lengths: torch.Tensor,
    embeds: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run the prompts through the model as one call; returns the logits [B, V] of each one's last token. `embeds`, each
    [P, H], stand for ids of -1."""
    under_way = Prefill(session, prompts, lengths, lengths.max().expand(lengths.shape), embeds=embeds)
    while not under_way.step():
        pass
    return under_way.logits


def embedded(embeds: Sequence[torch.Tensor] | None, batch: int, start: int, chunk: int) -> dict[str, torch.Tensor]:
    """The input inputs_embeds [batch, chunk, H] of a step over the tokens from `start` of rows, each [P, H], if any."""
    if embeds is None:
        return {}
    given = embeds[0].new_zeros(batch, chunk, embeds[0].shape[1])
    for to, row in zip(given, embeds, strict=False):
        part = row[start : start + chunk]
        to[: len(part)] = part
    return {"inputs_embeds": given}


class Prefill:
    """Prompts on their way into the cache, a chunk each `step`; `logits` [B, V] are then those of each last token,
    valid until the session's next step.

    Sequences stand left-aligned; what a shorter one computes past its end is never seen and is overwritten later. Each
    chunk is the smallest planned one that holds what is left, else the largest; the last one is moved back to end with
    the longest prompt, so that no position beyond it is touched. `lengths` [B] are of all rows of a step, of which the
    first hold the prompts; `calls` [B] of the calls that they belong to; `places` [B], for a plan whose prefill steps
    compute some sequences alone, are theirs. Rows beyond the prompts then repeat the first one. `take`, where it is
    given, gets the prompts that end in a chunk, each once, and the chunk's logits [B, V]: none are kept then.
    """

    def __init__(
        self, session: Session, prompts: Sequence[torch.Tensor], lengths: torch.Tensor, calls: torch.Tensor,
        places: torch.Tensor | None = None, take: Callable[[Sequence[int], torch.Tensor], None] | None = None,
        embeds: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.session, self.lengths, self.take, self.embeds = session, lengths, take, embeds
        self.inputs = {"length": calls} if places is None else {"length": calls, "places": places}
        self.longest = int(lengths.max())
        width = max(self.longest, session.plan.schedule.chunk_for(self.longest))
        self.ids = torch.zeros(lengths.numel(), width, dtype=torch.int64)
        for row in range(lengths.numel() if places is not None else len(prompts)):
            prompt = prompts[row] if row < len(prompts) else prompts[0]
            self.ids[row, : prompt.numel()] = prompt
        self.done = 0  # tokens of each row that have been computed
        self.waiting = set(range(len(prompts)))  # rows whose last token has not been computed
        self.early: dict[int, torch.Tensor] = {}  # logits [V] by row
        self.logits = torch.empty(0)

    @property
    def reached(self) -> int:
        """Tokens of each row that will have been computed behind the next chunk."""
        chunk = self._chunk
        return max(0, min(self.done, self.longest - chunk)) + chunk

    @property
    def _chunk(self) -> int:
        return self.session.plan.schedule.chunk_for(self.longest - self.done)

    def step(self) -> bool:
        """Compute the next chunk; whether it was the last."""
        chunk, start = self._chunk, self.reached - self._chunk
        last = self.lengths - 1 - start
        inputs = {"input_ids": self.ids[:, start : start + chunk], "start": torch.full_like(self.lengths, start),
                  "last": last.clamp(0, chunk - 1), **self.inputs,
                  **embedded(self.embeds, self.lengths.numel(), start, chunk)}
        logits = self.session.step(inputs)
        self.done = start + chunk
        ends = sorted(row for row in self.waiting if last[row] < chunk)
        self.waiting.difference_update(ends)
        if self.take is not None:
            self.take(ends, logits)
        elif self.done < self.longest:
            self.early |= {row: logits[row].clone() for row in ends}
        else:
            for row, values in self.early.items():
                logits[row] = values
            self.logits = logits
        return self.done >= self.longest
