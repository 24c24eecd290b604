"""Scores of given tokens, on a session whose steps give scores instead of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forebay.runtime.run.session import Session


def token_scores(session: Session, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each row of ids [T] (T >= 2) the scores [T - 1, 2] of its tokens but the first, see `capture_model`.

    Rows stand left-aligned; what a shorter one computes past its end is never seen. The last chunk is moved back to end
    with the longest row, so that no cache position beyond it is touched.
    """
    lengths, plan = [row.numel() - 1 for row in rows], session.plan
    longest = max(lengths)
    chunk = plan.schedule.chunk_for(longest)
    span = max(longest, chunk)
    ids = torch.zeros(plan.workload.batch, span + 1, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : row.numel()] = row
    scores = torch.zeros(plan.workload.batch, span, 2)
    calls = torch.tensor(lengths + [1] * (plan.workload.batch - len(rows)))  # each row by itself
    for start in (*range(0, span - chunk, chunk), span - chunk):
        scores[:, start : start + chunk] = session.step({
            "input_ids": ids[:, start : start + chunk], "start": torch.full((plan.workload.batch,), start),
            "last": ids[:, start + chunk], "length": calls})
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
