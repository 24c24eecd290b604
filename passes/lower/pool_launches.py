"""Experts that are read by name: what a step does to bring those that a router names into their pool, and to use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from forebay.kernels.formats.slot_state import ITEMSIZE, slot_state
from forebay.kernels.operators import ASSIGN_SLOTS, EXPERTS
from forebay.passes.lower.addresses import AHEAD, POOL, RESULTS, ROUTING, WEIGHT, Addresses
from forebay.rewriter.ir.operator_names import called
from forebay.rewriter.ir.products import experts_among
from forebay.rewriter.ir.program import COMPUTE, Launch, Span, TensorRef, span_of
from forebay.rewriter.ir.schedule.routed_fetch import PLACE_NBYTES, RoutedFetch, pool_room


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
        x, index, weights, table, slots, hit_rate, ahead, hop, *form = node.args
        assert isinstance(table, fx.Node) and isinstance(index, fx.Node) and isinstance(ahead, int)
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
        self.sizes = slot_state(slots, self.experts, self.tokens * self.picks, hop, ahead)
        self.ahead_rate = RoutedFetch((), hit_rate, ahead=ahead).ahead_rate(self.experts)
        self.placed = 0 if hop else self.experts  # places of experts come first, then the list, and then the state
        self.state_at = self.placed + ahead
        self.told_at = self.state_at + self.sizes.numbers

    def assign(self) -> Launch:
        """The launch that assigns experts to each round."""
        index, places = self.operands[1], self._numbers(0, self.placed) if self.placed else None
        kept = self._numbers(self.state_at, self.sizes.numbers), self._numbers(self.told_at, self.sizes.told)
        written = tuple(map(span_of, kept))
        read = tuple(span_of(ref) for ref in (index, places, self.listed()) if ref is not None)
        args = index, *kept, *self.sizes, places, self.stride // self.unit, self.listed()
        return Launch(COMPUTE, ASSIGN_SLOTS.name, args, {}, (), (*read, *written), written,
                      f"{self.node.name}_assign", self.node.meta.get("layer", -1))

    def listed(self) -> TensorRef | None:
        """The experts that are read ahead; None where none are."""
        return self._numbers(self.placed, self.sizes.ahead) if self.sizes.ahead else None

    def list_next(self) -> Launch:
        """The launch that lists the experts to be read ahead in the next step."""
        sizes, listed = self.sizes, self.listed()
        assert listed is not None
        found = self._numbers(self.told_at + sizes.told - sizes.ahead, sizes.ahead)
        return Launch(COMPUTE, called(torch.ops.aten.copy_.default), (listed, found), {}, (), (span_of(found),),
                      (span_of(listed),), f"{self.node.name}_list", self.node.meta.get("layer", -1))

    def pool(self) -> TensorRef:
        """All offsets at which an expert may begin."""
        return self._slots(self.source.replace(WEIGHT, POOL), self.sizes.slots)

    def memory_ahead(self) -> TensorRef:
        """All offsets at which an expert that is read ahead may begin."""
        return self._slots(AHEAD, self.sizes.ahead)

    def _slots(self, symbol: str, slots: int) -> TensorRef:
        places = (slots * self.stride - self.nbytes) // self.unit + 1
        return TensorRef(symbol, 0, str(self.table.dtype)[6:], (places, self.table.shape[1]),
                         (self.unit // self.table.itemsize, 1), symbol)

    def rounds(self) -> Iterator[Round]:
        """The copies and launches of each round."""
        sizes = self.sizes
        entries = [self._numbers(self.told_at + sizes.entries(i), self.experts) for i in range(sizes.rounds + 1)]
        want = [self._numbers(self.told_at + sizes.want(i), sizes.slots) for i in range(sizes.rounds + 1)]
        for number in range(sizes.rounds + 1):
            share = (1 - self.hit_rate - self.ahead_rate) / sizes.rounds if number else self.hit_rate
            beside = range(max(0, number - sizes.beside), number)
            yield Round(
                self._product(entries[number], self.pool(), sizes.slots, share, number == sizes.rounds),
                want[number] if number else None, number - 1 - sizes.beside,
                tuple(ref for i in beside for ref in ((want[i], entries[i]) if i else (entries[i],))))

    def come_ahead(self) -> Launch:
        """The product with the experts that were read ahead."""
        entries = self._numbers(self.told_at + self.sizes.entries_ahead, self.experts)
        return self._product(entries, self.memory_ahead(), self.sizes.ahead, self.ahead_rate, False)

    def _product(self, entries: TensorRef, memory: TensorRef, slots: int, share: float, last: bool) -> Launch:
        """The product with the experts of so many slots of a memory that `entries` tell of, a `share` of the named."""
        out, results = self.ref(self.node), self._results()
        how = {"entries": entries, "count": self.experts, "share": share, "results": results, "last": last,
               **self.among}
        reads = (*map(span_of, (*self.operands, entries)), Span(memory.arena, 0, slots * self.stride, memory.buffer),
                 span_of(results))
        return Launch(COMPUTE, EXPERTS.name, (*self.operands, memory, *self.form), how, (out if last else results,),
                      reads, (span_of(results), *((span_of(out),) if last else ())), self.node.name,
                      self.node.meta.get("layer", -1))

    def _results(self) -> TensorRef:
        rows, columns = self.tokens * self.picks, self.operands[0].shape[-1]
        return TensorRef(RESULTS, 0, "float32", (rows, columns), (columns, 1), RESULTS)

    def _numbers(self, first: int, count: int) -> TensorRef:
        symbol = self.source.replace(WEIGHT, ROUTING)
        return TensorRef(symbol, first * ITEMSIZE, "int64", (count,), (1,), symbol)
