"""Experts that are read by name: what a step does to bring those that a router names into their pool, and to use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from forebay.kernels.formats.slot_state import ITEMSIZE, SlotState, rounds_of
from forebay.kernels.operators import ASSIGN_SLOTS, EXPERTS
from forebay.passes.lower.addresses import POOL, ROUTING, WEIGHT, Addresses
from forebay.rewriter.ir.program import COMPUTE, Launch, TensorRef, row_major_strides, span_of


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
    """A node `experts_from_pool` as launches, between which its experts are read."""

    def __init__(self, node: fx.Node, addresses: Addresses) -> None:
        x, index, weights, table, slots, *form = node.args
        assert isinstance(table, fx.Node) and isinstance(index, fx.Node) and isinstance(slots, int)
        self.node, self.form, self.table, self.ref = node, form, table.meta["val"], addresses.ref
        self.operands = tuple(map(self.ref, (x, index, weights)))  # type: ignore[arg-type]
        self.tokens, self.picks = (math.prod(index.meta["val"].shape[:-1]), index.meta["val"].shape[-1])
        self.source = addresses.symbols[table]
        experts = self.table.shape[0]
        self.sizes = SlotState(slots, rounds_of(experts, self.tokens * self.picks, slots), experts)

    def assign(self) -> Launch:
        """What tells each round its experts."""
        index, state = self.operands[1], self._numbers(0, self.sizes.numbers)
        touched = span_of(index), span_of(state)
        return Launch(COMPUTE, ASSIGN_SLOTS.name, (index, state, *self.sizes), {}, (), touched, touched[1:],
                      f"{self.node.name}_assign", self.node.meta.get("layer", -1))

    def rounds(self) -> Iterator[Round]:
        """What each round brings, and computes."""
        _, columns = self.table.shape
        symbol, shape = self.source.replace(WEIGHT, POOL), (self.sizes.slots, columns)
        pool = TensorRef(symbol, 0, str(self.table.dtype)[6:], shape, row_major_strides(shape), symbol)
        out = self.ref(self.node)
        for number in range(self.sizes.rounds):
            entries = self._numbers(self.sizes.entries(number), self.sizes.experts)
            how = {"entries": entries, "count": self.sizes.experts, "accumulate": number > 0}
            reads = (*map(span_of, (*self.operands, pool, entries)), *((span_of(out),) if number else ()))
            yield Round(self._numbers(self.sizes.want(number), self.sizes.slots), pool, Launch(
                COMPUTE, EXPERTS.name, (*self.operands, pool, *self.form), how, (out,), reads, (span_of(out),),
                self.node.name, self.node.meta.get("layer", -1)))

    def _numbers(self, first: int, count: int) -> TensorRef:
        symbol = self.source.replace(WEIGHT, ROUTING)
        return TensorRef(symbol, first * ITEMSIZE, "int64", (count,), (1,), symbol)
