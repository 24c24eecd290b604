"""Steps that read experts by name, in cases of how many their pools lack.

A mean does not do: a layer that lacks no expert gains less time than one that lacks twice the mean loses, because what
is read beside other experts' computation costs next to nothing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from forebay.kernels import operators
from forebay.kernels.formats.slot_state import ITEMSIZE, SlotState
from forebay.rewriter.ir.program import Copy, Item, Launch, Program, Rows, Span, TensorRef
from forebay.rewriter.ir.schedule.routed_fetch import AHEAD

CASES = 4  # equally likely numbers of missing experts, each the mean of a quarter of them


def by_missed_experts(program: Program) -> list[Program]:
    """Return a program in equally likely cases; alone where it reads no experts by name, or none is missing.

    In a case all layers lack equally many. The mean time of the cases is nevertheless that of layers that differ, as
    nothing of one layer is read beside another.
    """
    pools = _pools_of(program)
    if all(pool.there_rate == 1 or not pool.named for pool in pools.values()):
        return [program]
    return [replace(program, step=tuple([_in_case(item, pools, case) for item in program.step]))
            for case in range(CASES)]


@functools.lru_cache
def missed_in_cases(named: int, hit_rate: float) -> tuple[float, ...]:
    """Return how many of so many named experts are missing in each case, fewest first, if each is there with the
    probability `hit_rate`: means of the parts of a binomial distribution."""
    if not 0 < hit_rate < 1:
        return (0.0 if hit_rate else float(named),) * CASES
    found = list[float]()
    left, total = 1 / CASES, 0.0
    for missing in range(named + 1):
        likely = math.exp(math.lgamma(named + 1) - math.lgamma(missing + 1) - math.lgamma(named - missing + 1)
                          + missing * math.log(1 - hit_rate) + (named - missing) * math.log(hit_rate))
        while likely >= left and len(found) < CASES - 1:
            found.append((total + left * missing) * CASES)
            likely, left, total = likely - left, 1 / CASES, 0.0
        left, total = left - likely, total + likely * missing
    return (*found, total * CASES)


@dataclass
class _Pool:
    """The pool of a table. From the offset `told` on a step is told its experts: as a mean it names `named` of them, of
    which the pool has a share `hit_rate`, and a share `ahead_rate` was read ahead."""

    told: int
    sizes: SlotState
    hit_rate: float = 1.0
    ahead_rate: float = 0.0
    named: float = 0.0

    @property
    def there_rate(self) -> float:
        """The share of the named experts that no round fetches."""
        return self.hit_rate + self.ahead_rate

    def round_of(self, ref: TensorRef) -> int:
        """Return the round that some of the told numbers belong to."""
        return (ref.offset - self.told) // ITEMSIZE // self.sizes.numbers

    def share(self, number: int, case: int) -> float:
        """Return the share of the named experts that a round has: the 0th of those that are there, and one after the
        last of those that were read ahead."""
        named = max(1, round(self.named))
        missing = missed_in_cases(named, self.there_rate)[case]
        if not 0 < number <= self.sizes.rounds:
            rate = self.ahead_rate if number else self.hit_rate
            return (1 - missing / named) * (rate / self.there_rate if self.there_rate else 0.0)
        if self.sizes.in_order and not self.sizes.at_once:
            return max(0.0, min(self.sizes.most, missing - (number - 1) * self.sizes.most)) / named
        whole, more = divmod(missing, 1)
        few, many = (math.ceil(count * number / self.sizes.rounds) - math.ceil(count * (number - 1) / self.sizes.rounds)
                     for count in (whole, whole + 1))
        return (few + more * (many - few)) / named


def _pools_of(program: Program) -> dict[str, _Pool]:
    """The pools of a program's tables, by the buffers that tell of them."""
    pools = {item.args[2].buffer: _Pool(item.args[2].offset, SlotState(*item.args[3:8]))
             for item in program.step if isinstance(item, Launch) and operators.find(item.op) is operators.ASSIGN_SLOTS}
    told = [(item, ref, pools[ref.buffer]) for item in program.step
            if (ref := _told(item)) is not None and ref.buffer in pools]
    for item, ref, pool in told:
        if isinstance(item, Launch) and not pool.round_of(ref):
            pool.hit_rate = item.kwargs["share"]
        elif isinstance(item, Launch) and pool.round_of(ref) > pool.sizes.rounds:
            pool.ahead_rate = item.kwargs["share"]
    for item, ref, pool in told:
        if isinstance(item, Copy) and isinstance(item.src, Rows) and pool.there_rate < 1:
            pool.named = item.src.typical * ref.shape[0] * pool.sizes.rounds / (1 - pool.there_rate)
    return pools


def _told(item: Item) -> TensorRef | None:
    """The numbers that tell an item its experts; None for other items, which read experts ahead among them."""
    if isinstance(item, Launch) and operators.find(item.op) is operators.EXPERTS:
        return item.kwargs.get("entries")  # type: ignore[no-any-return]
    if not isinstance(item, Copy) or not isinstance(item.src, Rows) or not item.src.keeps:
        return None
    return None if isinstance(item.dst, Span) and item.dst.buffer == AHEAD else item.src.index


def _in_case(item: Item, pools: dict[str, _Pool], case: int) -> Item:
    ref = _told(item)
    pool = None if ref is None else pools.get(ref.buffer)
    if ref is None or pool is None or not pool.named:
        return item
    share = pool.share(pool.round_of(ref), case)
    if isinstance(item, Launch):
        return replace(item, kwargs={**item.kwargs, "share": share})
    assert isinstance(item, Copy) and isinstance(item.src, Rows)
    return replace(item, src=replace(item.src, typical=share * pool.named / ref.shape[0]))
