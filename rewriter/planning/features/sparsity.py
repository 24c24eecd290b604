"""Decode steps that read some blocks of the KV cache alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.sparsity import Sparsity
from forebay.rewriter.ir.state import KEY_MEANS_TENSOR, state_name
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest

NO_SCHEDULE = "kv_blocks: a cache on the device is read whole, and no other is allowed or fits here; leave it out"


def explain_blocks(plan: Plan) -> tuple[str, str] | None:
    """Return which blocks of the cache decode steps read, where they do not read all."""
    share = plan.schedule.batching.sparsity.blocks
    means = sum(b.nbytes for b in plan.buffers if b.name.startswith(state_name(KEY_MEANS_TENSOR)))
    text = (f"decode steps read {100 * share:g} % of the cache's blocks, chosen by means of keys "
            f"({format_nbytes(means)} on the device); answers change")
    return ("kv blocks", text) if share < 1 else None


def asked_blocks(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """The share that is asked for, of caches that leave the device; other schedules have none."""
    share = request.options.kv_blocks
    if share == 1 or (batching.cache.staged and not batching.recomputation.checkpoints):
        yield replace(batching, sparsity=Sparsity(share))


SPARSITY = ScheduleFeature("sparsity", candidates=asked_blocks, explain=explain_blocks)
