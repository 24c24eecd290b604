"""benchmarks.throughput: what its contestants do on small models, and what its verdicts say of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from budgets import WITH_KERNELS

from benchmarks.block_contestants import RATES, Ours, around
from benchmarks.block_sweep import answer_times, errors_of, forced_blocks
from benchmarks.shaped_models import Sizes, make_shaped
from benchmarks.throughput_cells import HYBRID, OURS, Cell, cells
from benchmarks.throughput_figures import between, cores_bound, held_nbytes, link_bound_s, verdicts
from forebay.rewriter.machine.profile import Machine, save_machine

TINY = (Sizes("llama", 64, 2, 4, 128, 512), Sizes("opt", 64, 2, 4, 128, 512))
BUDGET = 1_200_000


@pytest.fixture(params=TINY, ids=lambda sizes: sizes.family)
def order(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    machine = tmp_path / "machine.json"
    save_machine(Machine.default(), str(machine))
    return {"model": str(make_shaped(tmp_path / "model", request.param)), "scratch": str(tmp_path), "vocab": 512,
            "machine": str(machine), "budget": BUDGET, "ram": False, "cache_format": "native", "order": "zigzag",
            "batch": 12, "prompt": 64, "new": 8, "steps": 2, "prefill": True, "whole": False, "most": 64}


@pytest.mark.covering(1)
@WITH_KERNELS
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_sampled_answer_moves_what_the_plan_says_it_moves_in_its_middle(order: dict[str, Any], tier: str) -> None:
    order |= {"forced": {"cache_tier": tier}, "budget": 1 << 40 if tier == "device" else BUDGET}
    ours = Ours(order)
    plan = ours.plan(order)
    assert plan["cache"] == tier
    found, rates = ours.turn(order), around(dict.fromkeys(RATES, 1.0), dict.fromkeys(RATES, 3.0) | {"bytes_per_s": 1e9})
    usual, slow = (ours.predicted(order | rates | {"prefill_pace": pace}) for pace in (2.0, 20.0))
    ours.close()
    assert len(found["steps_s"]) == 2 and found["prefill_s"] > 0
    assert usual["predicted_step_s"] == slow["predicted_step_s"] > 0
    assert usual["predicted_prefill_s"] < slow["predicted_prefill_s"], "many rows have a pace of their own"
    if tier == "disk":
        assert plan["micro_batches"] > 0 and plan["planned_written_nbytes"] > 0
        assert found["read_nbytes"] == pytest.approx(plan["planned_read_nbytes"], rel=0.25)


@pytest.mark.all
@WITH_KERNELS
@pytest.mark.parametrize("order", TINY[:1], indirect=True, ids=lambda sizes: sizes.family)
def test_more_sequences_fit_with_their_cache_on_disk(order: dict[str, Any]) -> None:
    ours = Ours(order)
    fit = ours.fits(order)["device"]
    assert 0 < fit < 64
    order["batch"] = fit + 8
    assert ours.plan(order)["cache"] == "disk"
    whole = ours.turn(order | {"whole": True})
    ours.close()
    assert len(whole["tokens"]) == 8 and len(whole["tokens"][0]) == fit + 8


def row(name: str, tokens_per_s: float, link: float, ram: float, **more: Any) -> dict[str, Any]:
    return {"model": "llama", "cell": "64 x 128 + 32", "name": name, "batch": 64, "micro_batches": 4,
            "tokens_per_s": tokens_per_s, "link_tokens_per_s": link, "ram_tokens_per_s": ram, "budget": 100,
            "peak_nbytes": 99, **more}


def test_each_aim_is_judged_by_the_rows_that_it_is_about() -> None:
    rows = [row("forebay bf16 zigzag", 9.5, 10, 100, times_peer=4.1, step_error=0.1),
            row("forebay w4+kv4 zigzag", 91, 1000, 100, times_peer=20.0, step_error=-0.2),
            row("forebay w4+kv4 row", 1, 10, 100, times_peer=1.0)]
    model = {"fits": {"128+32": 3}, "plans": [
        {"name": "forebay bf16 zigzag", "cache": "disk", "batch": 64, "cell": "64 x 128 + 32"}]}
    holds, summary = verdicts(rows, [model])
    assert list(holds.values()) == [True, True, False, True, None, None, None, False]
    assert any("21.33" in line for line in summary) and any("0.91" in line for line in summary)
    assert verdicts([], [])[0] == dict.fromkeys(holds)


def test_shares_of_checkpoints_are_judged_where_one_between_is_predicted_to_be_best() -> None:
    def cell(half: float, error: float) -> list[dict[str, Any]]:
        return [row(f"forebay bf16 zigzag checkpoints {share}", rate, 100, 100, step_error=e)
                for share, rate, e in (("0/1", 10.0, 0.0), ("1/2", half, error), ("1/1", 11.0, 0.0))]

    assert list(between(cell(14.0, 0.0))) == [(1.4, 14 / 11)]
    assert list(between(cell(14.0, 0.5))) == [], "predicted to take half as long again"
    holds, _ = verdicts(cell(12.0, 0.0), [])
    assert [holds[aim] for aim in holds if "checkpoints" in aim] == [False, False]


def test_memory_is_counted_above_what_planning_left() -> None:
    plans = [{"name": "a", "held_nbytes": 7}, {"name": "a", "held_nbytes": 9}, {"name": "b", "held_nbytes": 50}]
    assert held_nbytes({"baselines": {"a": 5, "peer": 6}, "plans": plans}, "a") == 9
    assert held_nbytes({"baselines": {"a": 5, "peer": 6}, "plans": plans}, "peer") == 6


def test_the_bound_of_the_link_counts_reads_and_writes() -> None:
    plan = {"planned_read_nbytes": 3e9, "planned_written_nbytes": 1e9}
    assert link_bound_s(plan, {"bytes_per_s": 3e9, "written_bytes_per_s": 0.5e9}) == 3.0


def test_the_cores_bound_is_computing_in_memory_and_a_share_of_the_link() -> None:
    """10 and 20 ms a token: half of the link's time is borne by the cores, and 1 s gives 50 tokens."""
    of = row("forebay bf16 zigzag", 40.0, 50.0, 100.0)
    assert cores_bound(of, 0.5) == pytest.approx(50.0) and cores_bound(of, 0.0) == pytest.approx(100.0)
    rows = [of | {"cores_tokens_per_s": 50.0}, row("forebay bf16 zigzag", 45.0, 50.0, 100.0, cores_tokens_per_s=50.0)]
    assert "decode of what the cores allow, which bear a share of reads: 0.80 to 0.90" in verdicts(rows, [])[1]


def test_cells_and_contestants_by_name() -> None:
    assert cells("24x96+8,1x128+32") == [Cell(24, 96, 8), Cell(1, 128, 32)]
    assert set(OURS) == {
        *(f"forebay {f} {o}" for f in ("bf16", "w4", "w4+kv4") for o in ("zigzag", "row")),
        *(f"ram {f}" for f in ("bf16", "w4", "w4+kv4"))}
    assert set(HYBRID) == {f"forebay bf16 zigzag checkpoints {share}" for share in ("0/1", "1/4", "1/2", "1/1")}


def test_a_block_stands_to_its_prediction_as_the_median_of_its_turns() -> None:
    turns = [{"steps_s": [1.0, 3.0, 2.0], "predicted_step_s": p, "prefill_s": 10.0, "predicted_prefill_s": 12.0}
             for p in (1.0, 2.2, 9.0)]
    assert errors_of(turns) == pytest.approx({"step": 0.1, "prefill": 0.2})
    assert set(errors_of([turns[0], {k: v for k, v in turns[1].items() if "prefill" not in k}])) == {"step"}
    times = answer_times({"a": turns[:2]}, Cell(4, 8, 11))
    assert times == {"a": [turn["prefill_s"] + 20.0 for turn in turns[:2]]}


def test_forced_blocks_are_enough_and_within_the_batch() -> None:
    found = forced_blocks(48)
    assert len(found) >= 24 and all(2 <= wish["micro_batches"] <= 24 for wish in found.values())
