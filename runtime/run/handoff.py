"""Prefill and decode apart: a session computes prompts, and hands each on with its cache; another one decodes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forebay.rewriter.ir.state import LayerStates
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.cache_slots import CacheSlots
from forebay.runtime.run.entering_prompts import PromptGroup
from forebay.runtime.run.request import Request
from forebay.runtime.run.scheduler import Scheduler
from forebay.runtime.run.session import Session

# Number and request of a prompt that was computed, its first token, and what reads its cache: whether it was handed on.
HandOn = Callable[[int, Request, int, Callable[[], torch.Tensor]], bool]


class HandoffError(RuntimeFault):
    """Prompts cannot be handed on; the message says why."""


@dataclass(frozen=True)
class ComputedPrompt:
    """A prompt that another session computed.

    Attributes:
        request: Its request.
        first: The first token of the answer.
        cache: Bytes of its cache, as `CacheSlots.read` gave them.
    """

    request: Request
    first: int
    cache: torch.Tensor


def handoff_slots(session: Session, states: LayerStates) -> CacheSlots:
    """Return the slots of a session as prompts leave and enter them with their cache.

    Raises:
        HandoffError: The cache is not on the device, or moves once the prompt is computed.
    """
    plan = session.plan
    if session.blocks is not None or plan.prefill_overlays_kv_cache or not plan.schedule.batching.admitted:
        raise HandoffError("prompts can be handed on only where the cache stays on the device; plan for at least 2 "
                           "batch_slots, and for a cache on the device (cache_tier)")
    if session.rope_switch_length:
        raise HandoffError("prompts of this model cannot be handed on: its rotary frequencies change with the length")
    return CacheSlots(plan, session.device, None, states)


class PrefillScheduler(Scheduler):
    """Requests whose prompts are computed here, and then handed on, as far as `hand_on` takes them."""

    def __init__(self, slots: CacheSlots, hand_on: HandOn, *given: Any) -> None:
        super().__init__(*given)
        self.slots, self.hand_on = slots, hand_on

    def _compute_chunk(self, group: PromptGroup) -> None:
        super()._compute_chunk(group)
        for slot, number in group.slots.items():
            if self.running.get(slot) != number:
                continue
            request, (first,) = self.requests[number], self.new[number]
            if self.hand_on(number, request, first, partial(self.slots.read, slot, 0, request.ids.numel())):
                self._leave(slot)
                self.forget(number)
                self.work.left -= request.new_tokens - 1


class DecodeScheduler(Scheduler):
    """Requests whose prompts another session computed: `computed` has them by number until they have a slot."""

    def __init__(self, slots: CacheSlots, computed: dict[int, ComputedPrompt], *given: Any) -> None:
        super().__init__(*given)
        self.slots, self.computed = slots, computed

    def _admit(self) -> None:
        while self.waiting and self.free:
            number = self.waiting.pop()
            (slot,) = self._slots_for([number])
            prompt, tokens = self.computed.pop(number), self._length(number)
            self.slots.write(slot, 0, tokens, prompt.cache)
            self.free.remove(slot)
            self.running[slot] = number
            self.new[number].append(prompt.first)
            self.work.left -= 1
