"""BestServe's simulator of instances that do both phases, prompts first (Algorithms 4 to 7)."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.rewriter.serving.phase_times import PhaseTimes
from forebay.rewriter.serving.request_level import answer_s, batch_of, prompts_s
from forebay.rewriter.serving.served import Served, served
from forebay.rewriter.serving.traffic import Arrival


@dataclass
class _Both:
    """An instance: when its prefill ends, whether its decodes are suspended, and its boxes: (end, request)."""

    prefill_end: float = 0.0
    suspended: bool = False
    boxes: list[tuple[float, int]] = field(default_factory=list)


def collocated(
    requests: Sequence[Arrival], times: PhaseTimes, instances: int, batch: int, seed: int, *,
    every_prefill: bool = False,
) -> Served:
    """Prefills take any instance at once, up to `batch` prompts each, and suspend what it decodes; answers take boxes,
    `batch` an instance, of those that do not prefill.

    As Algorithm 6 is printed, a prefill that finds an instance decoding puts off its answers by its own length, and
    one that follows on it before they were resumed puts off their resumption, but not the times at which they end.
    With `every_prefill` it puts those off too, which is what an instance would do.
    """
    source = random.Random(f"{seed} instances")
    own, first, last = [_Both() for _ in range(instances)], [0.0] * len(requests), [0.0] * len(requests)
    prefilled: list[tuple[float, int]] = []  # (when, request)
    begin, now = 0, 0.0
    while begin < len(requests) or prefilled:
        now = max(now, _next_event(requests, begin, prefilled, own, batch))
        for instance in own:
            while instance.boxes and instance.boxes[0][0] <= now:
                heapq.heappop(instance.boxes)
        arrived = begin < len(requests) and requests[begin].at_s <= now
        idle = [instance for instance in own if instance.prefill_end <= now]
        if arrived and idle:
            end = batch_of(requests, begin, now, batch)
            instance, took = source.choice(idle), prompts_s(requests[begin:end], times)
            if every_prefill or not instance.suspended:
                instance.boxes = [(at + took, i) for at, i in instance.boxes]
                for at, i in instance.boxes:
                    last[i] = at
            instance.prefill_end, instance.suspended = now + took, True
            for i in range(begin, end):
                first[i] = now + took
                heapq.heappush(prefilled, (now + took, i))
            begin = end
            continue
        for instance in idle:
            instance.suspended = False  # nobody waits for a prefill: what was suspended goes on
        free = [instance for instance in idle if len(instance.boxes) < batch]
        if free and prefilled and prefilled[0][0] <= now:
            i, instance = heapq.heappop(prefilled)[1], source.choice(free)
            last[i] = now + answer_s(requests[i], len(instance.boxes), times)
            heapq.heappush(instance.boxes, (last[i], i))
    return served(requests, first, last)


def _next_event(
    requests: Sequence[Arrival], begin: int, prefilled: list[tuple[float, int]], own: list[_Both], batch: int
) -> float:
    """Return the next time at which a prefill or an answer can begin (section 3.4.4.2)."""
    found = []
    if begin < len(requests):
        found.append(max(requests[begin].at_s, min(instance.prefill_end for instance in own)))
    if prefilled:
        room = min(max(x.prefill_end, x.boxes[0][0] if len(x.boxes) >= batch else 0.0) for x in own)
        found.append(max(prefilled[0][0], room))
    return min(found)
