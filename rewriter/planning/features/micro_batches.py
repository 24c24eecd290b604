"""Into how many micro-batches a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest

# Those near the best take a plan and its Programs. Experts are read once for each: large ones pay.
MICRO_BATCH_SIZES = (1, 4, 8, 12, 16, 24, 32, 64, 128, 256)


def micro_batch_counts(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """Return the numbers of micro-batches to try: the requested one, with none empty; else one, or several where caches
    are staged."""
    batch, asked = request.workload.batch, request.options.micro_batches
    counts = [asked] if asked else [1] if not request.staged else [
        math.ceil(batch / size) for size in reversed(MICRO_BATCH_SIZES) if size == 1 or size < 2 * batch]
    for count in dict.fromkeys(min(count, batch) for count in counts):
        yield replace(batching, micro_batches=MicroBatches(count, request.options.order))


MICRO_BATCHES = ScheduleFeature("micro_batches", candidates=micro_batch_counts)
