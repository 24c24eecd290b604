"""Scores of given tokens, on a session whose steps give scores instead of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forebay.runtime.run.prefill import chunk_spans
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs


def token_scores(session: Session, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each row of ids [T] (T >= 2) the scores [T - 1, 2] of its tokens but the first, see `capture_model`. Rows run
    left-aligned in the steps of `chunk_spans`."""
    lengths, batch = [row.numel() - 1 for row in rows], session.plan.workload.batch
    plan = session.plan
    spans = chunk_spans(plan.schedule.prefill_chunks, max(lengths), None if session.rewindable else
                        plan.workload.context, session.rewindable)
    end = max(at + size for at, size in spans)
    ids = torch.zeros(batch, end + 1, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : row.numel()] = row
    scores = torch.zeros(batch, end, 2)
    calls = torch.tensor(lengths + [1] * (batch - len(rows)))  # each row by itself
    for at, size in spans:
        scores[:, at : at + size] = session.step(StepInputs(
            ids[:, at : at + size], torch.full((batch,), at), ids[:, at + size], calls,
            count=(calls - at).clamp(0, size)))
    return [scores[i, :length] for i, length in enumerate(lengths)]


def loglikelihoods(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    scores_of: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    size: int,
) -> list[tuple[float, bool]]:
    """For each (context, continuation) the log-likelihood in nats of the continuation, and whether greedy decoding
    would give it, by `scores_of` at most `size` rows (`token_scores`). ValueError for an empty half."""
    for i, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise ValueError(f"loglikelihood: pair {i} needs a context and a continuation of at least one token")
    rows = [torch.tensor([*context, *continuation]) for context, continuation in pairs]
    order = sorted(range(len(rows)), key=lambda i: -rows[i].numel())  # the longest first: what does not fit shows
    found: dict[int, tuple[float, bool]] = {}
    for part in (order[i : i + size] for i in range(0, len(order), size)):
        for i, scores in zip(part, scores_of([rows[i] for i in part]), strict=True):
            said = scores[-len(pairs[i][1]) :]
            found[i] = (float(said[:, 0].double().sum()), bool(said[:, 1].all()))
    return [found[i] for i in range(len(rows))]
