"""A model's weights for the planner, ways to divide a budget among them, and the bytes that steps then stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from forebay.rewriter.ir.alignment import PAGE_NBYTES, aligned
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.ir.program import ATTEND, COMPUTE, DISK, UPLOAD
from forebay.rewriter.planning.expert_pools import ExpertPools, pools_of
from forebay.rewriter.planning.model_needs import ModelNeeds, WeightUse
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.tiles import tile_count
from forebay.rewriter.predict.closed_form import Rates

AHEAD_BESIDE = 0.5  # of a step's computation; experts that are read by name come during the rest of it
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

    @cached_property
    def _in_slices(self) -> tuple[WeightUse, ...]:
        return tuple(u for u in self.products if u.slices > 1)

    def further_slices(self, slot_nbytes: int) -> int:
        """Slices of files that all products have beyond one for each copy through slots of this size."""
        return sum(max(0, u.slices - tile_count(u, slot_nbytes)) for u in self._in_slices)

    def streaming(self, pools: bool) -> tuple[WeightUse, ...]:
        """The products that may have a place in memory as a whole, where there are pools or none."""
        return self.dense if pools else self.products

    def pools_of(self, fit: ChunkRoom) -> ExpertPools:
        """The pools that there are where the budget is spent as `fit` says."""
        return self.pools.beside(fit.whole, fit.on_host, fit.ahead)

    def tiles(self, slot_nbytes: int) -> int:
        """Copies that all products take through slots of this size."""
        return sum(count * -(-nbytes // slot_nbytes) for nbytes, count in self.sizes)


def kinds_of(needs: ModelNeeds, workload: Workload, expert_hits: tuple[float, ...] = ()) -> WeightKinds:
    pinned = tuple(u for u in needs.uses if _pinned(u))
    products = tuple(u for u in needs.uses if not _pinned(u) and u.product)
    tables = tuple(u for u in needs.uses if not _pinned(u) and not u.product)
    streamed, batching = {u.name for u in products}, needs.batching
    by_name = needs.weight_tier == "disk" and batching.micro_batches.count == 1
    pools = pools_of(products if by_name else (), {
        size: size * batching.sequences(workload.batch, size) for size in (1, *needs.speculative)}, expert_hits, needs)
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
    """The room that one prefill chunk leaves: `room` bytes for resident weights beside staging slots and pools of so
    many slots; without staging slots nothing streams. Of the tables of experts `whole` lie on the device beside pools,
    and the host computes with `on_host` where they lie; `ahead` experts are read before a router names any. Host memory
    holds at most `host_most` bytes of weights. The device reads them `in_place`, or they are copied."""

    chunk: int
    room: int
    slots: int
    slot_nbytes: int
    pool_slots: int = 0
    whole: int = 0
    host_most: int = 1 << 60
    on_host: int = 0
    ahead: int = 0
    in_place: bool = False

    @property
    def all_stay(self) -> bool:
        """Whether the device holds all weights."""
        return not self.slots and not self.in_place

    @property
    def by_name(self) -> bool:
        """Whether steps read experts by name."""
        return self.pool_slots > 0 or self.on_host > 0


def with_pools(
    fit: ChunkRoom, kinds: WeightKinds, options: Options, host_room: int, multiplies: bool
) -> Iterator[ChunkRoom]:
    """Ways to spend the room on pools: on what the other weights leave, at least on as many slots as are worth a look.
    On a GPU also on whole tables, where host memory has `host_room` for others. The host computes with some of these
    where it is known how fast it `multiplies`, or `options` ask for it."""
    dense, known = sum(aligned(u.nbytes) for u in kinds.dense), kinds.pools
    asked = 0 if options.cpu_experts is None and not multiplies else options.cpu_experts
    if options.expert_slots == 0 and asked == 0:
        return
    for whole, on_host in known.shares(fit.room - dense, host_room, asked):
        pools = known.beside(whole, on_host)
        there = sum(aligned(u.nbytes) for u in pools.on_host)
        room = fit.room - known.tables_nbytes + pools.tables_nbytes + there
        left_there = host_room - pools.on_host_nbytes
        if room < 0 or (on_host and left_there < 0):
            continue
        if not pools.tables and on_host and not options.expert_slots:
            yield replace(fit, room=room, whole=whole, on_host=on_host)
        if not pools.tables or options.expert_slots == 0:
            continue
        lands = pools.tables_nbytes > left_there
        for ahead in known.ahead_counts(options.experts_ahead):
            pools = known.beside(whole, on_host, ahead)
            most, counts = pools.slots_within(max(0, room - dense), 1), pools.least_slots()
            for slots in dict.fromkeys(
                    [options.expert_slots] if options.expert_slots else (max(n, most) for n in counts)):
                if (slots <= pools.most_slots and (left := room - pools.nbytes(slots)) >= 0
                        and (not lands or pools.landing_nbytes(slots) <= left_there)):
                    yield replace(fit, room=left, pool_slots=slots, whole=whole, on_host=on_host, ahead=ahead)


@dataclass(frozen=True)
class StepStreams:
    """The bytes that steps stream: in each `fetches` times `nbytes`, `held` of them from host memory; beside that the
    tables of experts, which have pools in `fit`, whole or by name, `tables_held` bytes of them from host memory."""

    rates: Rates
    kinds: WeightKinds
    fetches: int
    nbytes: int
    held: int
    fit: ChunkRoom
    tables_held: int = 0

    @cached_property
    def pools(self) -> ExpertPools:
        """The pools that there are."""
        return self.kinds.pools_of(self.fit)

    @property
    def in_place(self) -> float:
        """The share of all weights that the device reads in host memory."""
        return self.held / self.kinds.products_nbytes if self.fit.in_place else 0.0

    def moved(self, tokens: int) -> tuple[int, float, int]:
        """Bytes that a step streams through staging slots, in so many copies, and those of them from host memory;
        a further slice that a copy reads counts as a part of one."""
        there = 0 if self.fit.in_place else self.held
        kinds, nbytes, held = self.kinds, self.fetches * (self.nbytes - self.held + there), self.fetches * there
        if self.fit.by_name and not self._by_name(tokens):
            there = sum(aligned(u.nbytes) for u in self.pools.on_host)
            nbytes += self.pools.tables_nbytes + there
            held += self.tables_held + there
        whole = nbytes and not self._by_name(tokens)
        more = kinds.further_slices(self.fit.slot_nbytes) * self.rates.slice_share if whole else 0.0
        copies = nbytes / kinds.products_nbytes * (kinds.tiles(self.fit.slot_nbytes) + more) if nbytes else 0.0
        return nbytes, copies, held

    def named_nbytes(self, tokens: int) -> float:
        """Bytes that it is expected to read of experts by name."""
        return self.pools.read_nbytes(self.fit.pool_slots, tokens) if self._by_name(tokens) else 0.0

    def named_s(self, tokens: int) -> dict[str, float]:
        """Seconds of reading these from disk, of bringing them to a GPU, and of the host with others; no latencies."""
        nbytes, hop = self.named_nbytes(tokens), self.pools.hop
        share = self.tables_held / self.pools.tables_nbytes if nbytes else 0.0
        return {DISK: (1 - share) * nbytes / self.rates.bytes_per_s,
                UPLOAD: nbytes / self.rates.upload_bytes_per_s if hop else 0.0,
                ATTEND: self.pools.host_s(self.rates, tokens) if self._by_name(tokens) else 0.0}

    def step_time_s(self, tokens: int) -> float:
        """Seconds of a step; at most, as if nothing were computed while experts are read by name, layer by layer, but
        while they are read ahead."""
        nbytes, copies, held = self.moved(tokens)
        reads = len(self.pools.tables) if self._by_name(tokens) else 0
        share = self.tables_held / self.pools.tables_nbytes if reads else 0.0
        latency_s = (1 - share) * self.rates.latency_s + self.pools.hop * self.rates.upload_latency_s
        beside = min(self.pools.ahead_nbytes / self.rates.bytes_per_s if reads else 0.0,
                     AHEAD_BESIDE * self.rates.busy_s(tokens, 0, 0)[COMPUTE])
        return (self.rates.step_time_s(tokens, nbytes, copies, self.fit.slots, held, self.in_place)
                + sum(self.named_s(tokens).values()) - beside + reads * latency_s)

    def _by_name(self, tokens: int) -> bool:
        return self.fit.by_name and tokens in self.pools.routed(self.fit.pool_slots).steps
