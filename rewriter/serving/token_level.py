"""A service simulated iteration by iteration: sequences enter and leave between two steps, and their caches lie in
blocks, which can run out. Runs of equal decode steps are taken at once, so that it costs per request, not per token."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.rewriter.serving.phase_times import PhaseTimes
from forebay.rewriter.serving.served import Served, served
from forebay.rewriter.serving.traffic import Arrival, TrafficError

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class InstanceLimits:
    """The limits of an instance at one time: sequences (of a prefill instance: prompts in one batch), tokens in its
    cache, in blocks of `block`, and tokens of prompts in one step.

    With `chunk` a step takes that many tokens: one of each sequence that decodes, the rest of one prompt; 0 prefills
    whole prompts, before anything decodes. All prompts begin with the same `shared_prefix` tokens, which an instance
    computes and keeps once.
    """

    batch: int
    cache_tokens: int
    prompt_tokens: int = 8192
    chunk: int = 0
    block: int = 16
    shared_prefix: int = 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def validate(self, requests: Sequence[Arrival], role: Role) -> None:
        """TrafficError where a request can never be served."""
        if self.batch < 1 or self.block < 1 or self.prompt_tokens < 1 or self.shared_prefix < 0:
            raise TrafficError("batch, block and prompt_tokens must be at least 1, shared_prefix at least 0")
        if self.chunk and self.chunk <= self.batch:
            raise TrafficError(f"chunk: {self.chunk} tokens leave a prompt none with a batch of {self.batch}; above "
                               f"{self.batch} they do")
        most = max((r.prompt + (0 if role == "prefill" else r.output) for r in requests), default=0)
        room = self.cache_tokens // self.block * self.block
        if most + self.block > room:
            raise TrafficError(f"a request takes {most} tokens of cache and a block, an instance holds {max(0, room)}; "
                               "more devices (--tp), or shorter requests, fit")


@dataclass
class _Entrant:
    """A request on its way: `known` tokens that its cache must hold before it decodes, `cached` of them there, and
    tokens still to come."""

    index: int
    known: int
    left: int
    cached: int = 0
    begun: bool = False  # has its first token


@dataclass
class _Replica:
    """An instance; `running` are its sequences, oldest first."""

    limits: InstanceLimits
    times: PhaseTimes
    role: Role
    running: list[_Entrant] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)  # of each request, by its index
    held: int = 0  # of all of them
    prefix_blocks: int = 0  # kept for all
    preempted: int = 0
    most_cached: int = 0
    after: Callable[[float], None] = lambda now: None  # what the iteration under way brings

    @property
    def free(self) -> int:
        return self.limits.cache_tokens // self.limits.block - self.held - self.prefix_blocks

    def need(self, tokens: int) -> int:
        """Blocks of its own for a sequence of so many tokens."""
        return self.limits.blocks(tokens) - min(self.prefix_blocks, tokens // self.limits.block)

    def hold(self, job: _Entrant, tokens: int) -> None:
        before, self.blocks[job.index] = self.blocks.get(job.index, 0), self.need(tokens)
        self.held += self.blocks[job.index] - before
        self.most_cached = max(self.most_cached, (self.held + self.prefix_blocks) * self.limits.block)

    def admit(self, queue: deque[_Entrant]) -> list[_Entrant]:
        """Take from the front of `queue` what there is room for; the first of a prefix computes it."""
        taken: list[_Entrant] = []
        tokens = 0
        while queue and len(self.running) < self.limits.batch:
            job = queue[0]
            spare = len(self.running)  # a block for each, so that not all that enter must leave at once
            if self.need(job.known + 1) + spare > self.free:
                break
            new = job.known - min(self.prefix_blocks * self.limits.block, job.known - 1)
            if taken and tokens + new > self.limits.prompt_tokens:
                break
            queue.popleft()
            arrived = self.role == "decode" and not job.begun
            job.cached = job.known if arrived else job.known - new
            job.begun = job.begun or arrived
            shared = min(self.limits.shared_prefix, job.known) // self.limits.block
            if not self.prefix_blocks and shared and self.role != "decode":
                self.hold(job, job.known + 1)
                self.prefix_blocks = shared
                self.blocks[job.index] -= shared
                self.held -= shared
            else:
                self.hold(job, job.known + 1)
            self.running.append(job)
            taken.append(job)
            tokens += new
            if self.limits.chunk and not arrived:
                break
        return taken

    def filling(self) -> list[_Entrant]:
        return [job for job in self.running if job.cached < job.known]

    def leave(self, job: _Entrant) -> None:
        self.running.remove(job)
        self.held -= self.blocks.pop(job.index)

    def make_room(self, queue: deque[_Entrant], decoding: list[_Entrant]) -> None:
        """Let the youngest go, to begin again later, until each of `decoding` can have a token more."""
        while not self.fits(decoding, 1):
            job = self.running[-1]
            self.leave(job)
            job.known, job.cached = max(job.cached, job.known), 0
            queue.appendleft(job)
            self.preempted += 1
            if job in decoding:
                decoding.remove(job)

    def fits(self, decoding: list[_Entrant], steps: int) -> bool:
        """Return whether each of `decoding` can have so many tokens more."""
        each = -(-steps // self.limits.block)  # blocks that it begins at most
        return each * len(decoding) <= self.free or sum(
            self.need(j.cached + steps) - self.blocks[j.index] for j in decoding) <= self.free

    def steps(self, decoding: list[_Entrant], until_s: float) -> tuple[int, float]:
        """Return how many decode steps can be taken at once, and their seconds: until one ends, blocks run out, or
        `until_s` has passed; steps grow by equal amounts, so the mean one is that of the mean context."""
        most, n = min(job.left for job in decoding), len(decoding)
        context = sum(job.cached for job in decoding) / n

        if not self.fits(decoding, most):
            low = 1
            while most - low > 1:
                middle = (low + most) // 2
                low, most = (middle, most) if self.fits(decoding, middle) else (low, middle)
            most = low

        def took_s(k: int) -> float:
            return k * self.times.decode_s(n, context + (k + 1) / 2)

        if math.isfinite(until_s):
            once = took_s(1)
            most = max(1, min(most, math.ceil(until_s / once))) if once > 0 else most
            while most > 1 and took_s(most - 1) >= until_s:
                most -= 1
        return most, took_s(most)


class _Queued:
    """Engines before one queue, and the clock."""

    def __init__(self, requests: Sequence[Arrival], ready: Sequence[float], engines: list[_Replica]) -> None:
        self.requests, self.ready, self.engines = requests, ready, engines
        self.order = sorted(range(len(requests)), key=lambda i: (ready[i], i))
        self.queue: deque[_Entrant] = deque()
        self.first, self.last = [math.nan] * len(requests), [math.nan] * len(requests)
        self.at = 0  # of order

    def next_arrival_s(self) -> float:
        return self.ready[self.order[self.at]] if self.at < len(self.order) else math.inf

    def run(self) -> None:
        """Until every request has its last token: instances that are free, emptiest first, begin what there is."""
        ends: list[tuple[float, int]] = []
        idle = set(range(len(self.engines)))
        while self.at < len(self.order) or ends:
            now = min(self.next_arrival_s(), ends[0][0] if ends else math.inf)
            while self.next_arrival_s() <= now:
                i = self.order[self.at]
                request, has_first = self.requests[i], self.engines[0].role == "decode"
                self.queue.append(_Entrant(i, request.prompt, request.output - has_first))
                self.at += 1
            while ends and ends[0][0] <= now:
                k = heapq.heappop(ends)[1]
                self.engines[k].after(now)
                idle.add(k)
            for k in sorted(idle, key=lambda k: (len(self.engines[k].running), k)):
                took = self.begin(self.engines[k], now)
                if took is not None:
                    idle.discard(k)
                    heapq.heappush(ends, (now + took, k))

    def begin(self, engine: _Replica, now: float) -> float | None:
        """Begin an iteration: its seconds, or None where there is nothing to do."""
        entered = [job for job in engine.admit(self.queue) if job.cached < job.known]
        filling = engine.filling()
        if filling and not engine.limits.chunk:
            return self.prefill(engine, entered)
        decoding = [job for job in engine.running if job.cached >= job.known]
        if decoding:
            engine.make_room(self.queue, decoding)
        filling = engine.filling()
        if filling:
            return self.mixed(engine, decoding, filling[0])
        if not decoding:
            return None
        waits = len(decoding) < engine.limits.batch and not self.queue
        count, took = engine.steps(decoding, self.next_arrival_s() - now if waits else math.inf)

        def after(end: float) -> None:
            for job in decoding:
                self.advance(engine, job, count, end)

        engine.after = after
        return took

    def prefill(self, engine: _Replica, entered: list[_Entrant]) -> float:
        n = len(entered)
        new, context = sum(j.known - j.cached for j in entered) / n, sum(j.known for j in entered) / n

        def after(end: float) -> None:
            for job in entered:
                self.prefilled(engine, job, end)

        engine.after = after
        return engine.times.prefill_s(n, new, context)

    def mixed(self, engine: _Replica, decoding: list[_Entrant], job: _Entrant) -> float:
        tokens = min(engine.limits.chunk - len(decoding), job.known - job.cached)
        context = sum(j.cached + 1 for j in decoding) / len(decoding) if decoding else 0.0

        def after(end: float) -> None:
            for other in decoding:
                self.advance(engine, other, 1, end)
            job.cached += tokens
            if job.cached >= job.known:
                self.prefilled(engine, job, end)

        engine.after = after
        return engine.times.mixed_s(len(decoding), context, tokens, job.cached + tokens)

    def prefilled(self, engine: _Replica, job: _Entrant, end: float) -> None:
        """A prefill gives a token, the first or, of what was preempted, the next."""
        job.cached = job.known
        if not job.begun:
            self.first[job.index], job.begun = end, True
        job.left -= 1
        if engine.role == "prefill" or not job.left:
            self.last[job.index] = end
            engine.leave(job)

    def advance(self, engine: _Replica, job: _Entrant, steps: int, end: float) -> None:
        job.cached += steps
        job.left -= steps
        engine.hold(job, job.cached)
        if not job.left:
            self.last[job.index] = end
            engine.leave(job)


def token_level(requests: Sequence[Arrival], times: PhaseTimes, instances: int, limits: InstanceLimits) -> Served:
    """Instances that do both phases, before one queue. TrafficError where a request can never be served."""
    limits.validate(requests, "both")
    engines = [_Replica(limits, times, "both") for _ in range(instances)]
    service = _Queued(requests, [r.at_s for r in requests], engines)
    service.run()
    return served(requests, service.first, service.last, sum(e.preempted for e in engines),
                  max(e.most_cached for e in engines))


def token_level_tandem(
    requests: Sequence[Arrival], prefill: tuple[PhaseTimes, int, InstanceLimits],
    decode: tuple[PhaseTimes, int, InstanceLimits], transfer_s: Callable[[int], float],
) -> Served:
    """Prefill instances, then decode instances, each as (times, instances, limits); `transfer_s` is what the cache of a
    prompt takes on its way, after its first token. What loses its cache is prefilled again where it decodes."""
    (times, count, limits), (decode_times, decode_count, decode_limits) = prefill, decode
    limits.validate(requests, "prefill")
    decode_limits.validate(requests, "decode")
    engines = [_Replica(limits, times, "prefill") for _ in range(count)]
    before = _Queued(requests, [r.at_s for r in requests], engines)
    before.run()
    longer = [i for i, r in enumerate(requests) if r.output > 1]
    ready = [before.first[i] + transfer_s(requests[i].prompt) for i in longer]
    decoders = [_Replica(decode_limits, decode_times, "decode") for _ in range(decode_count)]
    behind = _Queued([requests[i] for i in longer], ready, decoders)
    behind.run()
    last = list(before.first)
    for i, end in zip(longer, behind.last, strict=True):
        last[i] = end
    return served(requests, before.first, last, sum(e.preempted for e in decoders),
                  max(e.most_cached for e in (*engines, *decoders)))
