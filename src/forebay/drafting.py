"""Drafts by a wrapped model; its steps run between the steps of the model that checks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from forebay.call_turns import ModelCall
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.shared_draft import DraftRecord
from forebay.runtime.run.acceptance import Draws
from forebay.runtime.run.drafts import Drafter
from forebay.runtime.run.drafts_ahead import DraftsAhead
from forebay.runtime.run.generation import speculates
from forebay.runtime.run.model_drafts import ModelDrafter
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.session import Session
from forebay.runtime.run.shared_drafts import SharedDrafter
from forebay.step_model import StepModel


def _in_one_budget(lm: StepModel) -> list[StepModel]:
    """A model, and the one that drafts for it in a part of its budget, if any."""
    return [lm, *([lm.helper] if lm.helper else [])]


def plans_in_budget(lm: StepModel) -> list[Plan]:
    """The plans that share a model's budget, its own first; that has what steps of its own take that draft."""
    own, *more = [part.plan for part in _in_one_budget(lm)]
    return [own if lm.shared_draft is None else lm.shared_draft.beside(own), *more]


def files_in_budget(lm: StepModel) -> set[str]:
    """The files of all weights that are read within a model's budget."""
    own = () if lm.shared_draft is None else lm.shared_draft.load
    slices = [f for part in _in_one_budget(lm) for f in part.files.values()]
    slices += [copy.src for copy in own if isinstance(copy.src, FileSlice)]
    return {path for each in slices for path in each.paths}


@contextmanager
def drafting(
    helper: StepModel | None, session: Session, rows: Sequence[torch.Tensor], new_tokens: int, sampling: Sampling,
    generator: torch.Generator | Sequence[torch.Generator] | None,
) -> Iterator[Drafter | None]:
    """Make the drafter that drafts by `helper` for answers of `new_tokens` to `rows` on `session`, with the helper's
    session for as long; None where the plan's steps check no drafts of such a call, and where the helper has no
    positions for it. Without a helper steps of the session itself draft, if it has such."""
    if session.plan.schedule.batching.admitted:
        with drafting_per_slot(helper, session) as drafter:
            yield drafter
        return
    limit, longest = helper.captured.max_positions if helper else 0, max(row.numel() for row in rows)
    room = min(new_tokens, limit - longest - 1) if limit else new_tokens
    own = helper is None and session.shared is not None
    if not (own or (helper and room >= 1)) or not speculates(session.plan, sampling, len(rows), generator):
        yield None
        return
    each = isinstance(generator, Sequence)
    draws = [[g] for g in generator] if each else [generator] * len(rows)  # type: ignore[union-attr]
    if helper is None:
        with _sharing(session, sampling, draws) as drafter:
            yield drafter
        return
    call = ModelCall("drafting")
    with (helper.running(len(rows), longest + 1, room, call=call) as other,  # the first token is known by then
          _recording(helper, other, sampling, draws) as drafter):
        yield drafter


@contextmanager
def drafting_per_slot(helper: StepModel | None, session: Session) -> Iterator[Drafter | None]:
    """Make the drafter that drafts by `helper` for sequences in the slots of `session`, the most likely tokens, with
    the helper's session as it is planned for as long; None where the plan's steps check no drafts, and for a helper
    with fewer slots."""
    if helper is None and session.shared is not None and session.plan.schedule.speculative_steps:
        with _sharing(session, Sampling(), ()) as drafter:
            yield drafter
        return
    if helper is None or not session.plan.schedule.speculative_steps or (
            helper.plan.workload.batch < session.plan.workload.batch):
        yield None
        return
    with (helper.running(1, 1, 1, continuous=True, call=ModelCall("drafting")) as other,
          _recording(helper, other, Sampling(), ()) as drafter):
        yield drafter


@contextmanager
def _recording(
    helper: StepModel, session: Session, sampling: Sampling, draws: Sequence[Draws]
) -> Iterator[DraftsAhead]:
    """Make a drafter on the helper's session; accepted tokens are counted at the end."""
    seen = helper.drafts_seen
    drafter = ModelDrafter(session, sampling, draws, *([] if seen is None else [seen.chance]))
    ahead = DraftsAhead(drafter)
    try:
        yield ahead
    finally:
        ahead.close()
        _count(drafter, seen)


@contextmanager
def _sharing(session: Session, sampling: Sampling, draws: Sequence[Draws]) -> Iterator[SharedDrafter]:
    """Make a drafter by steps of the session itself; accepted tokens are counted at the end."""
    assert session.shared is not None
    drafter = SharedDrafter(session, sampling, draws, session.shared.record.chance)
    try:
        yield drafter
    finally:
        _count(drafter, session.shared.record)


def _count(drafter: ModelDrafter, record: DraftRecord | None) -> None:
    if record is not None:
        record.add(drafter.right, drafter.wrong)
