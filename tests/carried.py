"""A step over layers and micro-batches whose cache lies on a slower tier, written by hand: what a block schedule makes.

Cache c[n] of n = layer * micro_batches + micro-batch is loaded one turn ahead; out = c[n] + x, x = out / 2 and
c[n] = out follow, and out is stored while the next turn computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from forebay.passes.lower.place_copies import place_copies
from forebay.rewriter.ir.draft import Arrive, Draft, Evict, Fetch, Free, Mark, Move, Outgoing, Store
from forebay.rewriter.ir.plan import Budget, BufferPlacement, Plan, Schedule, Workload
from forebay.rewriter.ir.program import COMPUTE, Item, Launch, Program, Span, TensorRef, span_of

PAGE = 4096
COUNT = 1000  # float32 elements of a cache piece: its last page is not full


@dataclass(frozen=True)
class Carried:
    """How the step is made: `tier` has the cache (disk or host); `hop`: bytes of files pass through host slots; with
    `ahead` the first load is issued at the end of the step before."""

    layers: int = 3
    micro_batches: int = 2
    tier: str = "disk"
    hop: bool = False
    ahead: bool = True

    @property
    def turns(self) -> int:
        return self.layers * self.micro_batches

    def program(self) -> Program:
        """The step, with its copies placed."""
        return place_copies(self.draft(), self.plan())

    def plan(self) -> Plan:
        """Two slots of each ring, on the device and on the host."""
        names = [f"{tier}{ring}{i}" for tier, rings in (("", ("cache",)), ("host_", ("cache", "out")))
                 for ring in rings for i in range(2)]
        buffers, ends = [], {"device": self._base(), "host": self.turns * PAGE}
        for name in names:
            arena = "host" if name.startswith("host_") else "device"
            buffers.append(BufferPlacement(name, "slot", arena, ends[arena], PAGE))
            ends[arena] += PAGE
        return Plan("carried", "", Budget(ends["device"]), Workload(1, 1, 1), Schedule(1, host_hop=self.hop), (),
                    ends, buffers=tuple(buffers))

    def _base(self) -> int:
        return (self.micro_batches + 2) * PAGE  # of x, then two of out

    def x(self, k: int) -> TensorRef:
        return _floats("device", k * PAGE, f"x{k}")

    def cache(self, n: int) -> Span:
        return Span("host" if self.tier == "host" else "cache", n * PAGE, 4 * COUNT, f"c{n}")

    def draft(self) -> Draft:
        """Items and marks; a turn's place in `out` is that of two turns before, once it has been stored."""
        draft = Draft("carried", files={"cache": self.turns * PAGE} if self.tier == "disk" else {})
        slots = {b.name: b for b in self.plan().buffers}
        room = -4 * COUNT % PAGE if self.tier == "disk" else 0
        items: list[Item | Mark] = []
        add = items.append
        fetched = 1 if self.ahead else 0
        for n in range(self.turns):
            k, slot = n % self.micro_batches, slots[f"cache{n % 2}"]
            landing = _floats("device", slot.offset, f"cache{n % 2}:{n}")
            out = _floats("device", (self.micro_batches + n % 2) * PAGE, f"out:{n}")
            draft.moves.append(Move(f"fetch c{n}", self.cache(n), n % 2, span_of(landing), (0, 0 if self.hop else room),
                                    "cache", n // self.micro_batches))
            draft.stores.append(Outgoing(f"store c{n}", span_of(out), self.cache(n), room, n % 2,
                                         layer=n // self.micro_batches))
            if fetched == n:
                add(Fetch(n))
                fetched += 1
            if fetched == n + 1 < self.turns:
                add(Fetch(n + 1))
                fetched += 1
            add(Arrive(n))
            if n >= 2:
                add(Evict(n - 2))
            add(_launch(f"add{n}", "aten.add.out", out, self=landing, other=self.x(k)))
            add(Free(n))
            add(_launch(f"half{n}", "aten.mul.out", self.x(k), self=out, other=0.5))
            add(Store(n))
        for n in range(max(0, self.turns - 2), self.turns):
            add(Evict(n))
        if self.ahead:
            add(Fetch(0))
            draft.prologue = (0,)
        draft.items = items
        draft.resident = {f"x{k}": span_of(self.x(k)) for k in range(self.micro_batches)}
        draft.resident |= {f"c{n}": replace(self.cache(n), nbytes=4 * COUNT + room) for n in range(self.turns)}
        draft.outputs = {f"x{k}": self.x(k) for k in range(self.micro_batches)}
        return draft

    def expected(self, x: list[torch.Tensor], steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """x and the cache after so many steps that begin with an empty cache."""
        x, cache = [t.clone() for t in x], [torch.zeros(COUNT) for _ in range(self.turns)]
        for n in [*range(self.turns)] * steps:
            cache[n] = cache[n] + x[n % self.micro_batches]
            x[n % self.micro_batches] = cache[n] * 0.5
        return x, cache


def _floats(arena: str, offset: int, buffer: str) -> TensorRef:
    return TensorRef(arena, offset, "float32", (COUNT,), (1,), buffer)


def _launch(label: str, op: str, out: TensorRef, **given: object) -> Launch:
    reads = tuple(span_of(value) for value in given.values() if isinstance(value, TensorRef))
    return Launch(COMPUTE, op, (), given, (out,), reads, (span_of(out),), label)
