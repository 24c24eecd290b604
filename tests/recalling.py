"""A stand-in for a session, whose tokens follow from all that a row's cache holds, and drafts for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from forebay.rewriter.ir.plan import Limits, Plan, Prediction, Schedule, Workload
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.speculation import Speculation
from forebay.runtime.run.drafts import Drafted
from forebay.runtime.run.step_inputs import StepInputs

VOCAB = 5


class Recalling:
    """A session whose logits depend on every token of a row, through a cache as the model's; what is written behind
    where a row's tokens end is rubbish that nothing may read."""

    rope_switch_length, rewindable, prefixes = 0, True, None
    device: Any = SimpleNamespace(queues=False)

    def __init__(self, plan: Plan) -> None:
        self.plan, self.grown = plan, 0
        self.cache = torch.full((plan.workload.batch, plan.workload.context), -1)
        self.sizes: list[int] = []

    def crosses_rope_switch(self, held: int, length: int) -> bool:
        return False

    def grow(self) -> None:
        self.grown += 1

    def step(self, inputs: StepInputs) -> torch.Tensor:
        ids, start = inputs.input_ids, inputs.start
        size, batch, batching = ids.shape[1], self.plan.workload.batch, self.plan.schedule.batching
        assert size in self.plan.schedule.step_sizes
        assert ids.shape[0] == start.shape[0] == batching.sequences(batch, size)
        assert (inputs.batch_slots is not None) is bool(batching.admitted and batching.is_prefill(size))
        rows = range(batch) if inputs.batch_slots is None else inputs.batch_slots.tolist()
        self.sizes.append(size)
        logits = torch.zeros(len(ids), size, VOCAB)
        for i, (row, at) in enumerate(zip(rows, start.tolist(), strict=True)):
            assert 0 <= at <= self.cache.shape[1] - size, "a position beyond the cache is written"
            self.cache[row, at : at + size] = ids[i]
            for j in range(size):
                logits[i, j] = scores(self.cache[row, : at + j + 1].tolist())
        if size in self.plan.schedule.speculative_steps:
            return logits
        return logits[torch.arange(len(ids)), inputs.last]


def scores(seen: list[int]) -> torch.Tensor:
    """Repeats itself much, and depends on the first token as on the last."""
    best = (seen[-1] + (2 if len(seen) % 7 else 1) + seen[0]) % VOCAB
    return torch.eye(VOCAB)[best] * 2


class Guessing:
    """Drafts from a list of numbers, right ones where it says so; it sees no more than it may."""

    token_time_s, prefill_s, chance = 0.0, 0.0, 0.5

    def note(self, draft: Drafted, offered: int, right: int) -> None:
        pass

    def __init__(self, guesses: Sequence[int], right: Sequence[bool]) -> None:
        self.guesses, self.right, self.calls = guesses, right, 0

    def draft(
        self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], least: float = 0.0
    ) -> dict[int, Drafted]:
        found = {}
        for row, tokens in held.items():
            seen, drafted = tokens.tolist(), []
            for _ in range(max(0, most[row])):
                self.calls += 1
                token = int(scores(seen).argmax()) if self.right[self.calls % len(self.right)] else (
                    self.guesses[self.calls % len(self.guesses)])
                drafted.append(token)
                seen.append(token)
            found[row] = Drafted(tuple(drafted))
        return found


def session(
    batch: int, prompt: int, new_tokens: int, sizes: Collection[int], chunk: int, admitted: int = 0,
    kind: type[Recalling] | None = None,
) -> Any:
    batching = BatchSchedule(admission=Admission(admitted), speculation=Speculation(tuple(sorted(sizes, reverse=True))))
    schedule = Schedule(prefill_chunks=(chunk,), batching=batching)
    said = Prediction(speculative_busy_s=(0.1,) * len(sizes))
    return (kind or Recalling)(Plan("f", "m", Limits(1), Workload(batch, prompt, new_tokens), schedule, (),
                                    prediction=said))
