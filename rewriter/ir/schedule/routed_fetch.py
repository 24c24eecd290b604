"""Which steps read, of a table of experts, only those that the router names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.rewriter.ir.alignment import PAGE_NBYTES, slot_stride
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches

POOL, ROUTING = ".pool", ".routing"  # end the names of a table's buffers: experts in slots, and which these are
RESULTS = "experts.results"  # the buffer, of all layers, of what each pick of a step gave
AHEAD = "experts.ahead"  # the buffer, of all layers, of experts that are read before a router has picked
OPERANDS = "operands.experts"  # host memory for what the host's launches over tables read and write beside these
LANDING = "host_experts"  # where experts of files lie on their way to a GPU's pool

PLACE_NBYTES = 8  # where an expert begins in its slot is counted in so many bytes
PLACED_NBYTES = 4 * PAGE_NBYTES  # of less, a page of room would be a large share


def expert_room(nbytes: int) -> int:
    """Bytes of a slot for an expert of so many, which may begin anywhere in a page where it is not small."""
    return slot_stride(nbytes) if nbytes >= PLACED_NBYTES else -(-nbytes // PLACE_NBYTES) * PLACE_NBYTES


def pool_room(nbytes: int, hop: bool) -> int:
    """Bytes of a slot of a pool for an expert of so many; with `hop` nothing is read from a file into it."""
    return nbytes if hop else expert_room(nbytes)


def expert_place(entry: FileSlice) -> int:
    """Return the offset of an expert in its slot: the same as in a page of its file, so that reads land in place,
    unless its numbers would not be aligned there."""
    place, rest = divmod(entry.page_offset, PLACE_NBYTES)
    return 0 if rest or entry.nbytes < PLACED_NBYTES else place


@dataclass(frozen=True)
class RoutedFetch:
    """Steps over so many tokens per sequence, the `steps`, read experts by name into the pools of their tables, which
    keep what they hold from step to step; all others stream tables whole. Predictions take a share `hit_rate` of the
    experts that a step names to be in their pool: by what was `measured` (`hits_within`), or, without that, as if
    routers preferred nobody. Of each table a step reads `ahead` experts before it knows what its router names: those
    that were named most often of late and are not in the pool."""

    steps: tuple[int, ...] = ()
    hit_rate: float = 0.0
    measured: tuple[float, ...] = ()
    ahead: int = 0

    def missed(self, experts: int, picks: float, tokens: int) -> float:
        """Experts that a step over so many tokens in all is expected to read of a table by name."""
        return (1 - self.hit_rate - self.ahead_rate(experts)) * named_experts(experts, picks, tokens)

    def ahead_rate(self, experts: int) -> float:
        """Return the share of the named experts of a table that are expected to have been read ahead."""
        return min(1 - self.hit_rate, self.ahead / experts)

    def fault(
        self, step_sizes: Sequence[int], tiers: Sequence[str], on_host: Sequence[str], hop: bool,
        micro_batches: MicroBatches
    ) -> str:
        """Return the first contradiction with the steps or with the tiers of tables that have pools, as the field and
        the reason; "" for none. `on_host`: where those lie with which the host computes. `hop`: the device cannot read
        the disk."""
        by_name = bool(on_host or tiers)
        if list(self.steps) != sorted({*self.steps} & {*step_sizes}) or bool(self.steps) != by_name:
            return (f"schedule.routed.steps: {list(self.steps)} must be among the steps over {sorted(step_sizes)} "
                    "tokens, the smallest first; some where there are pools (plan.weights[].pool_slots) or experts of "
                    "the host (plan.weights[].on_host), else none")
        if not 0 <= self.hit_rate <= 1 or (self.hit_rate and not tiers):
            return f"schedule.routed.hit_rate: {self.hit_rate} must be a share, and 0 without pools"
        if list(self.measured) != sorted(self.measured) or any(not 0 <= hits <= 1 for hits in self.measured):
            return f"schedule.routed.measured: {list(self.measured)} must be shares, in ascending order"
        if self.ahead < 0 or (self.ahead and (hop or not tiers)):
            return (f"schedule.routed.ahead: {self.ahead} must be at least 0, and 0 without pools and where the device "
                    "is a GPU")
        if {*tiers} - ({"host", "disk"} if hop else {"disk"}):
            return f"weights[].pool_slots: only tables on {'host or disk' if hop else 'the tier disk'} have pools"
        if {*on_host} - ({"host"} if hop else set()):
            return ("weights[].on_host: the CPU computes only with tables on the tier host that have no pool, where "
                    "the device is a GPU")
        if by_name and micro_batches.count > 1:
            return (f"schedule.batching.micro_batches.count: {micro_batches.count} must be 1 where experts are read by "
                    "name for a whole batch (plan.weights[].pool_slots, plan.weights[].on_host)")
        return ""


def hits_within(measured: Sequence[float], share: float) -> float:
    """Share of the named experts that pools for a `share` of all hold. `measured` are the hits of pools for equal steps
    of that share, the last one for all; without them the router prefers nobody."""
    if not measured:
        return share
    whole, rest = divmod(share * len(measured), 1)
    below, above = ((0.0, *measured)[min(int(whole) + i, len(measured))] for i in (0, 1))
    return below + rest * (above - below)


def named_experts(experts: int, picks: float, tokens: int) -> float:
    """Different experts that so many tokens pick, each `picks` of them, where the router prefers nobody."""
    return float(experts * (1 - (1 - picks / experts) ** tokens))
