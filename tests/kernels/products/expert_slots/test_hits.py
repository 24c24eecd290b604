"""How many experts pools hold that routers pick, by simulation: compared with what was used last, and with the experts
that a pool would best hold all the time, which only who knows all picks can say."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
import torch

from forebay.kernels.formats.slot_state import slot_state
from forebay.kernels.products.expert_slots.cpu import bind_assign_slots

EXPERTS, PICKS, STEPS, COLD = 64, 4, 1600, 400
SKEWS = {"no preference": (0.0, 0.0), "Zipf 1": (1.0, 0.0), "Zipf 0.5, 30 % reuse": (0.5, 0.3)}


def picked(skew: float, reuse: float, steps: int, seed: int = 0) -> list[list[int]]:
    """Different experts that each step picks, of popularity rank ** -skew; a share of the last stays."""
    generator = torch.Generator().manual_seed(seed)
    popularity = -skew * torch.arange(1, EXPERTS + 1).log()
    noise = -torch.log(-torch.log(torch.rand(steps, EXPERTS, generator=generator)))
    ranked = (popularity + noise).argsort(1, descending=True).tolist()
    stays = (torch.rand(steps, PICKS, generator=generator) < reuse).tolist()
    found: list[list[int]] = []
    for order, again in zip(ranked, stays, strict=True):
        kept = [e for e, stay in zip(found[-1], again, strict=True) if stay] if found else []
        found.append((kept + [e for e in order if e not in kept])[:PICKS])
    return found


def hits(steps: list[list[int]], slots: int) -> float:
    """Of a pool, once it is full."""
    sizes = slot_state(slots, EXPERTS, PICKS)
    index = torch.zeros(PICKS, dtype=torch.int64)
    state, told = (torch.zeros(n, dtype=torch.int64) for n in (sizes.numbers, sizes.told))
    assign, there, found = bind_assign_slots(index, state, told, sizes), told[slots : sizes.numbers], 0
    for number, named in enumerate(steps):
        index.copy_(torch.tensor(named))
        assign()
        found += int((there >= 0).sum()) * (number >= COLD)
    return found / PICKS / (len(steps) - COLD)


def hits_of_last_used(steps: list[list[int]], slots: int) -> float:
    """Of a pool from which what was used longest ago leaves."""
    held, found = OrderedDict[int, None](), 0
    for number, named in enumerate(steps):
        found += sum(expert in held for expert in named) * (number >= COLD)
        for expert in named:
            held[expert] = None
            held.move_to_end(expert)
        while len(held) > slots:
            held.popitem(last=False)
    return found / PICKS / (len(steps) - COLD)


def hits_of_best(steps: list[list[int]], slots: int) -> float:
    """Of a pool that always holds those that are picked most, from the beginning to the end."""
    counts = Counter(expert for named in steps[COLD:] for expert in named)
    return sum(count for _, count in counts.most_common(slots)) / PICKS / (len(steps) - COLD)


@pytest.mark.parametrize("slots", [16, 32])
@pytest.mark.parametrize("kind", SKEWS)
def test_pools_hold_nearly_what_would_be_best(kind: str, slots: int) -> None:
    steps = picked(*SKEWS[kind], STEPS)
    found = hits(steps, slots)
    assert found > hits_of_best(steps, slots) - 0.05
    assert found > hits_of_last_used(steps, slots) - 0.02


def test_pools_follow_what_becomes_popular() -> None:
    """Every 400 steps others are."""
    steps = [[(e + 16 * (number // 400)) % EXPERTS for e in named]
             for number, named in enumerate(picked(1.0, 0.0, STEPS))]
    assert hits(steps, 16) > hits_of_last_used(steps, 16)
