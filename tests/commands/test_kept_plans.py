"""Plans that the cache folder keeps: the second start searches for none, and runs as the first did."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import AutoModelForCausalLM

import forebay.kept_plans as kept_plans
import forebay.model_planner as model_planner
from forebay.api import wrap
from forebay.commands.plan_serving import ServingGoals, plan_serving
from forebay.open_model import open_model
from forebay.rewriter.ir.byte_sizes import eighth
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import plan_answers, plan_batch, plan_slots
from forebay.rewriter.pipeline.plan_task import Planned, PlanTask
from forebay.rewriter.planning.features.feature import ScheduleFeature
from forebay.rewriter.planning.features.table import FEATURES
from forebay.rewriter.planning.options import Options
from forebay.rewriter.serving import goodput

IDS = torch.tensor([[3, 1, 4, 1, 5]])
MACHINE = Machine.default()
SIZES = {"prompt": 8, "new_tokens": 6, "machine": MACHINE}
ROOMY = 2 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(families.llama(2)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of plans that is this test's own."""
    monkeypatch.setattr(model_planner, "plan_key", kept_plans.plan_key)
    monkeypatch.setattr(kept_plans, "make_cache_folder", lambda: tmp_path)
    yield tmp_path / "plans"


def searches(patch: pytest.MonkeyPatch) -> list[str]:
    """Note each search for a plan that is finished."""
    found: list[str] = []
    made = model_planner.finish

    def finish(task: PlanTask, planned: Planned) -> Planned:
        found.append("searched")
        return made(task, planned)

    patch.setattr(model_planner, "finish", finish)
    return found


def streaming(model: Path) -> int:
    """Bytes of a budget that holds half of the weights."""
    with wrap(model, ROOMY, **SIZES) as lm:
        return lm.steps.pipeline.smallest_budget() + lm.captured.weight_nbytes // 2


def answered(folder: Path, budget: int, **options: Any) -> tuple[Any, list[int]]:
    with wrap(folder, budget, **(SIZES | options)) as lm:
        return lm.plan, lm.generate(IDS, max_new_tokens=6, do_sample=False)[0].tolist()


@pytest.mark.parametrize("budget", ["stays", "streams"])
def test_the_second_start_searches_nothing(model: Path, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = streaming(model) if budget == "streams" else ROOMY
    searched = searches(monkeypatch)
    first = answered(model, nbytes)
    assert searched == ["searched"] and (first[0].prediction.streamed_nbytes > 0) == (budget == "streams")
    assert answered(model, nbytes) == first and searched == ["searched"]


@pytest.mark.parametrize("goals", [None, ServingGoals(0.5, 0.5, 8, 6)])
def test_a_server_starts_from_its_plan(
    model: Path, goals: ServingGoals | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "MOST_REQUESTS", 200)
    searched, found = searches(monkeypatch), []
    for _ in range(2):
        choice = plan_serving(model, ROOMY, Options(**SIZES, batch_slots=2), goals)
        with choice.lm as lm:
            found.append((lm.plan, choice.turns, choice.rate))
    assert found[0] == found[1] and searched == ["searched"]


def test_a_plan_whose_weights_stay_serves_a_little_more_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = searches(monkeypatch)
    part = ROOMY // 8
    first, _ = answered(model, ROOMY)
    for budget, known in ((ROOMY + part, True), (ROOMY + 2 * part, True), (ROOMY + 4 * part, False),
                          (ROOMY - part, False), (ROOMY + 1, False)):
        del searched[:]
        plan, _ = answered(model, budget)
        assert plan.budget.device == budget and (not searched) == known, budget
        assert not known or plan.buffers == first.buffers
        shutil.rmtree(kept_plans.make_cache_folder() / "plans")
        answered(model, ROOMY)


def test_a_plan_that_streams_serves_its_own_budget_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = streaming(model) // (step := eighth(streaming(model))) * step
    assert answered(model, budget)[0].prediction.streamed_nbytes
    searched = searches(monkeypatch)
    answered(model, budget + step)
    assert searched


def task_of(model: Path) -> PlanTask:
    captured, checkpoint, files = open_model(model, keep=True)
    planner = model_planner.ModelPlanner(captured, checkpoint, files, Budget(ROOMY), MACHINE)
    return planner.task(Workload(1, 8, 6), Options(**SIZES))


def test_what_decides_a_plan_is_in_its_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(model)
    key = partial(kept_plans.plan_key, graphs="graphs", choose=plan_batch)
    keys = [key(task), key(task, graphs="others"), key(task, choose=plan_answers), key(task, choose=plan_slots),
            key(task, choose=partial(plan_slots, slots=2)), key(task, choose=partial(plan_slots, slots=3)),
            *(key(replace(task, **change)) for change in (
                {"workload": Workload(2, 8, 6)}, {"options": Options(**SIZES, cache="kv8")},
                {"machine": replace(MACHINE, name="other")}, {"switches": replace(task.switches, no_reuse=True)}))]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        keys.append(key(task))
    assert None not in keys and len({*keys}) == len(keys)
    assert key(task) == keys[0] == key(task_of(model))
    assert kept_plans._file("key", Budget(5)) != kept_plans._file("key", Budget(5, 5))


def plan_elsewhere(task: PlanTask) -> Planned:
    return plan_batch(task)


def test_no_plan_is_kept_that_code_from_outside_made(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(model)
    assert kept_plans.plan_key(task, "", plan_batch) is None
    for choose in (plan_elsewhere, partial(plan_elsewhere), lambda task: plan_batch(task)):
        assert kept_plans.plan_key(task, "graphs", choose) is None
    feature = ScheduleFeature("outside", improve=lambda best, trial: best)
    monkeypatch.setattr(kept_plans, "FEATURES", [*FEATURES, feature])
    assert kept_plans.plan_key(task, "graphs", plan_batch) is None


@pytest.mark.parametrize("damage", ["cut", "a digit", "empty", "not text", "a folder"])
def test_a_damaged_plan_is_made_again(
    model: Path, damage: str, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answered(model, ROOMY)
    path, = plans.iterdir()
    whole = path.read_bytes()
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": whole[:500], "a digit": whole.replace(b'"batch": 1', b'"batch": 2', 1), "empty": b"",
                          "not text": b"\xff\xfe"}[damage])
    searched = searches(monkeypatch)
    assert answered(model, ROOMY) == expected and searched
    assert damage == "a folder" or path.read_bytes() == whole


def test_a_kept_plan_that_does_not_suit_is_made_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answered(model, ROOMY)

    def refuse(*_: Any) -> None:
        raise PlanError("plan.gemm: another processor")

    searched = searches(monkeypatch)
    monkeypatch.setattr("forebay.rewriter.pipeline.step_pipeline.check_products", refuse)
    assert answered(model, ROOMY) == expected and searched


def test_plans_read_longest_ago_go(model: Path, plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MOST", 2)
    for new_tokens in (4, 5, 6):
        wrap(model, ROOMY, **(SIZES | {"new_tokens": new_tokens})).close()
    assert len([*plans.iterdir()]) == 2
