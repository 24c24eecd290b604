"""Drafts by a smaller model that runs between the passes of a larger one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from forebay.kernels.operator import HOST_MEMORY
from forebay.runtime.run.acceptance import DraftCalibration, Draws
from forebay.runtime.run.drafts import MODEL, Drafted, alike
from forebay.runtime.run.prefill import prefill
from forebay.runtime.run.sampling import Sampling, probabilities
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs

KNOWN = 64  # checked tokens that weigh as much as what was expected of them


class ModelDrafter:
    """Drafts by the model of `session`, most likely or drawn by `sampling` from each row's own `draws`, with the
    distributions that tokens were drawn from. It stops where a further token would seldom stand, by what it gave those
    before (`DraftCalibration`); these are offered whatever they were given, else draws would not be fair. Its cache
    holds prompts and answers so far, in the rows that they have in the larger model's batch; of drafts that were
    refused, and of sequences that have left their rows, it takes the tokens back by not counting them. What it lacks is
    fed token by token, or computed as a prompt where that is expected to be faster: in its row alone where the plan
    admits sequences one after the other, else all rows anew. Sequences beyond the plan's room get no drafts. `right`
    and `wrong` count the tokens that stood and those that were refused, which makes the next one's `chance`."""

    def __init__(
        self, session: Session, sampling: Sampling, draws: Sequence[Draws] = (), chance: float = 0.5
    ) -> None:
        self.session, self.sampling, self.draws = session, sampling, draws
        said = session.plan.prediction
        self.token_time_s, self.prefill_s, self.expected = said.decode_time_s, said.prefill_time_s, chance
        parts = session.plan.schedule.batching.admission.prefills(session.plan.workload.batch)
        self.begin_steps = said.prefill_time_s / parts / said.decode_time_s if said.decode_time_s > 0 else 4.0
        self.right = self.wrong = 0
        self.calibration = DraftCalibration(chance)
        self._held: dict[int, list[int]] = {}  # the tokens of each row that the cache holds

    @property
    def chance(self) -> float:
        """Chance that a drafted token is accepted where all before it are."""
        return (KNOWN * self.expected + self.right) / (KNOWN + self.right + self.wrong)

    def draft(
        self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], least: float = 0.0,
        in_vain: Callable[[Mapping[int, list[int]]], bool] = lambda rows: False,
    ) -> dict[int, Drafted]:
        """Draft like `Drafter.draft`; `in_vain` is shown all rows with their drafts so far before each step, and may
        end it."""
        work = self.session.plan.workload
        rows = {row: tokens.tolist() for row, tokens in held.items()}
        most = {row: max(0, min(most[row], work.context + 1 - len(tokens))) for row, tokens in rows.items()}
        if not any(most.values()):
            return dict.fromkeys(rows, Drafted())
        known = {row: len(tokens) for row, tokens in rows.items()}
        at, logits = self._resume(held, rows, [row for row in rows if most[row]])
        chances: dict[int, list[torch.Tensor]] = {row: [] for row in rows}
        given: dict[int, list[float]] = {row: [] for row in rows}
        stands: dict[int, list[float]] = {row: [] for row in rows}
        while True:
            for row, tokens in rows.items():
                if at[row] == len(tokens) < known[row] + most[row]:
                    tokens.append(self._next(logits[row], row, chances[row], given[row]))
                    stands[row].append(self.calibration.chance(given[row][-1]))
                    if math.prod(stands[row]) * self.chance < least:
                        most[row] = len(stands[row])
            going = [row for row, tokens in rows.items() if len(tokens) < known[row] + most[row]]
            if not going or in_vain(rows):
                break
            logits = self._feed(rows, at, going)
        self._held |= {row: tokens[: at[row]] for row, tokens in rows.items()}
        return {row: Drafted(tuple(tokens[known[row] :]), MODEL, torch.stack(chances[row]) if chances[row] else None,
                             tuple(given[row]), tuple(stands[row])) for row, tokens in rows.items()}

    def note(self, draft: Drafted, offered: int, right: int) -> None:
        self.right, self.wrong = self.right + right, self.wrong + (right < offered)
        self.calibration.note(draft.given[:offered], right)

    def _resume(
        self, held: Mapping[int, torch.Tensor], rows: Mapping[int, list[int]], wanted: Sequence[int]
    ) -> tuple[dict[int, int], Mapping[int, torch.Tensor] | torch.Tensor]:
        """Return how many tokens of each row the cache holds by now, and the logits [V] behind those that are none to
        feed."""
        work, admitted = self.session.plan.workload, self.session.plan.schedule.batching.admitted
        at = {row: min(alike(self._held.get(row, []), tokens), len(tokens) - 1) for row, tokens in rows.items()}
        begun = [row for row in wanted if len(rows[row]) - at[row] > self.begin_steps + max(
            0, len(rows[row]) - work.prompt)]
        if not admitted and (begun or not self._held):
            begun = [*rows]  # such a prefill computes all rows
            self._held.clear()
        logits: dict[int, torch.Tensor] = {}
        together = admitted or work.batch
        for first in range(0, len(begun), together):
            logits |= self._begin({row: held[row][: work.prompt] for row in begun[first : first + together]})
        return at | {row: min(len(rows[row]), work.prompt) for row in begun}, logits

    def _begin(self, prompts: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute prompts in their slots; return the logits [V] after each."""
        logits = prefill(self.session, prompts)
        if not self.session.plan.schedule.batching.admitted:
            self.session.grow()
        return dict(zip(prompts, logits, strict=True))

    def _feed(self, rows: Mapping[int, list[int]], at: dict[int, int], going: Sequence[int]) -> torch.Tensor:
        """Run one step over the next token of rows that go on, and count it in `at`; the logits [B, V]. What the others
        write stands where they end."""
        work = self.session.plan.workload
        for row, count in at.items():
            at[row] = min(count, work.context - 1)  # a full one loses its last token to what is written
        for row in self._held.keys() - at.keys():
            del self._held[row][work.context - 1 :]
        ids, start = torch.zeros(work.batch, 1, dtype=torch.int64), torch.zeros(work.batch, dtype=torch.int64)
        for row, count in ({row: len(tokens) for row, tokens in self._held.items()} | at).items():
            start[row] = count
        for row in going:
            ids[row, 0] = rows[row][at[row]]
        longest = int(start.max()) + 1
        logits = self.session.step(StepInputs(ids, start, torch.zeros_like(start), torch.full_like(start, longest)))
        for row in going:
            at[row] += 1
        return logits

    def _next(self, logits: torch.Tensor, row: int, chances: list[torch.Tensor], given: list[float]) -> int:
        """The token behind logits [V], and in `given` its chance; where it is drawn, `chances` gets the distribution.
        """
        if not self.sampling.do_sample:
            token = int(logits.argmax())
            given.append(float((logits[token] - logits.logsumexp(0)).exp()))
            return token
        draws = self.draws[row]
        own = draws[0] if isinstance(draws, Sequence) else draws
        where = HOST_MEMORY if own is None else own.device
        chances.append(probabilities(logits[None], self.sampling)[0].double().to(where))
        token = int(torch.multinomial(chances[-1], 1, generator=own))
        given.append(float(chances[-1][token]))
        return token
