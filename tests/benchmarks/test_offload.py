"""benchmarks.offload: what its contestants do on small models, and what its figures say of turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from budgets import WITH_KERNELS

from benchmarks.contestants import CONTESTANTS, RATES, Forebay, empty_slots
from benchmarks.models import RandomShape, make_model
from benchmarks.offload import CASES, Cell, around, cells, settings
from benchmarks.offload_figures import (
    binds,
    cores_bound,
    figures,
    held_nbytes,
    link_bound_s,
    report,
    same_tokens,
    summary,
)
from benchmarks.probes import ReadWatch
from benchmarks.sources import known
from forebay.rewriter.machine.profile import Machine, save_machine

TINY = (RandomShape(64, 2, 4, 2, 128, 512), RandomShape(64, 2, 4, 4, 128, 512, "opt"))
BUDGET = 1_200_000


@pytest.fixture(params=TINY, ids=lambda shape: shape.family)
def order(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    machine = tmp_path / "machine.json"
    save_machine(Machine.default(), str(machine))
    return {"path": str(make_model(tmp_path / "model", request.param)), "scratch": str(tmp_path), "vocab": 512,
            "machine": str(machine), "budget": BUDGET, **settings(CONTESTANTS["forebay bf16 zigzag"]), "label": "",
            "batch": 12, "prompt": 64, "new": 8, "steps": 2, "prefill": True, "whole": False, "most": 64}


@pytest.mark.covering(1)
@WITH_KERNELS
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_sampled_answer_moves_what_the_plan_says_it_moves_in_its_middle(order: dict[str, Any], tier: str) -> None:
    order |= {"options": order["options"] | {"cache_tier": tier}, "budget": 1 << 40 if tier == "device" else BUDGET}
    ours = Forebay(order)
    plan = ours.plan(order)
    assert plan["cache"] == tier
    found, rates = ours.turn(order), around(dict.fromkeys(RATES, 1.0), dict.fromkeys(RATES, 3.0) | {"bytes_per_s": 1e9})
    typical, slow = (ours.predicted(order | rates | {"prefill_pace": pace}) for pace in (2.0, 20.0))
    ours.close()
    assert len(found["steps_s"]) == 2 and found["prefill_s"] > 0
    assert typical["predicted_step_s"] == slow["predicted_step_s"] > 0
    assert typical["predicted_prefill_s"] < slow["predicted_prefill_s"], "many rows have a pace of their own"
    if tier == "disk":
        assert plan["micro_batches"] > 0 and plan["planned_written_nbytes"] > 0
        assert found["read_nbytes"] == pytest.approx(plan["planned_read_nbytes"], rel=0.25)


@pytest.mark.all
@WITH_KERNELS
@pytest.mark.parametrize("order", TINY[:1], indirect=True, ids=lambda shape: shape.family)
def test_more_sequences_fit_with_their_cache_on_disk(order: dict[str, Any]) -> None:
    ours = Forebay(order)
    fit = ours.fits(order)["device"]
    assert 0 < fit < 64
    order["batch"] = fit + 8
    assert ours.plan(order)["cache"] == "disk"
    whole = ours.turn(order | {"whole": True})
    ours.close()
    assert len(whole["tokens"]) == 8 and len(whole["tokens"][0]) == fit + 8


@WITH_KERNELS
def test_pools_are_full_before_a_turn_is_timed(tmp_path: Path) -> None:
    """Slots that no answer has touched are counted, and none are left where answers filled them; others are told."""
    machine = tmp_path / "machine.json"
    save_machine(Machine.default(), str(machine))
    folder = make_model(tmp_path / "model", RandomShape(64, 2, 4, 2, 32, 128, "qwen3_moe", 16, 2))
    order = {"path": str(folder), "scratch": str(tmp_path), "vocab": 128, "machine": str(machine), "budget": 600_000,
             "name": "", "options": {"expert_slots": 6}, "ram": False, "share": None, "label": "", "batch": 1,
             "prompt": 1, "new": 8, "steps": 2, "prefill": True, "whole": True, "most": 64, "draw": True}
    ours = Forebay(order)
    planned = ours.plan(order)
    assert planned.get("pool_slots") == 6, planned
    cold = ours.turn(order | {"warm": True})
    assert empty_slots(ours.lm) == cold["filling"]["empty_slots"] == 0 < cold["filling"]["tokens"]
    assert ours.turn(order | {"warm": True})["filling"]["tokens"] == 0 and ours.turn(order)["filling"] is None
    ours.lm.close()
    assert empty_slots(ours.lm) == 12  # of two layers
    ours.close()


def turn(name: str, step_s: float, predicted_s: float = 0.0, **more: Any) -> dict[str, Any]:
    predicted = {"predicted_step_s": predicted_s} if predicted_s else {}
    return {"cell": "64 x 128 + 32", "name": name, "steps_s": [step_s], "peak": 110, **predicted, **more,
            "resident_nbytes": 120, "link": {"bytes_per_s": 1e9, "written_bytes_per_s": 0.5e9}}


def test_rates_stand_beside_the_bounds_and_peers_of_their_cell() -> None:
    """64 sequences: 6.4 s of link, 1.6 s in memory, the peer has 8 sequences."""
    names = ("forebay bf16 zigzag", "ram bf16", "disk-map")
    model = {"model": "llama", "budget": 100, "baselines": dict.fromkeys(names, 10),
             "machine": {"reads_core_share": 0.5}, "limited": [], "read_nbytes": {names[1]: 25},
             "turns": [turn(names[0], 8.0, 7.2), turn(names[1], 1.6, 1.6), turn(names[2], 4.0)],
             "plans": [{"cell": "64 x 128 + 32", "name": name, "batch": batch, "planned_read_nbytes": 6e9,
                        "planned_written_nbytes": 0.2e9, "cache": "disk", "ram": name.startswith("ram"),
                        "formats": "bf16"} | planned
                       for name, batch, planned in zip(names, (64, 64, 8), (*[{"planned_step_s": 1.0}] * 2, {}),
                                                       strict=True)]}
    ours, ram, peer = figures(model, 1000.0)
    assert (ours["tokens_per_s"], ram["tokens_per_s"], peer["tokens_per_s"]) == (8.0, 40.0, 2.0)
    assert (ours["link_tokens_per_s"], ours["ram_tokens_per_s"], ours["times_peer"]) == (10.0, 40.0, 4.0)
    assert ours["step_error"] == pytest.approx(-0.1) and "step_error" not in peer and ours["peak_nbytes"] == 100
    assert ram["memory_tokens_per_s"] == 40.0 and (binds(ram), binds(ours)) == ("memory", "link")
    lines = summary([ours, ram, peer])
    assert lines[0] == "where the link binds decode is 0.80 to 0.80 of its bound"
    assert any(line.startswith("predicted within 15 %: 2 of 2") for line in lines) and "1.00 of the budget" in lines[-1]
    assert cores_bound(ours, 0.5) == pytest.approx(ours["cores_tokens_per_s"]) == pytest.approx(1 / (1 / 40 + 0.05))
    assert summary([]) == []


def test_a_step_read_what_the_process_read_after_the_first_token() -> None:
    watch = ReadWatch(0)
    watch.seen = [(10.0, 100), (12.0, 500), (14.0, 700), (16.0, 900)]  # 4 s of two steps at the end
    assert watch.step_nbytes(4.0, 2) == 200


def test_reads_of_steps_stand_beside_plain_reads(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"model": "8b", "budget": 100, "baselines": {"peer": 10}, "machine": {"memory_bytes_per_s": 1e10},
             "limited": ["peer"], "read_nbytes": {}, "fits": {},
             "turns": [turn("peer", step_s, step_read_nbytes=2e8, group_peak=5e7) for step_s in (0.4, 0.2, 0.5)],
             "plans": [{"cell": "64 x 128 + 32", "name": "peer", "batch": 64, "ram": False, "formats": "gguf"}]}
    (row,) = rows = figures(model, 1e9)
    assert (row["link_share"], row["step_read_nbytes"], row["group_nbytes"]) == (0.5, 2e8, 5e7)
    report({"processor": "any", "models": [model], "rows": rows, "summary": summary(rows)})
    _, reads, *table = capsys.readouterr().out.splitlines()
    assert reads.startswith("8b: plain reads 1 (1 to 1) GB/s") and len({len(line) for line in table}) == 1
    assert {title: cell.strip() for title, cell in zip(map(str.strip, table[0].split("|")), table[2].split("|"),
                                                       strict=True)}["of plain reads"] == "50%"


def test_memory_is_counted_above_what_planning_left() -> None:
    plans = [{"name": "a", "held_nbytes": 7}, {"name": "a", "held_nbytes": 9}, {"name": "b", "held_nbytes": 50}]
    assert held_nbytes({"baselines": {"a": 5, "peer": 6}, "plans": plans}, "a") == 9
    assert held_nbytes({"baselines": {"a": 5, "peer": 6}, "plans": plans}, "peer") == 6


def test_the_bound_of_the_link_counts_reads_and_writes() -> None:
    plan = {"planned_read_nbytes": 3e9, "planned_written_nbytes": 1e9}
    assert link_bound_s(plan, {"bytes_per_s": 3e9, "written_bytes_per_s": 0.5e9}) == 3.0


def test_tokens_are_the_same_up_to_the_first_that_differs() -> None:
    assert same_tokens([[1, 5], [2, 6], [3, 7]], [[1, 5], [9, 6], [3, 7]]) == 4 / 6


def test_cells_and_contestants_by_name() -> None:
    assert cells("24x96+8,1x128+32") == [Cell(24, 96, 8), Cell(1, 128, 32)]
    for case in CASES.values():
        assert cells(case.cells) and set(case.contestants.split(",")) <= {*CONTESTANTS}
        assert all(map(known, case.models.split(",")))
    assert [name for name in CONTESTANTS if "%" in name][:2] == ["forebay within 100 %", "forebay within 75 %"]


def test_a_budget_by_share_is_so_much_of_the_weights_beside_the_smallest_plan(order: dict[str, Any]) -> None:
    ours = Forebay(order)
    little, much = (ours.plan(order | {"share": share})["budget"] for share in (15, 50))
    weights = sum(weight.nbytes for weight in ours.lm.plan.weights)
    assert much - little == weights * 50 // 100 - weights * 15 // 100
    ours.close()
