"""A plan survives JSON, and a file edited by hand is refused by the path of its first bad field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.kernels.formats.table import CACHE_FORMATS, WEIGHT_FORMATS
from forebay.rewriter.ir.meeting import Meeting, meeting_of
from forebay.rewriter.ir.plan import (
    TIERS,
    BufferPlacement,
    GemmChoice,
    Limits,
    Plan,
    PlanError,
    Prediction,
    Schedule,
    WeightPlacement,
    Workload,
    load_plan,
    plan_from_dict,
    validate,
)

PLAN = Plan(
    "abc", "this machine", Limits(1000, 500), Workload(2, 8, 4),
    Schedule(slots=3, slot_nbytes=64, lead=2, prefill_chunks=(4, 2), host_hop=True),
    (WeightPlacement("w", "device", 64),
     WeightPlacement("v", "disk", 640, "w4g64", tile_rows=3, gather=True)),
    {"device": 900, "host": 10}, "kv8",
    (BufferPlacement("w", "weight", "device", 0, 64),
     BufferPlacement("a", "activation", "device", 64, 8, "decode", 1, 2)),
    (GemmChoice("float32", 1, 8, 8, "aten"),), Prediction(0.1, 0.2, {"disk": 0.2}, 640, {"device": 900}, "disk"))


def test_json_and_back(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == PLAN and hash(again.weights) == hash(PLAN.weights)
    assert plan_from_dict(json.loads(PLAN.to_json(indent=None))) == PLAN


weights = st.builds(
    WeightPlacement, st.text(min_size=1), st.sampled_from(TIERS), st.integers(0, 1 << 50),
    st.sampled_from((*WEIGHT_FORMATS, "w4g48", "w8g32")), st.integers(0, 1 << 20), st.booleans())
plans = st.builds(
    Plan, st.text(), st.text(),
    st.builds(Limits, st.integers(1, 1 << 45), st.none() | st.integers(0, 1 << 45)),
    st.builds(Workload, st.integers(1, 99), st.integers(999, 9999), st.integers(1, 9999)),
    st.integers(1, 9).flatmap(lambda slots: st.builds(
        Schedule, st.just(slots), st.integers(1, 1 << 30), st.integers(1, slots),
        st.sets(st.integers(1, 999), min_size=1, max_size=4).map(lambda s: tuple(sorted(s, reverse=True))),
        st.booleans())),
    st.lists(weights, unique_by=lambda w: w.name, max_size=5).map(tuple),
    st.dictionaries(st.sampled_from(["device", "host"]), st.integers(0, 1 << 40)),
    st.sampled_from(list(CACHE_FORMATS)),
)


@given(plans)
def test_every_plan_survives_json(plan: Plan) -> None:
    assert plan_from_dict(json.loads(plan.to_json())) == plan


def edit(change: Callable[[dict], object]) -> dict:
    data = json.loads(PLAN.to_json())
    change(data)
    return data


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d.update(version=1), "version: this plan says 1, this release reads 4; plan again"),
    (lambda d: d.pop("version"), "version: this plan says None"),
    (lambda d: d.update(colour=1), r"plan\.colour: unknown field"),
    (lambda d: d["schedule"].update(slotz=1), r"plan\.schedule\.slotz: unknown field"),
    (lambda d: d["schedule"].update(slots="2"), r"plan\.schedule\.slots: expected int, found '2'"),
    (lambda d: d["schedule"].update(slots=True), r"plan\.schedule\.slots: expected int, found True"),
    (lambda d: d["schedule"].update(host_hop=1), r"plan\.schedule\.host_hop: expected bool"),
    (lambda d: d["schedule"].update(slots=0), r"plan\.schedule: slots 0, slot_nbytes 64 and lead 2 must all be 0"),
    (lambda d: d["schedule"].update(lead=4), r"plan\.schedule\.lead: 4 copies ahead need 4 slots, the plan has 3"),
    (lambda d: d["schedule"].update(prefill_chunks=[]), r"plan\.schedule\.prefill_chunks: 0 is below 1"),
    (lambda d: d["schedule"].update(prefill_chunks=[4, 0]), r"plan\.schedule\.prefill_chunks: 0 is below 1"),
    (lambda d: d["schedule"].update(prefill_chunks=[2, 4]), r"plan\.schedule\.prefill_chunks: \[2, 4\] must be diff"),
    (lambda d: d["schedule"].update(prefill_chunks=[9]), r"plan\.schedule\.prefill_chunks: \[9\] .* prompt's 8 tokens"),
    (lambda d: d["buffers"][1].update(kind="workspace"), r"plan\.buffers\[1\]\.kind: 'workspace'"),
    (lambda d: d["workload"].update(batch=0), r"plan\.workload\.batch: 0 is below 1"),
    (lambda d: d["workload"].update(prompt=2.5), r"plan\.workload\.prompt: expected int"),
    (lambda d: d["budget"].update(device=0), r"plan\.budget\.device: 0 is below 1"),
    (lambda d: d["budget"].update(host="much"), r"plan\.budget\.host: expected int"),
    (lambda d: d["weights"][1].update(tier="tape"), r"plan\.weights\[1\]\.tier: 'tape' is not one of device, host"),
    (lambda d: d["weights"][1].update(name="w"), r"plan\.weights\[1\]\.name: w is placed twice"),
    (lambda d: d["weights"][1].update(format="w3"), r"plan\.weights\[1\]\.format: no weight format 'w3'; there are"),
    (lambda d: d["weights"][1].update(nbytes=-1), r"plan\.weights\[1\]: negative size"),
    (lambda d: d["weights"][0].pop("nbytes"), r"plan\.weights\[0\]\.nbytes is missing"),
    (lambda d: d.update(weights={}), r"plan\.weights: expected a list, found dict"),
    (lambda d: d["weights"].append(3), r"plan\.weights\[2\]: expected an object, found int"),
    (lambda d: d.update(cache_format="kv2"), r"plan\.cache_format: no cache format 'kv2'; there are native"),
    (lambda d: d["buffers"][1].update(offset=-8), r"plan\.buffers\[1\]: negative offset"),
    (lambda d: d["buffers"][1].update(kind="soup"), r"plan\.buffers\[1\]\.kind: 'soup'"),
    (lambda d: d["buffers"][1].update(kind="cache", offset=63), r"w and a both lie at offset 63 of the device arena"),
    (lambda d: d["buffers"][1].update(kind="cache", offset=0, phase="prefill"), r"at offset 0 .*phase prefill"),
    (lambda d: d["prediction"]["busy_time_s"].update(disk="slow"), r"plan\.prediction\.busy_time_s\.disk: expected"),
    (lambda d: d.update(arenas=[]), r"plan\.arenas: expected an object"),
    (lambda d: d.pop("budget"), r"plan\.budget is missing"),
])
def test_bad_field_is_refused_by_its_path(change: Callable[[dict], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_dict(edit(change))


@pytest.mark.parametrize("data", [None, 3, [], "plan"])
def test_what_is_no_object_is_no_plan(data: object) -> None:
    with pytest.raises(PlanError, match="plan: expected an object"):
        plan_from_dict(data)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match=r"plan\.json: No such file"):
        load_plan(path)
    path.write_text("{")
    with pytest.raises(PlanError, match=r"plan\.json is not JSON"):
        load_plan(path)


def test_a_hand_edited_value_is_kept() -> None:
    """An integer where a float is meant is accepted; everything else stays as written."""
    plan = plan_from_dict(edit(lambda d: (d["schedule"].update(slots=2), d["prediction"].update(decode_time_s=2))))
    assert plan.schedule == replace(PLAN.schedule, slots=2)
    assert plan.prediction.decode_time_s == 2.0 and isinstance(plan.prediction.decode_time_s, float)


def test_where_cache_and_activations_would_meet() -> None:
    """Two phases keep one cache at different lengths, which may overlap; 12 tokens of it take 240 bytes."""
    assert meeting_of(PLAN) is None and not PLAN.prefill_overlays_kv_cache
    narrow = BufferPlacement("cache_k_0", "cache", "device", 64, 160, "prefill")
    wide = replace(narrow, nbytes=240, phase="decode")
    moving = (BufferPlacement("a", "activation", "device", 850, 50, "decode", 1, 2),
              BufferPlacement("b", "io", "device", 430, 64, "decode", 0, 2),
              BufferPlacement("a", "activation", "device", 224, 676, "prefill", 1, 2))
    plan = replace(PLAN, buffers=(PLAN.buffers[0], narrow, wide, *moving))
    validate(plan)
    assert plan.prefill_overlays_kv_cache and plan_from_dict(json.loads(plan.to_json())).prefill_overlays_kv_cache
    assert [b.nbytes for b in plan.buffers_of("prefill")] == [64, 160, 676]
    assert meeting_of(plan) == Meeting(304, 430, 12 + 126 // 20, 2)
    assert meeting_of(replace(plan, buffers=(*PLAN.buffers[:1], wide))) == Meeting(304, 900, 12 + 596 // 20, 2)
    lasting = replace(plan, buffers=(PLAN.buffers[0], replace(wide, phase="all"), *moving[:2]))
    assert not lasting.prefill_overlays_kv_cache and meeting_of(lasting) == meeting_of(plan)


def test_questions_to_a_plan() -> None:
    assert PLAN.weight("v").tile_rows == 3
    assert PLAN.streams("v") and not PLAN.streams("w") and not PLAN.streams("a constant")
    assert (PLAN.nbytes_on("device"), PLAN.nbytes_on("host"), PLAN.nbytes_on("disk")) == (64, 0, 640)
    with pytest.raises(KeyError):
        PLAN.weight("u")
    changed = replace(PLAN, weights=(replace(PLAN.weights[0], tier="disk"),))
    assert changed.streams("w"), "the index of names is not carried over"
    validate(PLAN)


DEEP = ("[" * 100_000, '{"a":' * 100_000, '{"version": 1, "weights": ' + "[" * 5000 + "]" * 5000 + "}")


@pytest.mark.parametrize("text", DEEP)
def test_deep_nesting_is_an_error_of_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError):
        load_plan(tmp_path / "plan.json")
