"""Drafts by steps of the model itself that read fewer bits and share its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from forebay.runtime.run.acceptance import Draws
from forebay.runtime.run.model_drafts import ModelDrafter
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs


class SharedDrafter(ModelDrafter):
    """Drafts by the step that shares the memory of `session` (`SharedDraft`). Its cache is the model's: of prompts and
    answers it lacks only the last token, and what it writes behind is checked, and written anew, by the step that comes
    (as in SubSpec, arXiv 2509.18344)."""

    def __init__(
        self, session: Session, sampling: Sampling, draws: Sequence[Draws] = (), chance: float = 0.5
    ) -> None:
        super().__init__(session, sampling, draws, chance)
        assert session.shared is not None
        self.token_time_s, self.prefill_s = session.shared.plan.prediction.decode_time_s, 0.0

    def _resume(
        self, held: Mapping[int, torch.Tensor], rows: Mapping[int, list[int]], wanted: Sequence[int]
    ) -> tuple[dict[int, int], Mapping[int, torch.Tensor] | torch.Tensor]:
        return {row: len(tokens) - 1 for row, tokens in rows.items()}, {}

    def _feed(self, rows: Mapping[int, list[int]], at: dict[int, int], going: Sequence[int]) -> torch.Tensor:
        """Run one step over the next token of rows that go on, and count it in `at`; the logits [B, V]. All others
        write at the last position, which no sequence comes to: the last token of an answer is not kept."""
        work = self.session.plan.workload
        ids = torch.zeros(work.batch, 1, dtype=torch.int64)
        start = torch.full((work.batch,), work.context - 1, dtype=torch.int64)
        for row in going:
            ids[row, 0], start[row] = rows[row][at[row]], at[row]
            at[row] += 1
        return self.session.draft(StepInputs(ids, start, torch.zeros_like(start), start + 1))
