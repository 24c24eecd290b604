"""Times that a choice of drafts is made by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.rewriter.ir.drafts_beside import HELD_UP
from forebay.rewriter.ir.plan import Limits, Plan, Prediction, Schedule, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.speculation import Speculation
from forebay.rewriter.pipeline.plan_draft import DraftWay, token_time_s

PLAN = Plan("", "", Limits(1), Workload(1, 8, 11), Schedule(batching=BatchSchedule(speculation=Speculation((4, 2)))),
            (),
            prediction=Prediction(2.0, 1.0, speculative_times_s=(1.2, 1.1)))
DRAFT = replace(PLAN, schedule=Schedule(), prediction=Prediction(0.5, 0.1))


@pytest.mark.parametrize(("chance", "expected"), [
    (1.0, (1.2 + 4 * 0.1) / 4),  # all stand: four tokens for a step, three drafts and one more
    (0.0, 1.0),  # none does: plain steps
    (0.5, (1.2 + 3.125 * 0.1) / 1.875),
])
def test_a_token_takes_its_share_of_a_pass_and_of_the_drafts(chance: float, expected: float) -> None:
    assert token_time_s(PLAN, DRAFT, chance) == pytest.approx(expected)
    way = DraftWay(None, PLAN, DRAFT, chance, 0)  # type: ignore[arg-type]
    assert way.answer_s(chance) == pytest.approx(0.5 + 2.0 + 10 * expected)


def test_dear_drafts_are_left() -> None:
    dear = replace(DRAFT, prediction=Prediction(0.5, 1.0))
    assert token_time_s(PLAN, dear, 0.9) == 1.0


@pytest.mark.parametrize(("busy_s", "chance", "expected"), [
    (0.2, 1.0, (1.2 + HELD_UP * 0.4) / 4),  # the drafts of the next pass are made beside this one
    (0.2, 0.9, (1.2 + HELD_UP * 0.4 + (1 - 0.9**4) * 0.1 * (3 + 0.9**3)) / (1 + 0.9 + 0.81 + 0.729)),
    (0.2, 0.5, (1.2 + 3.125 * 0.1) / 1.875),  # too seldom are they of use
    (1.2, 1.0, (1.2 + 4 * 0.1) / 4),  # processors that have no time to spare
])
def test_drafts_beside_a_pass_take_what_it_is_longer(busy_s: float, chance: float, expected: float) -> None:
    plan = replace(PLAN, prediction=replace(PLAN.prediction, speculative_busy_s=(busy_s, busy_s)))
    assert token_time_s(plan, DRAFT, chance) == pytest.approx(expected)
