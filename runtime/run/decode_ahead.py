"""Decode steps that are issued before the tokens of the step before are read: these go from step to step on the device.

A sequence that ends by its token runs in one step more, whose token nobody takes. So steps go ahead where that costs
little: nothing streams, and tokens are chosen from logits alone (`TokenSampler.goes_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs
from forebay.runtime.run.token_sampler import TokenSampler


@dataclass(frozen=True)
class IssuedStep:
    """A step that was issued: the requests in its slots, and their next tokens [B], on the device and as read."""

    running: Mapping[int, int]
    tokens: torch.Tensor
    read: Callable[[], torch.Tensor]


class DecodeAhead:
    """The steps of a session, of which one is under way while the tokens of another are read."""

    def __init__(self, session: Session, sampler: TokenSampler) -> None:
        self.session, self.sampler = session, sampler
        self.flight: IssuedStep | None = None

    @classmethod
    def of(cls, session: Session, sampler: TokenSampler) -> DecodeAhead | None:
        """None where steps are not queued, or one more would cost more than waiting does, or would be seen."""
        plan = session.plan
        able = (session.device.queues and session.rewindable and not session.rope_switch_length
                and not plan.schedule.batching.cache.staged and not plan.schedule.speculative_steps
                and all(w.tier == "device" for w in plan.weights))
        return cls(session, sampler) if able else None

    def under_way(self, running: Mapping[int, int]) -> bool:
        """Return whether a step was issued for any request that still runs; one for others alone is forgotten."""
        if self.flight is not None and not self._alive(self.flight, running):
            self.flight = None
        return self.flight is not None

    def decode(
        self, running: Mapping[int, int], left: Mapping[int, int],
        inputs: Callable[[Mapping[int, int], int], StepInputs],
    ) -> tuple[dict[int, int], dict[int, list[int]]]:
        """The next tokens of requests that run, with the slots that have any; the step after it is issued before.

        Args:
            running: Requests by slot.
            left: Tokens that each request may still get.
            inputs: Makes the inputs of a step over the known tokens of some slots, or over so many after these.
        """
        flight = self.flight if self.under_way(running) else None
        flight = flight or self._issue(running, inputs(running, 0))
        going = {slot: number for slot, number in running.items() if left[number] > 1}
        self.flight = None
        if going and running.items() <= flight.running.items():
            self.flight = self._issue(going, replace(inputs(going, 1), input_ids=flight.tokens[:, None]))
        alive = self._alive(flight, running)
        tokens = flight.read().tolist()
        return alive, {slot: [tokens[slot]] for slot in alive}

    def _issue(self, running: Mapping[int, int], inputs: StepInputs) -> IssuedStep:
        tokens = self.sampler.chosen_there(running, self.session.step(inputs))
        return IssuedStep(dict(running), tokens, self.session.device.read_later(tokens))

    def _alive(self, flight: IssuedStep, running: Mapping[int, int]) -> dict[int, int]:
        return {slot: number for slot, number in sorted(flight.running.items()) if running.get(slot) == number}
