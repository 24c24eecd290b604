"""Planning from a config alone: JSON, objectives, the picture of the frontier, and refusals by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.commands.plan_config import plan_config, plan_config_text
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.machine.presets import PresetError
from forebay.rewriter.planning.policy_search import BudgetError
from forebay.rewriter.predict.model_shapes import ModelError


def test_a_preset_model_gives_a_whole_policy() -> None:
    found = json.loads(json.dumps(plan_config("opt-175b", "t4", batch=32)))
    assert found["policy"]["block"]["sequences"] == 32 and found["machine"] == "t4"
    assert len(found["weights"]) == 96 * (2 * 6 + 2) + 3  # six products with bias and two norms a layer
    policy = found["policy"]
    assert policy["tokens_per_s"] == pytest.approx(32 * 32 / policy["latency_s"])
    for tier, nbytes in policy["peak_nbytes"].items():
        assert nbytes <= policy["capacity_nbytes"][tier]
    text = plan_config_text(found)
    assert "tokens/s" in text and "bound by" in text and "a policy, which nothing runs yet" in text


def test_frontier_is_drawn_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "frontier.png"
    found = plan_config("opt-1.3b", "t4", device_nbytes=10**9, pareto=path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    points = json.loads(path.with_suffix(".json").read_text())
    assert points == found["pareto"] and len(points) > 2
    assert "frontier" in plan_config_text(found)
    with pytest.raises(PlanError, match="cannot write the picture"):
        plan_config("opt-125m", "t4", pareto=tmp_path / "frontier.xyz")


def test_quantising_is_never_slower() -> None:
    plain, packed = (plan_config("opt-30b", "t4", batch=4, quantise=q)["policy"] for q in (False, True))
    assert packed["tokens_per_s"] > 1.5 * plain["tokens_per_s"]


@pytest.mark.parametrize(("arguments", "kind", "says"), [
    ({"config": "opt-1"}, ModelError, "presets are"), ({"machine": "t5"}, PresetError, "presets are"),
    ({"prompt": 0}, PlanError, "prompt"), ({"output": 0}, PlanError, "output"), ({"batch": -1}, PlanError, "batch"),
    ({"objective": "fame"}, PlanError, "objective"), ({"objective": "budget"}, PlanError, "tokens_per_s"),
    ({"latency_s": 0.0}, PlanError, "latency_s"), ({"device_nbytes": 0}, PlanError, "device_nbytes"),
    ({"device_nbytes": 10**8}, BudgetError, "binding tier is device"),
    ({"host_nbytes": 10**9, "disk_nbytes": 10**9}, BudgetError, "device.*host.*disk"),
])
def test_bad_input_is_refused(arguments: dict[str, Any], kind: type[ValueError], says: str) -> None:
    given: dict[str, Any] = {"config": "opt-30b", "machine": "t4", "batch": 1, **arguments}
    with pytest.raises(kind, match=says):
        plan_config(given.pop("config"), given.pop("machine"), **given)
