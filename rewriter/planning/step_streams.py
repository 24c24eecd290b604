"""What a model's weights are to the planner, ways to spend a budget on them, and what steps then stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from forebay.rewriter.ir.alignment import PAGE_NBYTES, aligned
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.planning.expert_pools import ExpertPools, pools_of
from forebay.rewriter.planning.model_needs import ModelNeeds, WeightUse
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.closed_form import Rates

SMALL_NBYTES = 64 << 10  # below this a copy costs more in latency (~0.1 ms) than in bytes


@dataclass(frozen=True)
class WeightKinds:
    """A model's weights by what the planner does with them, and their aligned bytes."""

    pinned: tuple[WeightUse, ...]
    products: tuple[WeightUse, ...]  # of the rest, those that a step reads whole
    dense: tuple[WeightUse, ...]  # of these, those that have no experts by name in pools
    tables: tuple[WeightUse, ...]  # of the rest, those read by row alone
    pinned_nbytes: int
    products_nbytes: int
    tied_nbytes: int  # of products that are looked up too: these never lie in host memory
    sizes: tuple[tuple[int, int], ...]  # bytes of a product's weight, and how many are as large
    least_slots: int  # the most of `products` that one operator reads
    pools: ExpertPools  # of tables among `products`

    def streaming(self, pools: bool) -> tuple[WeightUse, ...]:
        """The products that may have a place in memory as a whole, where there are pools or none."""
        return self.dense if pools else self.products

    def tiles(self, slot_nbytes: int) -> int:
        """Copies that all products take through slots of this size."""
        return sum(count * -(-nbytes // slot_nbytes) for nbytes, count in self.sizes)


def kinds_of(needs: ModelNeeds, workload: Workload, expert_hits: tuple[float, ...] = ()) -> WeightKinds:
    pinned = tuple(u for u in needs.uses if _pinned(u))
    products = tuple(u for u in needs.uses if not _pinned(u) and u.product)
    tables = tuple(u for u in needs.uses if not _pinned(u) and not u.product)
    streamed, batching = {u.name for u in products}, needs.batching
    by_name = needs.weight_tier == "disk" and not needs.host_hop and batching.micro_batches.count == 1
    pools = pools_of(products if by_name else (), {
        size: size * batching.sequences(workload.batch, size) for size in (1, *needs.speculative)}, expert_hits)
    dense = tuple(u for u in products if u not in pools.tables)
    return WeightKinds(pinned, products, dense, tables, sum(aligned(u.nbytes) for u in pinned),
                  sum(aligned(u.nbytes) for u in products),
                  sum(u.nbytes for u in products if u.lookup), tuple(Counter(u.nbytes for u in products).items()),
                  max([1, *(len(names & streamed) for names in needs.read_together)]), pools)


def _pinned(u: WeightUse) -> bool:
    """Small weights stay resident; so does one that is only looked up, when it is small."""
    return u.nbytes <= SMALL_NBYTES and (not u.tileable or u.nbytes <= PAGE_NBYTES or u.rows == 1)


@dataclass(frozen=True)
class ChunkRoom:
    """What one prefill chunk leaves: `room` bytes for resident weights beside staging slots and pools of so many slots;
    without staging slots nothing streams."""

    chunk: int
    room: int
    slots: int
    slot_nbytes: int
    pool_slots: int = 0


def with_pools(fit: ChunkRoom, kinds: WeightKinds, options: Options) -> Iterator[ChunkRoom]:
    """Ways to spend the room on pools: on what the other weights leave, at least on as many slots as are worth a look.
    """
    pools, dense = kinds.pools, sum(aligned(u.nbytes) for u in kinds.dense)
    if not pools.tables or options.expert_slots == 0:
        return
    most, counts = pools.slots_within(max(0, fit.room - dense), 1), pools.least_slots()
    for slots in dict.fromkeys([options.expert_slots] if options.expert_slots else (max(n, most) for n in counts)):
        if slots <= pools.most_slots and (left := fit.room - pools.nbytes(slots)) >= 0:
            yield replace(fit, room=left, pool_slots=slots)


@dataclass(frozen=True)
class StepStreams:
    """What steps stream: in each `fetches` times `nbytes`, `held` of them from host memory; beside that the tables of
    experts, which have pools in `fit`, whole or by name."""

    rates: Rates
    kinds: WeightKinds
    fetches: int
    nbytes: int
    held: int
    fit: ChunkRoom

    def moved(self, tokens: int) -> tuple[int, float, int]:
        """Bytes that a step streams through staging slots, in so many copies, and those of them from host memory."""
        kinds, nbytes = self.kinds, self.fetches * self.nbytes
        if self.fit.pool_slots and not self._by_name(tokens):
            nbytes += sum(aligned(u.nbytes) for u in kinds.pools.tables)
        copies = nbytes / kinds.products_nbytes * kinds.tiles(self.fit.slot_nbytes) if nbytes else 0.0
        return nbytes, copies, self.fetches * self.held

    def named_nbytes(self, tokens: int) -> float:
        """Bytes that it is expected to read of experts by name."""
        return self.kinds.pools.read_nbytes(self.fit.pool_slots, tokens) if self._by_name(tokens) else 0.0

    def step_time_s(self, tokens: int) -> float:
        """Seconds of a step; at most, as if nothing were computed while experts are read by name, layer by layer."""
        nbytes, copies, held = self.moved(tokens)
        reads = len(self.kinds.pools.tables) if self._by_name(tokens) else 0
        return (self.rates.step_time_s(tokens, nbytes, copies, self.fit.slots, held)
                + self.named_nbytes(tokens) / self.rates.bytes_per_s + reads * self.rates.latency_s)

    def _by_name(self, tokens: int) -> bool:
        return self.fit.pool_slots > 0 and tokens in self.kinds.pools.routed(self.fit.pool_slots).steps
