"""An option from outside the package: its record, and a planner that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.api import wrap
from forebay.commands.app import app
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.pipeline.plan_search import plan_batch
from forebay.rewriter.pipeline.plan_task import Planned, PlanTask
from forebay.rewriter.planning.option_kinds import SIZE
from forebay.rewriter.planning.options import OPTIONS, OptionRecord, Options, make_options, register_option
from forebay.rewriter.report.options_page import options_page

SHARED_BY = OptionRecord(
    SIZE, "Processes that share the budget, of which each has an equal part", "Memory", default=1, answers=True,
    planned=lambda plan: plan.budget.device, as_planned=lambda value, plan: plan.budget.device if value == 2 else 0)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_option("shared_by", SHARED_BY)
    yield
    del OPTIONS["shared_by"]


def plan_a_part(task: PlanTask) -> Planned:
    """A plan within what is this process's part."""
    part = replace(task.budget, device=task.budget.device // task.options.shared_by)
    return plan_batch(replace(task, budget=part))


def test_who_plans_reads_it(llama_checkpoint: Any) -> None:
    budget, work = Budget(2 * llama_checkpoint.share(2.0)), Workload(3, 10, 8)
    made: dict[int, int] = {}
    for count in (1, 2):
        options = make_options({"shared_by": count, "cache_tier": "device"})
        with LanguageModel(*llama_checkpoint.opened, budget, work, options, choose=plan_a_part) as lm:
            made[count] = lm.plan.budget.device
    assert made == {1: budget.device, 2: budget.device // 2}


def test_wrap_takes_and_checks_it(llama_checkpoint: Any) -> None:
    budget = llama_checkpoint.share(2.0)
    with wrap(llama_checkpoint.folder, budget, shared_by=2) as lm:  # type: ignore[call-overload]
        assert lm.options.shared_by == 2 and lm.options.forced() == ["shared_by"]
        plan = lm.plan
    with pytest.raises(PlanError, match=r"^shared_by must be at least 1, found 0"):
        wrap(llama_checkpoint.folder, budget, shared_by=0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"'shard_by'; did you mean 'shared_by'?"):
        wrap(llama_checkpoint.folder, budget, shard_by=2)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match=r"^shared_by: the plan has .* leave it out, or plan anew"):
        wrap(llama_checkpoint.folder, budget, plan=plan, shared_by=3)  # type: ignore[call-overload]
    wrap(llama_checkpoint.folder, budget, plan=plan, shared_by=2).close()  # type: ignore[call-overload]


def test_it_is_kept_where_others_are_replaced() -> None:
    given = make_options({"shared_by": 4})
    assert make_options({"slots": 2}, given).shared_by == replace(given, slots=3).shared_by == 4
    assert Options().shared_by == 1 and Options() != given


def test_the_command_line_and_the_page_have_it(llama_checkpoint: Any) -> None:
    page = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    assert "--shared-by" in page and "Processes that share the budget" in page and "Memory" in page
    wrong = CliRunner().invoke(app, ["plan", str(llama_checkpoint.folder), "--shared-by", "0", "--budget", "1MB"])
    assert wrong.exit_code == 2 and "error: shared_by must be at least 1, found 0" in wrong.output
    assert "## Memory" in options_page() and "`shared_by`" in options_page()


def test_a_name_that_there_is_or_that_is_none_is_refused() -> None:
    for name in ("slots", "admitted", "shared_by", "two words", "class"):
        with pytest.raises(ValueError, match="cannot be registered"):
            register_option(name, SHARED_BY)
