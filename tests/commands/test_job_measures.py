"""The memory line of a job: the plan's peak and the budget count the same tiers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forebay.commands.job_measures import Spent, job_measures, measures_text
from forebay.rewriter.ir.plan import Limits, Plan, Prediction, Schedule, Workload
from forebay.runtime.run.progress import WorkDone

MIB = 1 << 20


@pytest.mark.parametrize(("host", "budget"), [(200 * MIB, 260), (None, 130)])
def test_host_memory_counts_in_the_budget_as_in_the_peak(
    monkeypatch: pytest.MonkeyPatch, host: int | None, budget: int
) -> None:
    """Without a limit of host memory, as much as the plan has there."""
    plan = Plan("", "", Limits(60 * MIB, host), Workload(), Schedule(), (),
                arenas={"device": 60 * MIB, "host": 70 * MIB},
                prediction=Prediction(peak_nbytes={"device": 50 * MIB, "host": 70 * MIB}))
    monkeypatch.setattr("forebay.commands.job_measures.plans_in_budget", lambda lm: [plan])
    memory: Any = SimpleNamespace(peak=500 * MIB, before=300 * MIB, cached_peak=0)
    found = job_measures(None, WorkDone(), Spent(), 1.0, memory, 0, 300 * MIB)  # type: ignore[arg-type]
    assert (found["planned_peak_nbytes"], found["budget_nbytes"]) == (120 * MIB, budget * MIB)
    assert found["promised_nbytes"] == found["budget_nbytes"] + 300 * MIB
    assert f"the plan used 120.0 MiB of the budget of {budget}.0 MiB" in measures_text(found)
