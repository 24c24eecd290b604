"""Blocks of several micro-batches answer as transformers does, in every order, and bring weights as often as planned.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import operators_nbytes
from e2e.agreement import assert_same_tokens
from e2e.block_case import ATTENDED, CHUNKS, COUNT, DISK, HOST, HOST_NBYTES, NEW, PROMPT, SHARED, Case
from e2e.waits import assert_waits_are_needed
from late import make_late
from schedules import with_settings
from selection import at_length, without

import forebay.runtime.disk.spill as spill_module
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import Budget, PlanError, Prediction, Workload, load_plan, plan_from_dict, validate
from forebay.rewriter.ir.program import ATTEND, LOAD, Copy, FileSlice, Launch
from forebay.rewriter.planning.objective import latency_s
from forebay.rewriter.planning.options import Options
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.rows import SequenceRows


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(("name", "micro_batches", "order"), without([
    (*case, order) for case in (("llama", 2), ("llama", 5), ("opt", 3), ("gpt2", 2), ("gemma2", 3), ("gpt2", 99))
    for order in ("row", "zigzag")],
    [(*case, order) for case in (("llama", 2), ("opt", 3), ("gpt2", 2)) for order in ("row", "zigzag")]
    + [("llama", 5, "zigzag"), ("gemma2", 3, "row"), ("gpt2", 99, "zigzag")]))
def test_tokens_equal_transformers(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, micro_batches: int, order: str
) -> None:
    """Three micro-batches leave slots empty, and 99 are more than there are sequences."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    with case.tight(micro_batches=micro_batches, order=order) as lm:
        batching = lm.plan.schedule.batching
        assert batching.micro_batches.order == order and batching.micro_batches.count == min(micro_batches, COUNT)
        assert lm.plan.workload.batch == {2: 6, 3: 6}.get(micro_batches, 5)
        assert lm.plan.prediction.streamed_nbytes > 0
        case.check(lm)


def test_a_zigzag_pass_brings_each_weight_once(cases: Callable[[str], Case], reader_log: Any) -> None:
    """With the same weights streamed, row order brings them for each micro-batch anew."""
    case = cases("llama")
    marks: list[int] = []
    for order, micro_batches in (("zigzag", 1), ("zigzag", 5), ("row", 5)):
        with case.language_model(0.9, slots=9, slot_nbytes=65536, prefill_chunk=2, order=order,
                                 micro_batches=micro_batches) as lm:
            marks.clear()
            case.answer(lm, on_token=lambda column: marks.append(reader_log.slices))
            per_step = {b - a for a, b in itertools.pairwise(marks)}
            streamed = sum(w.nbytes for w in lm.plan.weights if w.tier == "disk" and (w.tile_rows or not w.gather))
            assert streamed > 0.2 * case.nbytes
            assert per_step == {lm.plan.prediction.streamed_nbytes} == {streamed * (5 if order == "row" else 1)}
            assert lm.plan.schedule.batching.micro_batches.fetches * streamed == lm.plan.prediction.streamed_nbytes


@pytest.mark.parametrize("order", ["row", "zigzag"])
def test_activations_of_one_micro_batch_at_a_time(cases: Callable[[str], Case], order: str) -> None:
    case = cases("llama")
    heights = {}
    for micro_batches in (1, 5):
        with case.language_model(4.0, micro_batches=micro_batches, order=order, prefill_chunk=PROMPT) as lm:
            own = [b for b in lm.plan.buffers if b.phase == "prefill" and b.kind == "activation"]
            heights[micro_batches] = max(b.offset + b.nbytes for b in own) - min(b.offset for b in own)
    assert heights[5] < (0.25 if order == "row" else 0.6) * heights[1]


@pytest.mark.parametrize(("order", "more"), [
    ("row", CHUNKS), at_length("zigzag", CHUNKS), ("zigzag", DISK), at_length("row", DISK | {"cache_slots": 2}),
    at_length("zigzag", HOST), at_length("zigzag", SHARED), ("row", SHARED), ("zigzag", ATTENDED)])
def test_without_any_one_wait_the_program_is_refused(
    cases: Callable[[str], Case], order: str, more: dict[str, Any]
) -> None:
    """Every wait of the compute stream, and those for slots that nothing else orders."""
    with cases("llama").language_model(0.9, micro_batches=2, order=order, **more) as lm:
        assert_waits_are_needed(lm.steps.program(1))


@pytest.mark.parametrize(("order", "more"), [
    ("row", CHUNKS), at_length("zigzag", CHUNKS), at_length("zigzag", DISK), at_length("row", DISK),
    ("zigzag", HOST), at_length("zigzag", SHARED), at_length("row", SHARED), at_length("zigzag", ATTENDED),
    ("zigzag", SHARED | {"cpu_attention": True})])
def test_copies_that_overtake_each_other(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, order: str, more: dict[str, Any]
) -> None:
    make_late(monkeypatch)
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases("llama")
    with case.language_model(0.9, micro_batches=3, order=order, **more) as lm:
        assert lm.plan.prediction.streamed_nbytes > 0
        case.check(lm)


@pytest.mark.parametrize(("name", "micro_batches", "order", "tokens", "slots"), [
    at_length("llama", 1, "zigzag", 4, 3), ("llama", 3, "zigzag", 4, 2), at_length("llama", 5, "row", 2, 3),
    ("opt", 2, "zigzag", 16, 1), at_length("gpt2", 2, "zigzag", 4, 4), at_length("gemma2", 3, "zigzag", 4, 3),
    ("gemma2", 2, "row", 2, 3)])
def test_tokens_with_the_cache_on_disk(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, micro_batches: int, order: str,
    tokens: int, slots: int,
) -> None:
    """Chunks that end within blocks, the last one moved back; twice, as the second answer finds the first one's
    blocks."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    with case.language_model(3.0, micro_batches=micro_batches, order=order, cache_tier="disk", cache_tokens=tokens,
                             cache_slots=slots, prefill_chunk=6) as lm:
        kept = {b.name for b in lm.plan.buffers if b.kind == "cache" and b.arena == "device"}
        assert kept and all(name.startswith("tail_") for name in kept)
        case.check(lm)
        case.check(lm)


@pytest.mark.parametrize(("name", "micro_batches", "order", "tier", "shares", "slots"), [
    at_length("llama", 3, "zigzag", "host", (0.0, 0.0), 3), ("llama", 5, "row", "host", (0.5, 0.0), 2),
    at_length("llama", 3, "zigzag", "disk", (0.3, 0.3), 3), ("opt", 2, "zigzag", "disk", (0.0, 0.5), 1),
    ("opt", 5, "row", "disk", (0.4, 0.3), 4), ("gpt2", 2, "zigzag", "disk", (1.0, 0.0), 2),
    at_length("gpt2", 3, "row", "disk", (0.0, 1.0), 3), ("gemma2", 3, "zigzag", "disk", (0.4, 0.4), 3),
    at_length("llama", 3, "zigzag", "host", (0.3, 0.4), 3)])
def test_tokens_with_caches_in_shares(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, micro_batches: int, order: str,
    tier: str, shares: tuple[float, float], slots: int,
) -> None:
    """As many caches on each tier as was asked for, whole ones of a layer and micro-batch; answers twice. The plan is
    one that could be replayed."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    with case.language_model(3.0, micro_batches=micro_batches, order=order, cache_tier=tier, cache_tokens=4,
                             cache_slots=slots, cache_shares=shares, prefill_chunk=6) as lm:
        validate(lm.plan)
        layers = len(case.opened[0].states)
        homes = [home for of_layer in lm.plan.schedule.batching.cache_homes(layers) for home in of_layer]
        wanted = {"device": int(shares[0] * len(homes)), "host": int(shares[1] * len(homes))}
        wanted[tier] = wanted.get(tier, 0) + len(homes) - sum(wanted.values())
        assert {t: homes.count(t) for t in wanted} == wanted
        held = {tier: sum(b.nbytes for b in lm.plan.buffers if b.kind == "cache" and b.name.endswith(tier))
                for tier in wanted}
        assert {t: n * len(homes) for t, n in held.items()} == {t: n * sum(held.values()) for t, n in wanted.items()}
        assert {b.arena for b in lm.plan.buffers if b.kind == "cache" and b.name.endswith("_host")} <= {"host"}
        case.check(lm)
        case.check(lm)


@pytest.mark.parametrize(("name", "micro_batches", "order", "more"), [
    at_length("llama", 3, "zigzag", ATTENDED), ("llama", 1, "zigzag", ATTENDED),
    at_length("opt", 5, "zigzag", ATTENDED),
    ("opt", 3, "row", SHARED | {"cpu_attention": True}), ("gpt2", 2, "zigzag", ATTENDED | {"cache_shares": (0.5, 0.0)}),
    ("gemma2", 3, "zigzag", SHARED | {"cpu_attention": True}), ("llama", 3, "zigzag", ATTENDED | {"admitted": 2})])
def test_tokens_where_the_host_attends(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, micro_batches: int, order: str,
    more: dict[str, Any],
) -> None:
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    with case.language_model(3.0, micro_batches=micro_batches, order=order, **more) as lm:
        step = lm.steps.program(1).step
        assert any(isinstance(item, Launch) and item.stream == ATTEND for item in step)
        case.check(lm)
        case.check(lm)


def test_what_the_host_attends_with_is_counted_there(cases: Callable[[str], Case]) -> None:
    """Beside the device's own workspace, which is smaller by it where all caches lie in host memory."""
    case = cases("llama")
    with case.language_model(3.0, micro_batches=3, **ATTENDED) as lm, case.language_model(
            3.0, micro_batches=3, **HOST) as elsewhere:
        plan, program = lm.plan, lm.steps.program(1)
        there = max(i.workspace_nbytes for i in program.step if isinstance(i, Launch) and i.stream == ATTEND)
        here = max(i.workspace_nbytes for i in program.step if isinstance(i, Launch) and i.stream != ATTEND)
        assert program.workspace_nbytes("host") == there > 0 and program.workspace_nbytes() == here
        assert plan.prediction.peak_nbytes["host"] == plan.arenas["host"] + there
        assert elsewhere.steps.program(1).workspace_nbytes() == max(here, there)
    least, options = plan.prediction.peak_nbytes["host"], Options(micro_batches=3, **ATTENDED)  # type: ignore[arg-type]
    for host, fits in ((least, True), (least - 1, False)):
        try:
            LanguageModel(*case.opened, Budget(3 * case.nbytes, host), Workload(COUNT, PROMPT, NEW), options)
        except PlanError as error:
            assert not fits and "budget.host" in str(error)
        else:
            assert fits


def test_host_memory_that_cannot_hold_its_share_is_named(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    with pytest.raises(PlanError, match=r"budget.host: 1000 B cannot hold the .*of cache that are to lie in host"):
        LanguageModel(*case.opened, Budget(3 * case.nbytes, 1000), Workload(COUNT, PROMPT, NEW),
                      Options(cache_tier="host", micro_batches=2))
    with pytest.raises(PlanError, match=r"cache_shares: 0.7 on the device and 0.4 in host memory"):
        case.language_model(3.0, micro_batches=2, **DISK, cache_shares=(0.7, 0.4))
    with case.language_model(3.0, micro_batches=2, **SHARED) as lm:
        plan = lm.plan
    edited = with_settings(plan, cache={"on_host": 99})
    with pytest.raises(PlanError, match=r"cache.on_device, on_host: 100 cannot lie on faster tiers; 3 layers of 2"):
        LanguageModel(*case.opened, Budget(edited.budget.device, HOST_NBYTES), edited.workload, Options(), plan=edited)


@pytest.mark.parametrize("cache", [at_length("kv8"), "kv4"])
def test_packed_rows_move_as_they_are(cases: Callable[[str], Case], cache: str) -> None:
    case = cases("llama")
    with case.language_model(3.0, cache=cache, prefill_chunk=6) as lm:
        expected = case.answer(lm)
    with case.language_model(3.0, cache=cache, micro_batches=2, cache_tier="disk", cache_tokens=64,
                             prefill_chunk=6) as lm:
        assert torch.equal(case.answer(lm), expected)
        file = sum(b.nbytes for b in lm.plan.buffers if b.arena == "cache")
    with case.language_model(3.0, cache=cache, micro_batches=2, cache_tier="host", cache_tokens=64,
                             prefill_chunk=6, cpu_attention=True) as lm:
        assert torch.equal(case.answer(lm), expected)
    with case.language_model(3.0, micro_batches=2, cache_tier="disk", cache_tokens=64) as lm:
        assert file < 0.5 * sum(b.nbytes for b in lm.plan.buffers if b.arena == "cache")


def test_a_step_loads_the_blocks_that_exist_and_stores_those_that_got_full(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, reader_log: Any
) -> None:
    """Bytes of every decode step, both ways, and none of them in the page cache's place: the weights are resident."""
    case, tokens = cases("llama"), 4
    written: list[int] = []
    made = spill_module.open_writer
    monkeypatch.setattr(spill_module, "open_writer", lambda *a: _CountingWriter(made(*a), written))
    marks: list[tuple[int, int]] = []
    with case.language_model(4.0, micro_batches=3, **DISK) as lm:
        assert lm.plan.prediction.streamed_nbytes == 0
        case.answer(lm, on_token=lambda column: marks.append((reader_log.slices, sum(written))))
        file = [b for b in lm.plan.buffers if b.arena == "cache"]
        blocks = lm.plan.schedule.batching.cache_blocks(lm.plan.workload.context)
        block_nbytes = file[0].nbytes // (6 * blocks)
    lengths = case.mask.sum(1).tolist()  # nothing moves for the slot that is left empty
    for step, (a, b) in enumerate(itertools.pairwise(marks)):
        starts = [length + step for length in lengths]
        assert b[0] - a[0] >= len(file) * block_nbytes * sum(start // tokens for start in starts)
        begun = sum(start % tokens > 0 for start in starts) if step == 0 else 0  # whose tails chunks had moved on
        assert b[0] - a[0] <= len(file) * block_nbytes * (sum(start // tokens for start in starts) + begun)
        full = sum((start + 1) % tokens == 0 for start in starts)
        assert b[1] - a[1] == len(file) * block_nbytes * full
    assert marks[-1][0] - marks[0][0] > 0 and marks[-1][1] > marks[0][1]


class _CountingWriter:
    def __init__(self, writer: Any, written: list[int]) -> None:
        self.writer, self.written = writer, written

    def write(self, file: Any, write: Any) -> None:
        self.written.append(write.nbytes)
        self.writer.write(file, write)

    def close(self) -> None:
        self.writer.close()


@pytest.mark.all
def test_more_sequences_than_the_device_could_cache(cases: Callable[[str], Case]) -> None:
    """A budget that holds a fraction of the cache, whichever way it is laid out: the planner puts it on disk."""
    case = cases("llama")
    count, length, new = 24, 100, 20
    ids = torch.randint(3, 997, (count, length), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = case.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                                       pad_token_id=0, eos_token_id=None)
    workload = Workload(count, length, new)
    with LanguageModel(*case.opened, Budget(1 << 30), workload, Options()) as lm:
        whole = sum(b.nbytes for b in lm.plan.buffers_of("decode") if b.kind == "cache")
    budget = Budget(int(0.75 * whole) + operators_nbytes(case.opened, workload, Options(prefill_chunk=1)))
    with pytest.raises(PlanError, match="cannot work for batch 24"):
        LanguageModel(*case.opened, budget, workload, Options(cache_tier="device"))
    with LanguageModel(*case.opened, budget, workload, Options()) as lm:
        batching = lm.plan.schedule.batching
        assert batching.cache.tier == "disk" and batching.micro_batches.count > 1
        others = [Options(cache_tier="disk", micro_batches=count) for count in (2, 6, 24)]
        for other in others:  # none of those that work is predicted to be faster
            try:
                with LanguageModel(*case.opened, budget, workload, other) as forced:
                    assert latency_s(lm.plan) <= 1.000001 * latency_s(forced.plan)
            except PlanError:
                continue
        assert sum(lm.plan.arenas.values()) <= budget.device
        ours = lm.generate(ids, max_new_tokens=new, pad_token_id=0, eos_token_id=None)
        assert_same_tokens(ours, expected, torch.ones_like(ids), case.model, lm.next_logits)


def test_rows_on_disk_cannot_change_places(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    with case.language_model(3.0, **DISK) as lm, lm.running(2, PROMPT, 1) as session:
        rows = SequenceRows(session, lm.captured.states)
        rows.begin([torch.tensor([3, 4]), torch.tensor([5])])
        rows.reorder(torch.tensor([0, 1]))
        with pytest.raises(RuntimeFault, match=r"keep the cache on the device \(wrap"):
            rows.reorder(torch.tensor([1, 0]))


@pytest.mark.parametrize(("change", "message"), [
    (dict(slots=0), "slots and block_tokens of at least 1"),
    (dict(tier="device"), "cache.slots: 3 is for a cache on a tier further off"),
    (dict(slots=9), "cache3 needs a slot buffer"), (dict(slots=2), r"no step needs a buffer cache2"),
    (dict(block_tokens=64), r"cache0 needs a slot buffer .*the plan's nbytes is"),
])
def test_an_edited_staging_is_obeyed_or_refused(cases: Callable[[str], Case], change: dict, message: str) -> None:
    case = cases("llama")
    with case.language_model(3.0, **DISK) as lm:
        plan = lm.plan
    edited = with_settings(plan, cache=change)
    with pytest.raises(PlanError, match=message):
        again = plan_from_dict(json.loads(edited.to_json()))
        LanguageModel(*case.opened, Budget(again.budget.device), again.workload, Options(), plan=again)
    fewer = replace(with_settings(plan, cache={"slots": 2}),
                    buffers=tuple(b for b in plan.buffers if b.name != "cache2"), prediction=Prediction())
    with LanguageModel(*case.opened, Budget(fewer.budget.device), fewer.workload, Options(), plan=fewer) as lm:
        used = {i.dst.buffer.partition(":")[0] for i in lm.steps.program(1).step
                if isinstance(i, Copy) and i.stream == LOAD}
        assert used == {"cache0", "cache1"}
        case.check(lm)


def test_a_saved_block_runs_again_and_an_edited_one_is_obeyed(cases: Callable[[str], Case], tmp_path: Path) -> None:
    case = cases("llama")
    with case.language_model(0.8, micro_batches=5) as lm:
        plan = lm.plan
        plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    with LanguageModel(*case.opened, Budget(plan.budget.device), plan.workload, Options(), plan=plan) as lm:
        assert lm.plan.schedule.batching == plan.schedule.batching
        case.check(lm)
        step = lm.steps.pipeline.program(plan, 1).step
        fetches = sum(isinstance(i, Copy) and isinstance(i.src, FileSlice) for i in step)
    kept = tuple(b for b in plan.buffers if b.phase == "all" or b.kind == "cache")
    row = replace(with_settings(plan, micro_batches={"order": "row"}), buffers=kept,
                  prediction=Prediction())  # what another order makes other is left out, and planned
    with LanguageModel(*case.opened, Budget(row.budget.device), row.workload, Options(), plan=row) as lm:
        program = lm.steps.program(1)
        again = sum(isinstance(i, Copy) and isinstance(i.src, FileSlice) for i in program.step)
    assert again > 3 * fetches
    with pytest.raises(PlanError, match=r"micro_batches\.count: 4 do not divide a batch of 5"):
        edited = with_settings(plan, micro_batches={"count": 4})
        plan_from_dict(json.loads(edited.to_json()))


def test_too_few_slots_for_a_layer_are_refused(cases: Callable[[str], Case]) -> None:
    with pytest.raises(PlanError, match=r"slots=2 cannot work within .*left to the planner"):
        cases("llama").language_model(0.8, micro_batches=2, slots=2)


def test_shares_that_no_budget_of_the_device_holds_are_refused_with_what_they_need(
    cases: Callable[[str], Case]
) -> None:
    """Also where the same block without shares would fit."""
    options = SHARED | {"cache_shares": (1.0, 0.0)}
    with cases("llama").language_model(0.9, micro_batches=2, **DISK):
        pass
    with pytest.raises(PlanError, match=r"cannot work for batch 6.*the smallest that can is") as refused:
        cases("llama").language_model(0.2, micro_batches=2, **options)
    parts = re.findall(r"([a-z]+) (-?[\d.]+) [KM]?i?B[,)]", str(refused.value))
    assert {"cache", "activation", "workspace"} <= {name for name, _ in parts}
    assert all(float(size) >= 0 for _, size in parts)
