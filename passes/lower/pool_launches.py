"""Experts that are read by name: what a step does to bring those that a router names into their pool, and to use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from forebay.kernels.formats.slot_state import ITEMSIZE, PoolPart, SlotState, parts_of, rounds_of
from forebay.kernels.operators import ASSIGN_SLOTS, EXPERTS
from forebay.passes.lower.addresses import POOL, ROUTING, WEIGHT, Addresses
from forebay.rewriter.ir.program import COMPUTE, Launch, Span, TensorRef, span_of
from forebay.rewriter.ir.schedule.routed_fetch import PLACE_NBYTES, expert_room


class Round(NamedTuple):
    """One of the rounds in which experts are brought and used.

    Attributes:
        want: Tells of each slot which expert is to come into it.
        pool: The slots.
        launch: The product with the experts of this round.
    """

    want: TensorRef
    pool: TensorRef
    launch: Launch


class PooledExperts:
    """A node `experts_from_pool` as launches, between which its experts are read: part by part, or, where the pool has
    but one, in as many rounds as it takes."""

    def __init__(self, node: fx.Node, addresses: Addresses) -> None:
        x, index, weights, table, slots, parts, *form = node.args
        assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
        assert isinstance(slots, int) and isinstance(parts, int)
        self.node, self.form, self.table, self.ref = node, form, table.meta["val"], addresses.ref
        self.operands = tuple(map(self.ref, (x, index, weights)))  # type: ignore[arg-type]
        self.tokens, self.picks = (math.prod(index.meta["val"].shape[:-1]), index.meta["val"].shape[-1])
        self.source, self.experts = addresses.symbols[table], self.table.shape[0]
        self.nbytes = self.table.nbytes // self.experts
        self.stride = expert_room(self.nbytes)
        self.parts: list[tuple[PoolPart, SlotState, int]] = []  # with where what is known of it begins
        at = self.experts  # behind their places
        for part in parts_of(self.experts, slots, parts):
            rounds = rounds_of(part.experts, self.tokens * self.picks, part.slots)
            assert rounds == 1 or parts == 1, "plan.schedule.routed.parts"
            self.parts.append((part, SlotState(part.slots, rounds, self.experts), at))
            at += self.parts[-1][1].numbers

    def assign(self) -> Iterator[Launch]:
        """What tells each round of a part its experts."""
        index, places = self.operands[1], self._numbers(0, self.experts)
        for part, sizes, at in self.parts:
            state = self._numbers(at, sizes.numbers)
            touched = span_of(index), span_of(places), span_of(state)
            args = index, state, *sizes, part.first, part.experts, places, self.stride // PLACE_NBYTES
            yield Launch(COMPUTE, ASSIGN_SLOTS.name, args, {}, (), touched, touched[2:], f"{self.node.name}_assign",
                         self.node.meta.get("layer", -1))

    def rounds(self) -> Iterator[Round]:
        """What each round brings, and computes."""
        out, before = self.ref(self.node), False
        for part, sizes, at in self.parts:
            pool = self._pool(part)
            for number in range(sizes.rounds):
                entries = self._numbers(at + sizes.entries(number), self.experts)
                how = {"entries": entries, "count": self.experts, "accumulate": before,
                       "rounds": sum(each.rounds for _, each, _ in self.parts)}
                slots = Span(pool.arena, pool.offset, part.slots * self.stride, pool.buffer)
                reads = (*map(span_of, (*self.operands, entries)), slots, *((span_of(out),) if before else ()))
                yield Round(self._numbers(at + sizes.want(number), sizes.slots), pool, Launch(
                    COMPUTE, EXPERTS.name, (*self.operands, pool, *self.form), how, (out,), reads, (span_of(out),),
                    self.node.name, self.node.meta.get("layer", -1)))
                before = True

    def _pool(self, part: PoolPart) -> TensorRef:
        """All places at which an expert may begin."""
        symbol = self.source.replace(WEIGHT, POOL)
        places = (part.slots * self.stride - self.nbytes) // PLACE_NBYTES + 1
        return TensorRef(symbol, part.slot * self.stride, str(self.table.dtype)[6:], (places, self.table.shape[1]),
                         (PLACE_NBYTES // self.table.itemsize, 1), symbol)

    def _numbers(self, first: int, count: int) -> TensorRef:
        symbol = self.source.replace(WEIGHT, ROUTING)
        return TensorRef(symbol, first * ITEMSIZE, "int64", (count,), (1,), symbol)
