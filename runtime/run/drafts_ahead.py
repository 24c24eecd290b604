"""Drafts that are made while the pass before them runs, on the guess that all which it checks stands."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from forebay.runtime.run.drafts import Drafted
from forebay.runtime.run.model_drafts import ModelDrafter

LOG = logging.getLogger("forebay")


class DraftsAhead:
    """The drafts of a `ModelDrafter`, those that `begin` asked for in a thread beside the caller's. What that drafts
    first is its guess of the token that the pass gives behind the checked ones; where both agree, `draft` has the rest
    at once, else it drafts anew, and what was begun for nothing ends within a token. Drafts are the same whenever the
    thread comes to them: what of them stood is told to the model that drafts only between two of its turns."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter = drafter
        self._pool: ThreadPoolExecutor | None = None
        self._future: Future[dict[int, Drafted]] | None = None
        self._guessed: dict[int, list[int]] = {}
        self._known: dict[int, list[int]] | None = None  # what came, of the rows that go on, once it is known
        self._notes: list[tuple[Drafted, int, int]] = []

    @property
    def token_time_s(self) -> float:
        return self.drafter.token_time_s

    @property
    def prefill_s(self) -> float:
        return self.drafter.prefill_s

    @property
    def chance(self) -> float:
        return self.drafter.chance

    @property
    def able(self) -> bool:
        """Whether drafts may be begun: those that are drawn take their turns at the generators of what checks them, and
        weights that stream would take the pass's links."""
        said = self.drafter.session.plan.prediction
        return not self.drafter.sampling.do_sample and not said.streamed_nbytes

    def note(self, draft: Drafted, offered: int, right: int) -> None:
        self._notes.append((draft, offered, right))
        if self._future is None:
            self._tell()

    def begin(self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], least: float) -> None:
        """Draft for the sequences that rows will have if all that `held` has stands, tokens int64 [T] of which the last
        ones are checked by the pass that comes: one token for the one that the pass will give, and then at most so many
        as `draft` says."""
        self._pool = self._pool or ThreadPoolExecutor(1, "forebay-drafts")
        self._guessed, self._known = {row: tokens.tolist() for row, tokens in held.items()}, None
        more = {row: count + 1 for row, count in most.items()}
        self._future = self._pool.submit(self.drafter.draft, dict(held), more, least, self._in_vain)

    def draft(
        self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], least: float = 0.0
    ) -> dict[int, Drafted]:
        ready = self.ready(held, most)
        rest = {row: 0 if row in ready else count for row, count in most.items()}
        return self.drafter.draft(held, rest, least) | ready

    def close(self) -> None:
        """Wait for the thread, for nothing it uses may go before; what it met no longer matters."""
        try:
            self.ready({}, {})
        except Exception as error:
            LOG.debug("drafting ahead: %s", error)
        if self._pool is not None:
            self._pool.shutdown()

    def ready(self, held: Mapping[int, torch.Tensor], most: Mapping[int, int]) -> dict[int, Drafted]:
        """Return the drafts made ahead, of at least one token, for rows whose guessed tokens came."""
        future, self._future = self._future, None
        if future is None:
            return {}
        self._known = {row: held[row].tolist() for row, count in most.items() if count and row in self._guessed}
        try:
            drafts = future.result()
        finally:
            self._tell()
        found = {row: _behind(drafts[row], most[row]) for row, tokens in self._known.items()
                 if tokens == [*self._guessed[row], *drafts[row].tokens[:1]]}
        return {row: draft for row, draft in found.items() if draft.tokens}

    def _in_vain(self, rows: Mapping[int, list[int]]) -> bool:
        """Return whether no row's guess has come: those of the rows so far are known to be wrong, or nobody wants
        them."""
        known = self._known
        return known is not None and not any(
            rows[row][: len(tokens)] == tokens[: len(rows[row])] for row, tokens in known.items())

    def _tell(self) -> None:
        for note in self._notes:
            self.drafter.note(*note)
        self._notes.clear()


def _behind(draft: Drafted, most: int) -> Drafted:
    """A draft without its first token, which has come, of at most so many."""
    behind = slice(1, 1 + most)
    return Drafted(draft.tokens[behind], draft.kind, None, draft.given[behind], draft.stands[behind], ahead=True)
