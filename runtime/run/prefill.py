"""Prompts on their way into the cache, a chunk of tokens each step.

Rows stand left-aligned. What a shorter one computes past its end is never seen and is overwritten later; states that
are not rewindable take the tokens that `StepInputs.count` counts, and no others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import Features, StepInputs, counted_positions


@dataclass(frozen=True)
class PrefillChunk:
    """One step of a prefill.

    Attributes:
        inputs: The step's inputs.
        at: Tokens of each row before it.
        ends: The rows whose last token it computes, each in one chunk only; none that has no tokens.
        final: Whether it is the last one.
    """

    inputs: StepInputs
    at: int
    ends: tuple[int, ...]
    final: bool


def chunk_spans(
    sizes: Sequence[int], tokens: int, room: int | None = None, rewindable: bool = True,
    groups: Collection[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """Cut `tokens` tokens into steps of the planned `sizes`, each the smallest that holds the rest, else the largest.

    The last step is moved back to end with the last token, so that no position past it is touched; a step longer than
    all tokens is taken where the cache has `room` for it (None: it has). Where states are not `rewindable`, no step is
    moved back: the last one holds tokens past the last, if there is room, which `StepInputs.count` leaves out. Tokens
    of one of `groups` [first, end) see each other, so that a step which breaks off within some is followed by one that
    begins with the first of these. It may begin within others, whose tokens before it are in the cache.

    Returns:
        The first token and the size of each step.

    Raises:
        PlanError: A group is longer than the largest step.
    """
    spans, done = list[tuple[int, int]](), 0
    while done < tokens:
        if not rewindable:
            sizes = [size for size in sizes if room is None or done + size <= room] or [1]
        size = min((size for size in sizes if size >= tokens - done), default=max(sizes))
        if rewindable and room is not None and size > max(tokens, room):
            size = max(size for size in (*sizes, 1) if size <= tokens)
        at = max(0, min(done, tokens - size)) if rewindable else done
        spans.append((at, size))
        before, done = done, at + size
        done = min((first for first, end in groups if first < done < end), default=done)
        if done <= before:
            raise PlanError(f"prefill_chunk: an image's tokens see each other, and steps of {max(sizes)} tokens break "
                            "off within images: take a larger prefill_chunk, or fewer prompts at a time")
    return spans


def require_whole_chunks(plan: Plan) -> None:
    """PlanError for a plan that admits sequences, whose states are not rewindable, with no room for the last chunk of a
    prompt: a step over one token computes all slots."""
    work = plan.workload
    if plan.schedule.batching.admitted and any(size == 1 for _, size in chunk_spans(
            plan.schedule.prefill_chunks, work.prompt, work.context, rewindable=False)):
        raise PlanError(f"prefill_chunk: chunks of {plan.schedule.prefill_chunks} tokens end past the {work.context} "
                        f"of prompt and answer, and states that are not rewindable cannot take a token twice; take "
                        f"another prefill_chunk, or more new_tokens")


def chunks(
    spans: Sequence[tuple[int, int]], ids: torch.Tensor, start: torch.Tensor, lengths: torch.Tensor,
    call: torch.Tensor, batch_slots: torch.Tensor | None = None, features: Features | None = None, kept: int = 0,
) -> Iterator[PrefillChunk]:
    """Yield the steps over `spans` of ids [B, T], of which row i has `lengths[i]`, after `start` [B] cached tokens, but
    for those that end with the `kept` first ids or before.

    Args:
        call: [B] tokens of the call that each row belongs to (`StepInputs.length`).
        batch_slots: `StepInputs.batch_slots`.
        features: Of the first rows.
    """
    ids = torch.nn.functional.pad(ids, (0, max(0, max(at + size for at, size in spans) - ids.shape[1])))
    done = 0
    for at, size in spans:
        ends = tuple(row for row, length in enumerate(lengths.tolist()) if done < length <= at + size)
        done = at + size
        if done <= kept:
            continue
        cut = _features_of(features or {}, len(ids), at, size)
        if "until" in cut:  # tokens of text see all up to themselves, and no step what is after it
            counted = counted_positions(start + at, size)[:, :, 0] + 1
            cut["until"] = torch.minimum(torch.maximum(cut["until"], counted), counted[:, -1:])
        yield PrefillChunk(StepInputs(ids[:, at:done], start + at, (lengths - 1 - at).clamp(0, size - 1), call,
                                      batch_slots, count=(lengths - at).clamp(0, size),
                                      **cut),
                           at, ends, (at, size) == spans[-1])


def _features_of(features: Features, batch: int, at: int, size: int) -> dict[str, torch.Tensor]:
    """The features of tokens [at, at + size) by name, each [batch, size, ...]."""
    cut = {}
    for name, rows in features.items():
        cut[name] = rows[0].new_zeros(batch, size, *rows[0].shape[1:])
        for to, row in zip(cut[name], rows, strict=False):
            part = row[at : at + size]
            to[: len(part)] = part
    return cut


def _by_row(features: Features | None, prompts: Sequence[int], slots: Sequence[int]) -> Features | None:
    """The features of rows that stand for these slots, of which some have one of the prompts in slots `prompts`."""
    if features is None:
        return None
    number = {slot: i for i, slot in enumerate(prompts)}
    return {name: [values[number[slot]] if slot in number else values[0][:0] for slot in slots]
            for name, values in features.items()}


def image_groups(features: Features | None) -> set[tuple[int, int]]:
    """The first token and the end of each run of tokens that see each other."""
    return {(rows.index(end), end) for row in (features or {}).get("until", ()) if (rows := row.tolist())
            for end in set(rows) if rows.count(end) > 1}


def prompt_chunks(
    plan: Plan, prompts: Mapping[int, torch.Tensor], length: int | None = None,
    features: Features | None = None, rewindable: bool = True, kept: int = 0,
) -> Iterator[PrefillChunk]:
    """Yield the steps that compute `prompts`, int64 [P] each, by the batch slots that they stand in; the first `kept`
    tokens of each are there.

    Rows of a step are the slots; of a plan that admits sequences while others decode, they are the prompts in turn, at
    most `BatchSchedule.admitted`, and those left over repeat the first. `length` is that of one call of all; without it
    each prompt is a call by itself. `features` are of the prompts in their order.
    """
    admitted = plan.schedule.batching.admitted
    slots = [*prompts, *[next(iter(prompts))] * (admitted - len(prompts))] if admitted else range(plan.workload.batch)
    rows = [prompts.get(slot, torch.zeros(1, dtype=torch.int64)) for slot in slots]
    call = torch.tensor([row.numel() for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    real = torch.tensor([row < len(prompts) if admitted else slot in prompts for row, slot in enumerate(slots)])
    features = _by_row(features, list(prompts), slots)
    spans = chunk_spans(plan.schedule.prefill_chunks, ids.shape[1], None if rewindable else plan.workload.context,
                        rewindable, image_groups(features))
    batch_slots = torch.tensor(slots) if admitted else None
    return chunks(spans, ids, torch.zeros_like(call), torch.where(real, call, 0),
                  call if length is None else torch.full_like(call, length), batch_slots, features, kept)


def prefill(
    session: Session, prompts: Mapping[int, torch.Tensor], features: Features | None = None
) -> torch.Tensor:
    """Compute `prompts` by slot as one call; return the logits [n, V] of each one's last token, in their order."""
    admitted = session.plan.schedule.batching.admitted
    length = None if admitted else max(prompt.numel() for prompt in prompts.values())
    index = {row if admitted else slot: row for row, slot in enumerate(prompts)}
    logits = torch.empty(0)
    for chunk in prompt_chunks(session.plan, prompts, length, features, session.rewindable):
        step = session.step(chunk.inputs)
        logits = logits if logits.numel() else step.new_empty(len(prompts), step.shape[-1])
        for row in chunk.ends:
            logits[index[row]] = step[row]
    return logits
