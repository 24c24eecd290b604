"""What a user forces of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.rewriter.ir.block import Block
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.score_range import ScoreRange


@dataclass(frozen=True)
class Wishes:
    """Choices the user forces; None leaves them to the planner. `cache_shares` are those of the caches, one for each
    layer and micro-batch, that stay on the device and in host memory, where `cache_tier` takes the others; with
    a `cache_tier` alone none does."""

    slots: int | None = None
    slot_nbytes: int | None = None
    lead: int | None = None
    prefill_chunk: int | None = None
    cache_format: str = "native"
    micro_batches: int | None = None
    order: Literal["row", "zigzag"] = "zigzag"
    cache_tier: Literal["device", "host", "disk"] | None = None
    cache_shares: tuple[float, float] | None = None
    cpu_attention: bool | None = None  # whether decode steps attend over caches in host memory there
    cache_tokens: int | None = None
    cache_slots: int = 3
    checkpoints: tuple[int, int] | None = None  # of so many stretches of a staged cache of every so many; (0, 1): none
    checkpoint_format: str = "native"
    entering: int | None = None  # sequences of a prefill step; None: all at once
    joined: bool = False  # prefill steps decode as well, where sequences enter
    drafted_tokens: int | Literal["auto"] | None = None  # that a step checks at most; None: no step checks any
    score_ranges: tuple[ScoreRange, ...] = ()  # what `forebay calibrate` measured

    def block(self, batch: int) -> Block:
        """The block for `batch` sequences with their cache on the device; no micro-batch is empty."""
        return Block(min(self.micro_batches or 1, batch), self.order, entering=min(self.entering or 0, batch),
                     joined=self.joined and bool(self.entering))


def check_choices(workload: Workload, wishes: Wishes) -> None:
    """PlanError for sizes below 1, and for more copies ahead than there are slots."""
    chosen = {"batch": workload.batch, "prompt": workload.prompt, "new_tokens": workload.new_tokens,
              "slots": wishes.slots, "lead": wishes.lead, "prefill_chunk": wishes.prefill_chunk,
              "micro_batches": wishes.micro_batches, "entering": wishes.entering,
              "drafted_tokens": wishes.drafted_tokens}
    for name, value in chosen.items():
        if isinstance(value, int) and value < 1:
            raise PlanError(f"{name} must be at least 1, found {value}")
    if wishes.lead and wishes.slots and wishes.lead > wishes.slots:
        raise PlanError(f"lead {wishes.lead} needs as many slots; {wishes.slots} were asked for")
