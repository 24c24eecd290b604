"""Prompts of turns that may follow, computed while nothing else is to be done.

The next prompt of a conversation begins with the last one and its answer. The answer's part of the KV cache came of
steps of one token, which round differently than those of prompts. So it is computed once more, as a prompt, a block at
a time: a request that arrives waits for one block at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.runtime.run.request import Request
from forebay.runtime.run.room import fits
from forebay.runtime.run.session import KnownPrefixes

MOST_TURNS = 8  # of the answers so far those whose next turns are computed


@dataclass
class NextTurn:
    """The tokens that a prompt may begin with: `ids` [P], with an adapter. Its first `done` tokens were computed."""

    ids: torch.Tensor
    adapter: str
    done: int = 0


class NextTurns:
    """Beginnings of prompts that are yet to be computed, the last one first."""

    def __init__(self) -> None:
        self._turns: deque[NextTurn] = deque(maxlen=MOST_TURNS)

    def __len__(self) -> int:
        return len(self._turns)

    def note(self, ids: list[int], adapter: str) -> None:
        """A prompt may begin with `ids`."""
        self._turns.append(NextTurn(torch.tensor(ids), adapter))

    def next(self, known: KnownPrefixes | None, plan: Plan) -> Request | None:
        """A request whose prompt ends with the next block that is not `known`; None if there is none."""
        while self._turns and known is not None:
            turn = self._turns[-1]
            end = known.next_unknown(turn.ids, turn.adapter)
            if end > turn.done and fits(plan, end, 1):
                turn.done = end  # tried once, whether or not it is kept
                return Request(turn.ids[:end], 1, adapter=turn.adapter)
            self._turns.pop()
        return None
