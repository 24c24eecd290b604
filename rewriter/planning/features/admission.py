"""How many slots the sequences of a job are admitted to, and how many of them a prefill step computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest
from forebay.rewriter.planning.options import require_sizes

MAX_SLOTS = 256  # at most, of which some are given anew while the others decode
SLOTS_PER_ADMITTED = 8  # a prefill step computes one in so many: idle ones, which wait for as many, are a sixteenth


def admitted_at_once(batch_slots: int | None) -> int | None:
    """Return how many sequences a prefill step computes where requests are admitted to so many slots.

    Raises:
        PlanError: `batch_slots` is no size.
    """
    require_sizes(batch_slots=batch_slots)
    return -(-batch_slots // SLOTS_PER_ADMITTED) if batch_slots else None


def slot_counts(count: int) -> list[int]:
    """The numbers of slots to compare for a job: `count`, if it is at most `MAX_SLOTS`, and powers of two below it."""
    powers = [1 << i for i in reversed(range(MAX_SLOTS.bit_length())) if 1 << i < count]
    return [count, *powers] if count <= MAX_SLOTS else powers


def admitted(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """Return the requested number of sequences in a prefill step."""
    options = request.options
    if options.admitted and options.prefill_chunk == 1:
        raise PlanError("prefill_chunk: 1 is a step that decodes for all slots; where sequences enter them, a "
                        "chunk has at least 2 tokens")
    yield replace(batching, admission=Admission(min(options.admitted or 0, request.workload.batch)))


ADMISSION = ScheduleFeature("admission", candidates=admitted)
