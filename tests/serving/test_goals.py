"""`forebay serve` planned for goals: what is chosen keeps them, what none keeps is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from serving.served import NEW, PROMPT, save_model
from typer.testing import CliRunner

from forebay.commands import plan_serving as plan_serving_module
from forebay.commands.app import app
from forebay.commands.plan_serving import SHARE, ServingChoice, ServingGoals, plan_serving, step_times_of
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.turns import SERVER_TURNS
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.planning.options import Options
from forebay.rewriter.serving import goodput
from forebay.rewriter.serving.continuous_batching import simulate_slots
from forebay.rewriter.serving.goodput import ServiceLevel, measure
from forebay.rewriter.serving.strategies import Simulated
from forebay.rewriter.serving.traffic import Traffic

LAX = ServingGoals(0.5, 0.5, PROMPT, NEW)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goals of half a second where steps take a millisecond let each of 400 simulations take 6 000 requests, and them
    all a minute. What a run's length does to a rate is tested where rates are found."""
    monkeypatch.setattr(goodput, "MOST_REQUESTS", 600)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Options]:
    folder = tmp_path_factory.mktemp("goals")
    save_model(folder)
    save_machine(Machine.default(), folder / "machine.json")
    options = Options(prompt=PROMPT, new_tokens=NEW, machine=folder / "machine.json", prompt_lookup_num_tokens="auto")
    return folder, "device=1500000", options


def test_what_is_chosen_keeps_its_goals_and_no_more(wanted: tuple[Path, str, Options]) -> None:
    choice = plan_serving(*wanted, LAX)
    with choice.lm as lm:
        times, traffic = step_times_of(lm), Traffic(1.0, 200, PROMPT, NEW)
    assert choice.rate and times.batch_slots == lm.plan.workload.batch
    found = Simulated(lambda requests, seed: simulate_slots(requests, times, choice.turns), 1.0)
    level = ServiceLevel(LAX.ttft_s, LAX.tpot_s, SHARE, runs=1)
    assert measure(found, traffic, level, choice.rate).keeps(level)
    assert not measure(found, traffic, level, 1.1 * choice.rate).keeps(level)


@pytest.mark.all
@pytest.mark.usefixtures("planned_with_our_kernels")
def test_a_goal_for_each_token_costs_places_or_turns(wanted: tuple[Path, str, Options]) -> None:
    """One that a step of most slots just about keeps: whoever decodes is held up less, at a lower rate."""
    def chosen(goals: ServingGoals | None) -> ServingChoice:
        choice = plan_serving(*wanted, goals)
        choice.lm.close()
        return choice

    plain, lax = chosen(None), chosen(LAX)
    assert plain.rate is None and plain.turns is SERVER_TURNS
    step_s = step_times_of(plain.lm).seconds[1][1]
    strict = chosen(replace(LAX, tpot_s=1.2 * step_s))
    assert strict.rate and lax.rate and strict.rate < lax.rate
    assert (strict.turns, strict.lm.plan.workload.batch) != (plain.turns, plain.lm.plan.workload.batch)


def test_goals_that_no_plan_keeps_are_refused_with_the_best(wanted: tuple[Path, str, Options]) -> None:
    with pytest.raises(PlanError, match=r"alone is predicted to take \S+ m?s to its first token and \S+ ms per token"):
        plan_serving(*wanted, replace(LAX, tpot_s=1e-6))


@pytest.mark.parametrize(("budget", "counts"), [("device=20MB", [16, 8]), ("device=700KB", [16, 8, 4, 2, 1])])
def test_fewer_slots_are_planned_where_they_free_memory_for_something(
    wanted: tuple[Path, str, Options], budget: str, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    inner = plan_serving_module._planned
    monkeypatch.setattr(plan_serving_module, "_planned",
                        lambda task, count, alone=False: (tried.append(count), inner(task, count, alone=alone))[1])
    with plan_serving(wanted[0], budget, wanted[2]).lm as lm:
        assert list(dict.fromkeys(tried)) == counts and (lm.plan.workload.batch == 16) == (len(counts) == 2)


@pytest.mark.parametrize(("options", "says"), [
    (("--ttft", "100"), "--ttft and --tpot go together"), (("--ttft", "0", "--tpot", "5"), "above 0"),
    (("--isl", "8"), "give these too"), (("--ttft", "1", "--tpot", "1", "--isl", "99", "--prompt", "9"), "--isl: 99"),
    (("--ttft", "1", "--tpot", "1", "--osl", "99", "--new-tokens", "9"), "more than --new-tokens, 9")])
def test_goals_that_say_nothing_are_refused(options: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["serve", "demo", "--budget", "device=1GiB", *options])
    assert result.exit_code == 2 and says in " ".join(result.output.split())
