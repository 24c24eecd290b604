"""Drafts by a smaller model that runs between the passes of a larger one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from forebay.runtime.run.acceptance import Draws, Sureness
from forebay.runtime.run.drafts import MODEL, Drafted
from forebay.runtime.run.generation import prefill
from forebay.runtime.run.sampling import Sampling, probabilities
from forebay.runtime.run.session import Session


class ModelDrafter:
    """What the model of `session` says comes next, most likely or drawn by `sampling` from each sequence's own `draws`,
    with the distributions that tokens were drawn from. It stops where a further token would seldom stand, by what it
    gave those before (`Sureness`); these are offered whatever they were given, else draws would not be fair. Its cache
    holds prompts and answers so far; of drafts that were refused it takes the tokens back by not counting them.
    Sequences beyond the plan's room get no drafts. `right` and `wrong` count the tokens that stood and those that were
    refused, which makes the next one's `chance`.

    ValueError for a plan whose cache comes to the device for its turns, or whose sequences enter places: what is
    stored there cannot be taken back.
    """

    def __init__(
        self, session: Session, sampling: Sampling, draws: Sequence[Draws], chance: float = 0.5
    ) -> None:
        block = session.plan.schedule.block
        if block.staged or block.entering:
            raise ValueError("assistant_model: drafts that were refused are taken back from its cache, which must stay "
                             "on the device; wrap it with a larger budget and without places")
        self.session, self.sampling, self.draws = session, sampling, draws
        self.token_time_s, self.chance = session.plan.prediction.decode_time_s, chance
        self.right = self.wrong = 0
        self.sureness = Sureness(chance)
        self._held: list[list[int]] = []  # the tokens of each sequence that the cache holds

    def draft(self, held: Sequence[torch.Tensor], most: Sequence[int], least: float = 0.0) -> list[Drafted]:
        work = self.session.plan.workload
        rows = [tokens.tolist() for tokens in held]
        most = [max(0, min(count, work.context + 1 - len(row))) for row, count in zip(rows, most, strict=True)]
        if not any(most):
            return [Drafted()] * len(rows)
        known = [len(row) for row in rows]
        at, logits = self._resume(rows) if self._held else (
            [min(count, work.prompt) for count in known], self._begin([tokens[: work.prompt] for tokens in held]))
        chances: list[list[torch.Tensor]] = [[] for _ in rows]
        given: list[list[float]] = [[] for _ in rows]
        stands: list[list[float]] = [[] for _ in rows]
        while True:
            for i, row in enumerate(rows):
                if at[i] == len(row) < known[i] + most[i]:
                    row.append(self._next(logits[i], i, chances[i], given[i]))
                    stands[i].append(self.sureness.chance(given[i][-1]))
                    if math.prod(stands[i]) * self.chance < least:
                        most[i] = len(stands[i])
            going = [i for i, row in enumerate(rows) if len(row) < known[i] + most[i]]
            if not going:
                break
            logits = self._feed(rows, at, going)
        self._held = [row[: at[i]] for i, row in enumerate(rows)]
        return [Drafted(tuple(row[known[i] :]), MODEL, torch.stack(chances[i]) if chances[i] else None,
                        tuple(given[i]), tuple(stands[i])) for i, row in enumerate(rows)]

    def note(self, draft: Drafted, offered: int, right: int) -> None:
        self.right, self.wrong = self.right + right, self.wrong + (right < offered)
        self.sureness.note(draft.given[:offered], right)

    def _begin(self, held: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the prompts; the logits [B, V] behind them."""
        lengths = torch.ones(self.session.plan.workload.batch, dtype=torch.int64)  # idle rows count one
        lengths[: len(held)] = torch.tensor([len(tokens) for tokens in held])
        logits = prefill(self.session, held, lengths)[: len(held)].clone()  # growing may move what lies behind them
        self.session.grow()
        return logits

    def _resume(self, rows: Sequence[list[int]]) -> tuple[list[int], torch.Tensor]:
        """How many tokens of each sequence the cache still holds, and need not be fed; at least one must."""
        at = []
        for row, had in zip(rows, self._held, strict=True):
            most = min(len(had), len(row) - 1)
            at.append(next((i for i in range(most) if had[i] != row[i]), most))
        return at, torch.empty(0)

    def _feed(self, rows: Sequence[list[int]], at: list[int], going: Sequence[int]) -> torch.Tensor:
        """Run one step over the next token of sequences that go on, and count it in `at`; the logits [B, V]. What the
        others write stands where they end."""
        work = self.session.plan.workload
        at[:] = [min(count, work.context - 1) for count in at]  # a full one loses its last token to what is written
        ids, start = torch.zeros(work.batch, 1, dtype=torch.int64), torch.zeros(work.batch, dtype=torch.int64)
        start[: len(at)] = torch.tensor(at)
        for i in going:
            ids[i, 0] = rows[i][at[i]]
        longest = int(start.max()) + 1
        logits = self.session.step({"input_ids": ids, "start": start, "last": torch.zeros_like(start),
                                    "length": torch.full_like(start, longest)})
        for i in going:
            at[i] += 1
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
        chances.append(probabilities(logits[None], self.sampling)[0].double().to("cpu" if own is None else own.device))
        token = int(torch.multinomial(chances[-1], 1, generator=own))
        given.append(float(chances[-1][token]))
        return token
