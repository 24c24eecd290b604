"""Pools of experts: what they take, which steps read experts by name, and what these are expected to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forebay.kernels.formats.slot_state import SlotState, rounds_of
from forebay.rewriter.ir.alignment import ALIGNMENT, aligned
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.schedule.routed_fetch import POOL, ROUTING, RoutedFetch, named_experts
from forebay.rewriter.planning.model_needs import ModelNeeds, WeightUse

GAIN = 0.8  # by name a step reads at most this share of a table: what it reads has less to run beside than tiles have


def is_table(use: WeightUse) -> bool:
    """Whether a weight is a table of experts, of which a token reads a share."""
    return use.share < 1 and use.tileable


def picks_of(use: WeightUse) -> int:
    """Experts that a token picks."""
    return round(use.share * use.rows)


def pool_buffers(use: WeightUse, slots: int, tokens: int) -> Iterator[tuple[str, str, int]]:
    """Names, kinds and bytes of the buffers of a table's pool, for steps over at most so many tokens in all."""
    yield use.name + POOL, "pool", slots * (use.nbytes // use.rows)
    rounds = rounds_of(use.rows, picks_of(use) * tokens, slots)
    yield use.name + ROUTING, "routing", SlotState(slots, rounds, use.rows).nbytes


@dataclass(frozen=True)
class ExpertPools:
    """The tables that may have pools, all of as many slots, and the tokens in all of each step that may read experts by
    name, by its tokens per sequence; of decode steps first."""

    tables: tuple[WeightUse, ...]
    tokens: Mapping[int, int]

    @property
    def most_slots(self) -> int:
        """A pool of more would be a table."""
        return min((u.rows for u in self.tables), default=1) - 1

    def least_slots(self) -> list[int]:
        """The slots that are worth a look where memory is short: for one expert, for one token, and for a step."""
        most = [min(u.rows, tokens * picks_of(u)) for u in self.tables for tokens in (1, self.tokens[1])]
        return [n for n in dict.fromkeys((1, *sorted(most))) if n <= self.most_slots]

    def routed(self, slots: int) -> RoutedFetch:
        """The steps that read experts by name, where the router prefers nobody; decode steps among them."""
        if not slots:
            return RoutedFetch()
        share = slots / max(u.rows for u in self.tables)
        steps = [size for size, tokens in self.tokens.items() if size == 1 or all(
            (1 - share) * named_experts(u.rows, picks_of(u), tokens) <= GAIN * u.rows for u in self.tables)]
        return RoutedFetch(tuple(sorted(steps)), share)

    def nbytes(self, slots: int) -> int:
        """Bytes of the device that pools of so many slots take."""
        tokens = max(self.tokens[size] for size in self.routed(slots).steps)
        return sum(aligned(nbytes) for u in self.tables for _, _, nbytes in pool_buffers(u, slots, tokens))

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


def pools_of(products: Sequence[WeightUse], tokens: Mapping[int, int]) -> ExpertPools:
    """The pools that tables among products may have."""
    return ExpertPools(tuple(filter(is_table, products)), tokens)


def expert_buffers(plan: Plan, needs: ModelNeeds) -> Iterator[tuple[str, str, str, int, int]]:
    """Names, kinds, arenas, bytes and alignments of the buffers of a plan's pools."""
    uses, routed = {u.name: u for u in needs.uses}, plan.schedule.routed
    tokens = max((size * needs.batching.sequences(plan.workload.batch, size) for size in routed.steps), default=0)
    for w in plan.weights:
        for name, kind, nbytes in pool_buffers(uses[w.name], w.pool_slots, tokens) if w.pool_slots else ():
            yield name, kind, "device", nbytes, ALIGNMENT
