"""Whatever field of a plan is changed, the Programs change with it, or a PlanError names the field.

Fields are found by walking the dataclasses, so that one that is added and not obeyed fails here. Of the records and
values of a field one stands for all in each plan, another in each; FOREBAY_TEST_ALL=1 (`make test-all`) tries them all.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from families import rewritten
from selection import ALL, without
from small_experts import small_config

import forebay.rewriter.pipeline.run_passes as run_passes
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import MOVING, Budget, Plan, PlanError, Workload, plan_from_dict
from forebay.rewriter.ir.program import FileSlice, Program
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.hidden_placement import HiddenPlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.ir.schedule.speculation import Speculation
from forebay.rewriter.ir.score_range import ScoreRange
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches

WORK = Workload(batch=2, prompt=200, new_tokens=1)  # too little to come for the cache to grow
LENDING = Workload(batch=2, prompt=40, new_tokens=4)
# what records an expectation and decides nothing: replaying restores it, where it does not refuse it
RECORDS = ("plan.machine", "plan.prediction")
BLOCKS = {"row": BatchSchedule(MicroBatches(2, "row")),
          "cache on disk": BatchSchedule(MicroBatches(2, "zigzag"), CachePlacement("disk", 16, 3)),
          "cache in shares": BatchSchedule(MicroBatches(2, "zigzag"), CachePlacement("disk", 16, 3, 1, 1)),
          "admitted": BatchSchedule(MicroBatches(2), admission=Admission(1)),
          "hidden on disk": BatchSchedule(MicroBatches(2), hidden=HiddenPlacement("disk", 1)),
          "speculative": BatchSchedule(speculation=Speculation((6, 3))),
          "speculative in slots": BatchSchedule(MicroBatches(2), admission=Admission(1),
                                                 speculation=Speculation((6, 3)))}
# Kinds of plans that make test leaves out, each of whose fields another kind has too: shares of a cache on disk, and
# drafts of sequences that are admitted.
LEFT = ("cache on disk", "admitted", "speculative")
KINDS = ("lending", "resident", "by way of the host", "experts by name", *BLOCKS)
# Fields that mean most in one kind, which makes all changes of them.
OWN = {"experts by name": ("plan.weights", "plan.gemm"), "by way of the host": ("plan.weights",)}
LIMITS = ("plan.budget.",)  # may be more than is taken; less is refused


def pipeline(work: Workload, host_hop: bool, batching: BatchSchedule = ALONE, experts: bool = False) -> Pipeline:
    lm = rewrite_captured(capture_model(small_config("qwen3_moe")), Switches()) if experts else rewritten("llama")
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    graphs = step_graphs(lm, files, work, "llama", host_hop=host_hop, batching=batching)
    return Pipeline(graphs, work, Machine.default(), Switches())


def planned(kind: str) -> tuple[Pipeline, Plan]:
    lending = kind in ("lending", "speculative", "experts by name")
    experts = kind == "experts by name"
    made = pipeline(LENDING if lending else WORK, kind == "by way of the host", BLOCKS.get(kind, ALONE), experts)
    options = Options(prefill_chunk=36, expert_slots=3 if experts else None)
    weights = sum(u.nbytes for u in made.needs.uses)
    device = made.smallest_budget(options) + (
        4 * weights if kind == "resident" else 0 if kind in BLOCKS and not lending else weights // 2)
    cached = made.needs.staged.host_nbytes if made.needs.staged is not None else 0
    plan = made.plan(Budget(device, weights // 4 if "host" in kind else cached),
                     replace(options, score_ranges=(ScoreRange(1, 3.0, -40.0, 50.0), ScoreRange(0, -2.0, -9.0, 11.0))))
    assert plan.prefill_overlays_kv_cache is lending
    assert (plan.prediction.streamed_nbytes > 0) is (kind != "resident") and len(plan.schedule.prefill_chunks) > 1
    assert (plan.nbytes_on("host") > 0) is ("host" in kind)
    return made, plan


def programs(made: Pipeline, plan: Plan) -> Iterator[Program | None]:
    """Those that the prediction was made from, which are known, before the others."""
    sizes = plan.schedule.step_sizes
    first = {1, plan.schedule.prefill_chunk} & {*sizes}
    yield from (made.program(plan, tokens) for tokens in sorted(first) + [n for n in sizes if n not in first])
    yield made.growth(plan)


def changes_programs(made: Pipeline, plan: Plan, before: list[Program | None]) -> bool:
    """Whether any Program of `plan` is not that of `before`; once one is found, the others are not made."""
    after = programs(made, plan)
    if ALL:
        return [*after] != before
    return any(program != known for program, known in itertools.zip_longest(after, before, fillvalue=...))


def other_values(hint: Any, value: Any) -> Iterator[Any]:
    """Values that a field of this type may have instead."""
    kinds = {*get_args(hint)} if get_origin(hint) not in (Literal, None) else {hint}
    if get_origin(hint) is Literal:
        yield from (v for v in get_args(hint) if v != value)
    elif bool in kinds:
        yield not value
    elif int in kinds:
        yield from {v for v in ((value or 0) + 1, (value or 0) + 64, max(0, (value or 0) - 64), (value or 0) // 2, 0)
                    if v != value}
    elif float in kinds:
        yield 2 * value + 1
    else:
        assert str in kinds, f"say how a {hint} is changed"
        yield value + "x"


def changes(kind: Any, data: Any, path: str) -> Iterator[tuple[str, list[object], Any]]:
    """Every change of one value in a plan's JSON, as (path of the field, keys that lead to it, value; None: removed).
    Of records that are alike in all that is not a name or number one stands for all."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            for where, keys, value in changes(hints[field.name], data[field.name], f"{path}.{field.name}"):
                yield where, [field.name, *keys], value
        return
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not data and not dataclasses.is_dataclass(args[0]):
            yield path, [], [next(other_values(args[0], "" if args[0] is str else 1))]
        alike = {}
        for i, item in enumerate(data):
            alike.setdefault(str([v if isinstance(v, bool) else "" if isinstance(v, int) else v
                                  for k, v in item.items() if k != "name"]) if isinstance(item, dict) else str(item), i)
        for i in alike.values():
            yield f"{path}[{i}]", [i], None
            for where, keys, value in changes(args[0], data[i], f"{path}[{i}]"):
                yield where, [i, *keys], value
    elif origin is dict:
        yield f"{path}.other", ["other"], next(other_values(args[1], 1))
        for key, item in data.items():
            yield f"{path}.{key}", [key], None
            for where, keys, value in changes(args[1], item, f"{path}.{key}"):
                yield where, [key, *keys], value
    else:
        for value in other_values(kind, data):
            yield path, [], value


def one_of_each(found: list[tuple[str, list[object], Any]], kind: str) -> list[tuple[str, list[object], Any]]:
    """One change of each field, and one removal, which another kind of plan chooses otherwise; limits, which are obeyed
    from one side only, with all of theirs. Of fields that all kinds have each kind takes a share: two kinds or three
    change each."""
    of_field: dict[tuple[str, bool], list] = {}
    for change in found:
        of_field.setdefault((re.sub(r"\[\d+\]", "", change[0]), change[2] is None), []).append(change)
    return [change for (path, removed), all_ in of_field.items() if taken(f"{path}{removed}", kind) for change in (
        all_ if path.startswith(LIMITS) else [all_[zlib.crc32((kind + path).encode()) % len(all_)]])]


def taken(change: str, kind: str) -> bool:
    """Whether a kind of plan makes a change: schedules differ by kind, and each makes those of its own."""
    own = (*LIMITS, "plan.schedule.", *OWN.get(kind, ()))
    return change.startswith(own) or (zlib.crc32(change.encode()) + KINDS.index(kind)) % 3 == 0


def changed(plan: Plan, keys: list[object], value: Any) -> dict:
    """The plan's JSON with one change, without the prediction that no longer holds, unless that is what changes."""
    data = json.loads(plan.to_json())
    if keys[0] != "prediction":
        del data["prediction"]
    at: Any = data
    for key in keys[:-1]:
        at = at[key]
    if value is None:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    return data


def names(message: str, path: str) -> bool:
    """Whether an error names a field: the record that it is in, perhaps another of its kind, and the field."""
    record, _, field = re.sub(r"\[\d+\]", "", path).rpartition(".")
    bare = re.sub(r"\[\d*\]", "", message)
    return (record if record != "plan" else "plan." + field) in bare and field in bare


def leaves(kind: Any, path: str) -> Iterator[str]:
    """Every field that a plan may have by its types, whether it holds anything in this plan or not."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield from leaves(hints[field.name], f"{path}.{field.name}")
    elif get_origin(kind) is tuple:
        yield from leaves(get_args(kind)[0], path)
    else:
        yield path


@pytest.mark.parametrize("kind", without(KINDS, LEFT))
def test_every_field_is_obeyed_or_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan = planned(kind)
    monkeypatch.setattr(run_passes, "ALWAYS_CHECK", False)  # graphs of changed plans differ in addresses and tiles
    before = [*programs(made, plan)]
    assert made.replay(plan_from_dict(json.loads(plan.to_json()))) == plan
    silent, unnamed, found = [], [], 0
    effects: dict[str, bool] = {}
    every = [*changes(Plan, json.loads(plan.to_json()), "plan")]
    for path, keys, value in every if ALL else one_of_each(every, kind):
        found += 1
        told = f"{path} = {value!r}"
        try:
            replayed = made.replay(plan_from_dict(changed(plan, keys, value)))
            effect = changes_programs(made, replayed, before)
        except PlanError as error:
            if not names(str(error), path):
                unnamed.append(f"{told}: {error}")
            effect = True
        else:
            if path.startswith(RECORDS):
                effect = effect or replayed == plan
        if path == "plan.budget.host" and "host" not in plan.arenas:
            effect = True  # nothing is below none
        effects[path] = effects.get(path, False) or effect
        if not effect and not path.startswith(LIMITS):
            silent.append(told)
    assert not unnamed, "refused by another name: " + "\n".join(unnamed)
    assert not silent, "changed nothing and were not refused: " + "; ".join(silent)
    assert all(effects.values()), [path for path, effect in effects.items() if not effect]
    fields = {re.sub(r"\[\d+\]", "", path) for path, *_ in every}
    missed = [leaf for leaf in leaves(Plan, "plan") if not any(f"{field}.".startswith(f"{leaf}.") for field in fields)]
    assert found > (100 if ALL else 40) and not missed, f"no value of these was changed: {missed}"
    assert {"plan.version", "plan.fingerprint", "plan.schedule.lead", "plan.buffers.last",
            "plan.weights.tile_rows", "plan.gemm.impl", "plan.prediction.bottleneck"} <= fields


def test_each_field_is_changed_in_several_kinds_of_plans() -> None:
    """By those that `make test` runs: whatever three kinds that follow each other share out, one has."""
    run = [kind for kind in KINDS if kind not in LEFT]
    for field in ("plan.version", "plan.weights.tile_rows", "plan.buffers.last", "plan.gemm.impl", "plan.fingerprint"):
        for removed in (False, True):
            assert sum(taken(f"{field}{removed}", kind) for kind in run) >= 2


def test_an_activation_that_is_moved_is_moved_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address is figured again behind the plan's back: some have room beside them, others do not."""
    made, plan = planned("resident")
    monkeypatch.setattr(run_passes, "ALWAYS_CHECK", False)
    before, moved, refused = [*programs(made, plan)], 0, 0
    for i, buffer in enumerate(plan.buffers):
        if buffer.kind not in MOVING:
            continue
        for offset in (buffer.offset + 64, buffer.offset - 64):
            try:
                replayed = made.replay(plan_from_dict(changed(plan, ["buffers", i, "offset"], offset)))
                changed_programs = changes_programs(made, replayed, before)
            except PlanError:
                refused += 1
            else:
                assert replayed.buffers[i].offset == offset and changed_programs, f"{buffer.name} to {offset}"
                moved += 1
    assert moved > 5 and refused > 5
