"""BestServe's simulators: one event per batch of prompts and one per answer (Algorithms 2, 3, and both in tandem)."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

from forebay.rewriter.serving.phase_times import PhaseTimes
from forebay.rewriter.serving.served import Served, served
from forebay.rewriter.serving.traffic import Arrival

TAU = 2.5  # section 3.4.2: what divides a batch to give the one an answer meets on average


def pseudo_batch(running: int) -> int:
    """The batch that an answer is taken to share, where `running` others are decoding as it starts (equation 9)."""
    return max(int((running + 1) / TAU), 1)


def answer_s(request: Arrival, running: int, times: PhaseTimes) -> float:
    """Seconds from the first token to the last: steps alike, over the cache as it is at the end (Table 3: s = 2048 + 63
    for an answer of 64)."""
    steps = request.output - 1
    return steps * times.decode_s(pseudo_batch(running), request.prompt + steps) if steps else 0.0


def batch_of(requests: Sequence[Arrival], begin: int, now: float, most: int) -> int:
    """The end of the batch of requests from `begin` that have arrived by `now`, at most `most` of them."""
    end = begin
    while end < len(requests) and end - begin < most and requests[end].at_s <= now:
        end += 1
    return end


def prompts_s(batch: Sequence[Arrival], times: PhaseTimes) -> float:
    """Seconds of one prefill of these prompts, padded to the longest."""
    longest = max(r.prompt for r in batch)
    return times.prefill_s(len(batch), longest, longest)


def prefill_ends(
    requests: Sequence[Arrival], times: PhaseTimes, instances: int, batch: int, source: random.Random
) -> list[float]:
    """Return the end of each prompt (Algorithm 2): an idle instance, any of them, takes those that wait, up to
    `batch`."""
    idle, ends, begin, now = [0.0] * instances, [0.0] * len(requests), 0, 0.0
    while begin < len(requests):
        now = max(now, min(idle), requests[begin].at_s)
        chosen = source.choice([k for k in range(instances) if idle[k] <= now])
        end = batch_of(requests, begin, now, batch)
        done = now + prompts_s(requests[begin:end], times)
        ends[begin:end] = [done] * (end - begin)
        idle[chosen], begin = done, end
    return ends


def decode_ends(
    requests: Sequence[Arrival], ready: Sequence[float], times: PhaseTimes, instances: int, boxes: int,
    source: random.Random,
) -> list[float]:
    """Return the end of each answer (Algorithm 3): an instance has `boxes`, one for an answer; who is ready first gets
    the first free one. T_idle as printed is infinite where an instance is idle; here time goes on to the next event."""
    busy: list[list[float]] = [[] for _ in range(instances)]
    ends, now = [0.0] * len(requests), 0.0
    for i in sorted(range(len(requests)), key=lambda i: (ready[i], i)):
        free_at = min(own[0] if len(own) == boxes else 0.0 for own in busy)
        now = max(now, ready[i], free_at)
        for own in busy:
            while own and own[0] <= now:
                heapq.heappop(own)
        own = busy[source.choice([k for k in range(instances) if len(busy[k]) < boxes])]
        ends[i] = now + answer_s(requests[i], len(own), times)
        heapq.heappush(own, ends[i])
    return ends


def disaggregated(
    requests: Sequence[Arrival], prefill: tuple[PhaseTimes, int, int], decode: tuple[PhaseTimes, int, int], seed: int,
    transfer_s: Callable[[int], float] = lambda prompt: 0.0,
) -> Served:
    """Prefill instances, then decode instances, in tandem (section 3.4.3); each as (times, instances, batch).

    `transfer_s` is what the cache of a prompt takes on its way; it delays the second token, not the first. The paper
    adds nothing for it.
    """
    source = random.Random(f"{seed} instances")
    first = prefill_ends(requests, *prefill, source)
    ready = [end + transfer_s(r.prompt) for end, r in zip(first, requests, strict=True)]
    return served(requests, first, decode_ends(requests, ready, *decode, source))

