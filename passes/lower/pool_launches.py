"""Experts that are read by name: what a step does to bring those that a router names into their pool, and to use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from forebay.kernels.formats.slot_state import ITEMSIZE, slot_state
from forebay.kernels.operators import ASSIGN_SLOTS, EXPERTS
from forebay.passes.lower.addresses import POOL, RESULTS, ROUTING, WEIGHT, Addresses
from forebay.rewriter.ir.products import experts_among
from forebay.rewriter.ir.program import COMPUTE, Launch, Span, TensorRef, span_of
from forebay.rewriter.ir.schedule.routed_fetch import PLACE_NBYTES, pool_room


class Round(NamedTuple):
    """One of the rounds in which experts are used.

    Attributes:
        launch: The product with the experts of this round.
        want: Tells of each slot which expert is to come into it; None for experts that are there.
        after: The round behind whose launch these are fetched, -1 for before all.
        spares: Tell what else may be fetched, and where experts may be read, meanwhile: others than these.
    """

    launch: Launch
    want: TensorRef | None
    after: int
    spares: tuple[TensorRef, ...]


class PooledExperts:
    """A node `experts_from_pool` as launches, between which its experts are read, in rounds (`SlotState`)."""

    def __init__(self, node: fx.Node, addresses: Addresses) -> None:
        x, index, weights, table, slots, hit_rate, hop, *form = node.args
        assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
        assert isinstance(slots, int) and isinstance(hit_rate, float) and isinstance(hop, bool)
        self.node, self.form, self.table, self.ref = node, form, table.meta["val"], addresses.ref
        self.operands = tuple(map(self.ref, (x, index, weights)))  # type: ignore[arg-type]
        self.tokens, self.picks = (math.prod(index.meta["val"].shape[:-1]), index.meta["val"].shape[-1])
        self.source, self.experts = addresses.symbols[table], self.table.shape[0]
        self.among = experts_among(table)
        self.own_picks = self.picks * self.experts / self.among.get("among", self.experts)  # of this rank's experts
        self.nbytes, self.hit_rate = self.table.nbytes // self.experts, hit_rate
        self.stride = pool_room(self.nbytes, hop)
        self.unit = self.nbytes if hop else PLACE_NBYTES  # in which is counted where an expert begins
        self.sizes = slot_state(slots, self.experts, self.tokens * self.picks, hop)
        self.placed = 0 if hop else self.experts  # places of experts come first, and then the state
        self.told_at = self.placed + self.sizes.numbers

    def assign(self) -> Launch:
        """The launch that assigns experts to each round."""
        index, places = self.operands[1], self._numbers(0, self.placed) if self.placed else None
        kept = self._numbers(self.placed, self.sizes.numbers), self._numbers(self.told_at, self.sizes.told)
        written = tuple(map(span_of, kept))
        read = tuple(span_of(ref) for ref in (index, places) if ref is not None)
        args = index, *kept, *self.sizes, places, self.stride // self.unit
        return Launch(COMPUTE, ASSIGN_SLOTS.name, args, {}, (), (*read, *written), written,
                      f"{self.node.name}_assign", self.node.meta.get("layer", -1))

    def pool(self) -> TensorRef:
        """All places at which an expert may begin."""
        symbol = self.source.replace(WEIGHT, POOL)
        places = (self.sizes.slots * self.stride - self.nbytes) // self.unit + 1
        return TensorRef(symbol, 0, str(self.table.dtype)[6:], (places, self.table.shape[1]),
                         (self.unit // self.table.itemsize, 1), symbol)

    def rounds(self) -> Iterator[Round]:
        """The copies and launches of each round."""
        sizes, out, pool, results = self.sizes, self.ref(self.node), self.pool(), self._results()
        entries = [self._numbers(self.told_at + sizes.entries(i), self.experts) for i in range(sizes.rounds + 1)]
        want = [self._numbers(self.told_at + sizes.want(i), sizes.slots) for i in range(sizes.rounds + 1)]
        slots = Span(pool.arena, 0, sizes.slots * self.stride, pool.buffer)
        for number in range(sizes.rounds + 1):
            last = number == sizes.rounds
            share = (1 - self.hit_rate) / sizes.rounds if number else self.hit_rate
            how = {"entries": entries[number], "count": self.experts, "share": share, "results": results, "last": last,
                   **self.among}
            made = out if last else results
            written = (span_of(results), *((span_of(out),) if last else ()))
            reads = (*map(span_of, (*self.operands, entries[number])), slots, span_of(results))
            beside = range(max(0, number - sizes.beside), number)
            yield Round(
                Launch(COMPUTE, EXPERTS.name, (*self.operands, pool, *self.form), how, (made,), reads, written,
                       self.node.name, self.node.meta.get("layer", -1)),
                want[number] if number else None, number - 1 - sizes.beside,
                tuple(ref for i in beside for ref in ((want[i], entries[i]) if i else (entries[i],))))

    def _results(self) -> TensorRef:
        rows, columns = self.tokens * self.picks, self.operands[0].shape[-1]
        return TensorRef(RESULTS, 0, "float32", (rows, columns), (columns, 1), RESULTS)

    def _numbers(self, first: int, count: int) -> TensorRef:
        symbol = self.source.replace(WEIGHT, ROUTING)
        return TensorRef(symbol, first * ITEMSIZE, "int64", (count,), (1,), symbol)
