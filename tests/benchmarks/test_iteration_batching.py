"""benchmarks.iteration_batching: what static batches did, added up."""

from __future__ import annotations

from benchmarks.iteration_batching import added
from forebay.runtime.run.progress import WorkDone


def test_work_of_batches_is_added_with_its_steps_by_size() -> None:
    one = WorkDone(1, 2, 30, steps={4: 2, 8: 1}, drafting_s=0.5)
    other = WorkDone(2, 3, 40, steps={8: 5}, drafting_s=1.0)
    assert added(one, other) == WorkDone(3, 5, 70, steps={4: 2, 8: 6}, drafting_s=1.5)
    assert added(WorkDone(), other) == other
