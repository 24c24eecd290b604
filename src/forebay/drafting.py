"""Drafts by a wrapped model whose steps run between those of the one that checks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from forebay.runtime.run.acceptance import Draws
from forebay.runtime.run.drafts_ahead import DraftsAhead
from forebay.runtime.run.model_drafts import ModelDrafter
from forebay.runtime.run.places import entering
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.session import Session
from forebay.runtime.run.speculation import speculates

if TYPE_CHECKING:
    from forebay.api import LanguageModel


def in_one_budget(lm: LanguageModel) -> list[LanguageModel]:
    """A model, and the one that drafts for it in a part of its budget, if any."""
    return [lm, *([lm.helper] if lm.helper else [])]


@contextmanager
def drafting(
    helper: LanguageModel | None, session: Session, rows: Sequence[torch.Tensor], new_tokens: int, sampling: Sampling,
    generator: torch.Generator | Sequence[torch.Generator] | None,
) -> Iterator[DraftsAhead | None]:
    """What drafts by `helper` for answers of `new_tokens` to `rows` on `session`, with the helper's session for as
    long; None where the plan's steps check no drafts of such a call, and where the helper has no positions for it."""
    if entering(session.plan):
        with drafting_in_places(helper, session) as drafter:
            yield drafter
        return
    limit, longest = helper.captured.max_positions if helper else 0, max(row.numel() for row in rows)
    room = min(new_tokens, limit - longest - 1) if limit else new_tokens
    if helper is None or room < 1 or not speculates(session.plan, sampling, len(rows), generator):
        yield None
        return
    each = isinstance(generator, Sequence)
    draws = [[g] for g in generator] if each else [generator] * len(rows)  # type: ignore[union-attr]
    with (helper.running(len(rows), longest + 1, room) as other,  # the first token is known when drafts begin
          _recording(helper, other, sampling, draws) as drafter):
        yield drafter


@contextmanager
def drafting_in_places(helper: LanguageModel | None, session: Session) -> Iterator[DraftsAhead | None]:
    """What drafts by `helper` for sequences in the places of `session`, the most likely tokens, with the helper's
    session as it is planned for as long; None where the plan's steps check no drafts, and for a helper with fewer
    places."""
    if helper is None or not session.plan.schedule.speculative_steps or (
            helper.plan.workload.batch < session.plan.workload.batch):
        yield None
        return
    with helper.running(1, 1, 1, in_places=True) as other, _recording(helper, other, Sampling(), ()) as drafter:
        yield drafter


@contextmanager
def _recording(
    helper: LanguageModel, session: Session, sampling: Sampling, draws: Sequence[Draws]
) -> Iterator[DraftsAhead]:
    """What drafts on the helper's session; the tokens that stood are counted in the end."""
    seen = helper.drafts_seen
    drafter = ModelDrafter(session, sampling, draws, *([] if seen is None else [seen.chance]))
    ahead = DraftsAhead(drafter)
    try:
        yield ahead
    finally:
        ahead.close()
        if seen is not None:
            seen.add(drafter.right, drafter.wrong)
