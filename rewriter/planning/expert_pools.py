"""Pools of experts: what they take, which steps read experts by name, and what these are expected to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forebay.kernels.formats.slot_state import ITEMSIZE, SlotState, parts_of, rounds_of
from forebay.rewriter.ir.alignment import ALIGNMENT, PAGE_NBYTES, aligned
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.schedule.routed_fetch import (
    POOL,
    ROUTING,
    RoutedFetch,
    expert_room,
    hits_within,
    named_experts,
)
from forebay.rewriter.planning.model_needs import ModelNeeds, WeightUse

PARTS = (4, 2)  # of a pool, the most that it has slots for
GAIN = 0.8  # by name a step reads at most this share of a table: what it reads has less to run beside than tiles have


def is_table(use: WeightUse) -> bool:
    """Whether a weight is a table of experts, of which a token reads a share."""
    return use.share < 1 and use.tileable


def picks_of(use: WeightUse) -> int:
    """Experts that a token picks."""
    return round(use.share * use.rows)


def pool_buffers(use: WeightUse, slots: int, tokens: int, parts: int = 1) -> Iterator[tuple[str, str, int]]:
    """Names, kinds and bytes of the buffers of a table's pool, for steps over at most so many tokens in all: its slots,
    and places of experts in them with what is known of its parts."""
    yield use.name + POOL, "pool", slots * expert_room(use.nbytes // use.rows)
    states = (SlotState(part.slots, rounds_of(part.experts, picks_of(use) * tokens, part.slots), use.rows)
              for part in parts_of(use.rows, slots, parts))
    yield use.name + ROUTING, "routing", use.rows * ITEMSIZE + sum(state.nbytes for state in states)


def most_parts(use: WeightUse, slots: int, tokens: int) -> int:
    """In how many parts a pool can be that has in each room for all that so many tokens name."""
    return parts_for(use.rows, slots, picks_of(use) * tokens)


def parts_for(experts: int, slots: int, named: int) -> int:
    """The same for so many experts that are named."""
    return next((parts for parts in PARTS if parts <= slots and all(
        rounds_of(part.experts, named, part.slots) == 1 for part in parts_of(experts, slots, parts))), 1)


@dataclass(frozen=True)
class ExpertPools:
    """The tables that may have pools, all of as many slots, and the tokens in all of each step that may read experts by
    name, by its tokens per sequence; of decode steps first. Hits as they were `measured` (`hits_within`)."""

    tables: tuple[WeightUse, ...]
    tokens: Mapping[int, int]
    measured: tuple[float, ...] = ()

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
        if not slots:
            return RoutedFetch()
        hits = hits_within(self.measured, slots / max(u.rows for u in self.tables))
        steps = [size for size, tokens in self.tokens.items() if size == 1 or all(
            (1 - hits) * named_experts(u.rows, picks_of(u), tokens) <= GAIN * u.rows for u in self.tables)]
        most = max(self.tokens[size] for size in steps)
        return RoutedFetch(tuple(sorted(steps)), min(most_parts(u, slots, most) for u in self.tables), hits,
                           self.measured)

    def nbytes(self, slots: int) -> int:
        """Bytes of the device that pools of so many slots take."""
        routed = self.routed(slots)
        tokens = max(self.tokens[size] for size in routed.steps)
        return sum(aligned(nbytes) for u in self.tables for *_, nbytes in pool_buffers(u, slots, tokens, routed.parts))

    def slots_within(self, room: int, least: int) -> int:
        """The most slots that fit, at least `least` of them; 0 where none do."""
        slots = min(self.most_slots, room // max(1, sum(u.nbytes // u.rows for u in self.tables)))
        while slots >= least and self.nbytes(slots) > room:
            slots -= 1
        return slots if slots >= least else 0

    def read_nbytes(self, slots: int, size: int) -> float:
        """Bytes that a step is expected to read of experts by name."""
        routed = self.routed(slots)
        return sum(u.nbytes / u.rows * routed.missed(u.rows, picks_of(u), self.tokens[size]) for u in self.tables)


def pools_of(products: Sequence[WeightUse], tokens: Mapping[int, int], measured: tuple[float, ...]) -> ExpertPools:
    """The pools that tables among products may have."""
    return ExpertPools(tuple(filter(is_table, products)), tokens, measured)


def expert_buffers(plan: Plan, needs: ModelNeeds) -> Iterator[tuple[str, str, str, int, int]]:
    """Names, kinds, arenas, bytes and alignments of the buffers of a plan's pools."""
    uses, routed = {u.name: u for u in needs.uses}, plan.schedule.routed
    tokens = max((size * needs.batching.sequences(plan.workload.batch, size) for size in routed.steps), default=0)
    pools = [w for w in plan.weights if w.pool_slots]
    parts = min((most_parts(uses[w.name], w.pool_slots, tokens) for w in pools), default=1)
    if routed.parts != parts:
        raise PlanError(f"plan.schedule.routed.parts: pools of their slots (plan.weights[].pool_slots) have {parts} "
                        f"parts for steps over {routed.steps} tokens (plan.schedule.routed.steps), the plan says "
                        f"{routed.parts}; plan again")
    for w in pools if routed.measured else ():
        hits = hits_within(routed.measured, w.pool_slots / max(uses[each.name].rows for each in pools))
        if abs(hits - routed.hit_rate) > 1e-6:
            raise PlanError(f"plan.schedule.routed.hit_rate: {routed.hit_rate} is not {hits}, which {w.pool_slots} "
                            "slots (plan.weights[].pool_slots) have by plan.schedule.routed.measured; plan again")
    found = [(name, kind, "device", nbytes, ALIGNMENT if kind == "routing" or nbytes % PAGE_NBYTES else PAGE_NBYTES)
             for w in pools for name, kind, nbytes in pool_buffers(uses[w.name], w.pool_slots, tokens, parts)]
    yield from sorted(found, key=lambda buffer: -buffer[-1])  # whole pages first, where they leave no gap
