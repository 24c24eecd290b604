"""Pools of experts: what they take, which steps read experts by name, and what these are expected to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from forebay.kernels.formats.slot_state import ITEMSIZE, slot_state
from forebay.kernels.formats.table import weight_format
from forebay.rewriter.ir.alignment import ALIGNMENT, PAGE_NBYTES, aligned
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import dtype_itemsize
from forebay.rewriter.ir.schedule.routed_fetch import (
    AHEAD,
    LANDING,
    OPERANDS,
    POOL,
    RESULTS,
    ROUTING,
    RoutedFetch,
    hits_within,
    named_experts,
    pool_room,
)
from forebay.rewriter.planning.model_needs import ModelNeeds, WeightUse
from forebay.rewriter.predict.closed_form import Rates

NUMBER_NBYTES = 4  # of a number of a token, and of one that a pick gives, at most
LIKELY = 0.5  # of experts that are read ahead of a router, it must be likely to name so many
AHEAD_SHARES = (1 / 16, 1 / 8, 1 / 4)  # of a table: as many as are read while none can be read by name
GAIN = 0.8  # by name a step reads at most this share of a table: what it reads has less to run beside than tiles have


def is_table(use: WeightUse) -> bool:
    """Return whether a weight is a table of experts, of which a token reads a share."""
    return use.share < 1 and use.tileable


def picks_of(use: WeightUse) -> int:
    """The most experts of a table that a token picks."""
    return use.picks or round(use.share * use.rows)


def named_of(use: WeightUse, tokens: int) -> float:
    """Different experts of a table that so many tokens are expected to pick."""
    return named_experts(use.rows, use.share * use.rows, tokens)


def pool_buffers(
    slots_of: Iterable[tuple[WeightUse, int]], tokens: int, hop: bool = False, ahead: int = 0
) -> Iterator[tuple[str, str, int]]:
    """Names, kinds and bytes of the buffers of pools, for steps over at most so many tokens in all.

    Each table has slots and a state; unless there is a `hop`, offsets of experts in their slots come before the state.
    All tables share the results of picks, and memory for so many experts that are read `ahead`.
    """
    most = room = 0
    for use, slots in slots_of:
        picks, entry = picks_of(use) * tokens, pool_room(use.nbytes // use.rows, hop)
        most, room = max(most, picks * use.outputs * NUMBER_NBYTES), max(room, ahead * entry)
        yield use.name + POOL, "pool", slots * entry
        places = 0 if hop else use.rows * ITEMSIZE
        yield use.name + ROUTING, "routing", places + slot_state(slots, use.rows, picks, hop, ahead).nbytes
    if room:
        yield AHEAD, "pool", room
    if most:
        yield RESULTS, "routing", -(-most // ITEMSIZE) * ITEMSIZE


@dataclass(frozen=True)
class ExpertPools:
    """The tables that may have pools, all of as many slots, and the tokens in all of each step that may read experts by
    name, by its tokens per sequence; of decode steps first. Hits as they were `measured` (`hits_within`). With `hop`
    experts come from host memory, where tables lie, or by way of it; the host computes with those `on_host`, for which
    it takes a `workspace`. So many experts are read `ahead` of a router."""

    tables: tuple[WeightUse, ...]
    tokens: Mapping[int, int]
    measured: tuple[float, ...] = ()
    hop: bool = False
    on_host: tuple[WeightUse, ...] = ()
    workspace: int = 0
    ahead: int = 0

    def beside(self, whole: int, on_host: int = 0, ahead: int = 0) -> ExpertPools:
        """The pools where so many of the tables lie on the device as they are, and the host computes with so many of
        the others, each spread evenly, and so many experts are read `ahead`."""
        rest = _spread(self.tables, whole)[1]
        there, pooled = _spread(rest, on_host)
        return replace(self, tables=pooled, on_host=there, ahead=ahead)

    def ahead_counts(self, asked: int | None) -> list[int]:
        """Return how many experts may be read ahead of a router: as many as were `asked` for; else none, and shares of
        a table where decode steps name most of it."""
        if self.hop or not self.tables:
            return [0]
        if asked is not None:
            return [asked]
        likely = all(named_of(u, self.tokens[1]) >= LIKELY * u.rows for u in self.tables)
        least = min(u.rows for u in self.tables)
        return sorted({0, *(int(share * least) for share in AHEAD_SHARES if likely)})

    @property
    def on_host_nbytes(self) -> int:
        """Bytes of host memory that what it computes with takes, with operands and workspace."""
        if not self.on_host:
            return 0
        tokens = max(self.tokens[size] for size in self.routed(0).steps)
        return (sum(aligned(u.nbytes) for u in self.on_host) + aligned(operands_nbytes(self.on_host, tokens))
                + self.workspace)

    def host_s(self, rates: Rates, size: int) -> float:
        """Seconds in which the host is expected to compute with experts in a step, operands and results included."""
        return sum(2 * rates.upload_latency_s + rates.host_product_s(*_host_work(u, self.tokens[size]))
                   for u in self.on_host)

    def shares(self, room: int, host_room: int, asked: int | None) -> Iterator[tuple[int, int]]:
        """Return how many tables may lie on the device as they are within so much room, and with how many of the others
        the host may compute: none, as many as its memory holds, or as many as were `asked` for."""
        count = len(self.tables)
        table = max(1, self.tables_nbytes // count)
        if not asked:
            yield from ((whole, 0) for whole in self.whole_counts(room, host_room))
        if asked == 0 or not self.hop:
            return
        most = max(0, min(count - (asked or 1), room // table))
        for whole in dict.fromkeys((most, *self.whole_counts(room, host_room))):
            held = asked or min(count - whole, host_room // table)
            for on_host in dict.fromkeys((held, held - (not asked and self.beside(
                    whole, held).on_host_nbytes > host_room))):
                if 0 < on_host <= count - whole:
                    yield whole, on_host

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the tables, each as it lies in memory."""
        return sum(aligned(u.nbytes) for u in self.tables)

    def held_nbytes(self, room: int, slots: int) -> int:
        """Bytes of the tables that so much host memory holds: the first of them, beside where others land."""
        held, room = 0, room if self.tables_nbytes <= room else room - self.landing_nbytes(slots)
        for u in self.tables if self.hop else ():
            held += aligned(u.nbytes) if held + aligned(u.nbytes) <= room else 0
        return held

    def whole_counts(self, room: int, host_room: int) -> list[int]:
        """Return how many tables may lie on the device as they are. On a GPU so many that host memory holds the others,
        as pools hold what a router prefers; by hits that were measured, or where some stay on disk, also none, or as
        many as so much room leaves pools the slots for a step."""
        if not self.hop:
            return [0]
        count, slots = len(self.tables), self.least_slots()[-1]
        table, pool = self.tables_nbytes // count, self.nbytes(slots) // count
        least = max(0, count - host_room // max(1, table))
        most = max(0, min(count - 1, (room - count * pool) // max(1, table - pool)))
        if least <= most and not self.measured:
            return [least]
        return list(dict.fromkeys((0, least, most, max(0, most - 1))))

    @property
    def most_slots(self) -> int:
        """A pool of more would be a table."""
        return min((u.rows for u in self.tables), default=1) - 1

    def least_slots(self) -> list[int]:
        """The slots that are worth a look where memory is short: for one expert, for one token, and for a step."""
        most = [min(u.rows, tokens * picks_of(u)) for u in self.tables for tokens in (1, self.tokens[1])]
        return [n for n in dict.fromkeys((1, *sorted(most))) if n <= self.most_slots]

    def routed(self, slots: int) -> RoutedFetch:
        """The steps that read experts by name; decode steps among them."""
        if not slots and not self.on_host:
            return RoutedFetch()
        hits = hits_within(self.measured, slots / max(u.rows for u in self.tables)) if slots else 0.0
        steps = [size for size, tokens in self.tokens.items() if size == 1 or all(
            (1 - hits) * named_of(u, tokens) <= GAIN * u.rows for u in (*self.tables, *self.on_host))]
        return RoutedFetch(tuple(sorted(steps)), hits, self.measured if slots else (), self.ahead if slots else 0)

    def nbytes(self, slots: int) -> int:
        """Bytes of the device that pools of so many slots take."""
        tokens = max(self.tokens[size] for size in self.routed(slots).steps)
        return sum(aligned(n) for *_, n in pool_buffers(
            [(u, slots) for u in self.tables], tokens, self.hop, self.ahead))

    def landing_nbytes(self, slots: int) -> int:
        """Bytes of host memory in which experts of a file land on their way to a pool."""
        return slots * max((u.nbytes // u.rows for u in self.tables), default=0) if self.hop else 0

    def slots_within(self, room: int, least: int) -> int:
        """The most slots that fit, at least `least` of them; 0 where none do."""
        slots = min(self.most_slots, room // max(1, sum(u.nbytes // u.rows for u in self.tables)))
        while slots >= least and self.nbytes(slots) > room:
            slots -= 1
        return slots if slots >= least else 0

    def read_nbytes(self, slots: int, size: int) -> float:
        """Bytes that a step is expected to read of experts by name."""
        routed = self.routed(slots)
        return self.ahead_nbytes + sum(
            u.nbytes / u.rows * routed.missed(u.rows, u.share * u.rows, self.tokens[size]) for u in self.tables)

    @property
    def ahead_nbytes(self) -> float:
        """Bytes that a step reads ahead of routers."""
        return sum(u.nbytes / u.rows * self.ahead for u in self.tables)


def _spread(tables: tuple[WeightUse, ...], some: int) -> tuple[tuple[WeightUse, ...], tuple[WeightUse, ...]]:
    """So many of the tables, spread evenly, and the others."""
    parts: dict[bool, list[WeightUse]] = {True: [], False: []}
    for i, u in enumerate(tables):
        parts[(i + 1) * some // len(tables) > i * some // len(tables)].append(u)
    return tuple(parts[True]), tuple(parts[False])


def _host_work(use: WeightUse, tokens: int) -> tuple[str, float, float]:
    """The dtype or format of the experts that a step over so many tokens in all names, their bytes, and operations."""
    packed, entry = weight_format(use.format), use.nbytes / use.rows
    bits = packed.bits or 8 * dtype_itemsize(use.dtype)
    return (use.format if packed.bits else use.dtype, named_of(use, tokens) * entry,
            2 * tokens * use.share * use.rows * entry * 8 / bits)


def operands_nbytes(tables: Iterable[WeightUse], tokens: int) -> int:
    """Bytes of host memory for what a launch of the host over one of the tables is given, and makes: of each token
    numbers in and out, and of each pick its expert and weight."""
    return max(2 * aligned(tokens * u.outputs * NUMBER_NBYTES) + aligned(tokens * picks_of(u) * ITEMSIZE)
               + aligned(tokens * picks_of(u) * NUMBER_NBYTES) for u in tables)


def pools_of(products: Sequence[WeightUse], tokens: Mapping[int, int], measured: tuple[float, ...], needs: ModelNeeds
             ) -> ExpertPools:
    """The pools that tables among products may have."""
    tables, hop = tuple(filter(is_table, products)), needs.host_hop
    workspace = max(needs.need(size).multiplying for size in tokens) if hop and tables else 0
    return ExpertPools(tables, tokens, measured, hop, workspace=workspace)


def expert_buffers(plan: Plan, needs: ModelNeeds) -> Iterator[tuple[str, str, str, int, int]]:
    """Names, kinds, arenas, bytes and alignments of the buffers of a plan's pools."""
    uses, routed = {u.name: u for u in needs.uses}, plan.schedule.routed
    tokens = max((size * needs.batching.sequences(plan.workload.batch, size) for size in routed.steps), default=0)
    pools = [w for w in plan.weights if w.pool_slots]
    hop = plan.schedule.host_hop
    for w in pools if routed.measured else ():
        hits = hits_within(routed.measured, w.pool_slots / max(uses[each.name].rows for each in pools))
        if abs(hits - routed.hit_rate) > 1e-6:
            raise PlanError(f"plan.schedule.routed.hit_rate: {routed.hit_rate} is not {hits}, which {w.pool_slots} "
                            "slots (plan.weights[].pool_slots) have by plan.schedule.routed.measured; plan again")
    each = pool_buffers([(uses[w.name], w.pool_slots) for w in pools], tokens, hop, routed.ahead)
    found = [(name, kind, "device", nbytes, ALIGNMENT if kind == "routing" or nbytes % PAGE_NBYTES else PAGE_NBYTES)
             for name, kind, nbytes in each]
    yield from sorted(found, key=lambda buffer: -buffer[-1])  # whole pages first, where they leave no gap
    landing = max((w.pool_slots * (w.nbytes // uses[w.name].rows) for w in pools if w.tier == "disk"), default=0)
    if hop and landing:
        yield LANDING, "io", "host", landing, PAGE_NBYTES
    if on_host := [uses[w.name] for w in plan.weights if w.on_host]:
        yield OPERANDS, "io", "host", operands_nbytes(on_host, tokens), ALIGNMENT
