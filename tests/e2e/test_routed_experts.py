"""Experts that are read by name: the tokens of transformers from any number of slots, and no byte more than is missing.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import at_length
from small_experts import SMALL, Saved, saved_once, small

import forebay
from forebay.kernels.formats.slot_state import SlotState
from forebay.kernels.operator import Call, Use
from forebay.kernels.operators import ASSIGN_SLOTS
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import Copy, FileSlice, Launch, Program, Rows, Span, Wait
from forebay.rewriter.ir.schedule.routed_fetch import POOL
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.missed_experts import CASES, by_missed_experts
from forebay.rewriter.predict.simulate import simulate
from forebay.rewriter.report.explain import explain_plan
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices import lookups
from forebay.runtime.devices.streams import CopyLedger

pytestmark = pytest.mark.filterwarnings("ignore:OpenMP threads spin")
EXPERTS = SMALL["num_experts"]
PROMPT, NEW = 7, 12
BUDGETS = {"granitemoe": "2MiB", "mixtral": "2MiB", "glm4_moe": "720KiB"}  # of which tables stream


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family's model in a folder of several files, and in memory."""
    return saved_once(tmp_path_factory, small, max_shard_size="150KB")


def wrapped(folder: Path, slots: int | None, batch: int = 3, device: str = "900KiB", **options: Any) -> Any:
    budget = {"device": device, "host": 0, "disk": folder}
    sizes: dict[str, Any] = {"batch": batch, "experts_ahead": 0} | options
    return forebay.wrap(folder, budget, prompt=PROMPT, new_tokens=NEW, expert_slots=slots, **sizes)


def prompts(batch: int = 3) -> dict[str, torch.Tensor]:
    """Prompts of unequal length."""
    ids = torch.randint(3, 128, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for i in range(batch - 1):
        mask[i, : 3 - i] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens(model: Any, **given: torch.Tensor) -> torch.Tensor:
    return model.generate(**given, max_new_tokens=NEW, do_sample=False)  # type: ignore[no-any-return]


def pools(plan: Plan) -> list[int]:
    return [w.pool_slots for w in plan.weights if w.name.endswith("experts.table")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [1, 4, 7])  # of 8; in rounds of one expert, and all that a step names in one round
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", at_length("glm4_moe"), at_length("mixtral")])
def test_same_tokens_as_transformers(saved: Saved, family: str, slots: int) -> None:
    folder, model = saved(family)
    with wrapped(folder, slots, device=BUDGETS.get(family, "900KiB")) as lm:
        assert set(pools(lm.plan)) == {slots}
        for _ in range(2):  # pools keep what they hold from call to call
            assert torch.equal(tokens(lm, **prompts()), tokens(model, **prompts()))


@pytest.mark.parametrize("options", [
    {"prefill_chunk": 2}, {"prefill_chunk": 1}, {"prompt_lookup_num_tokens": 3}, {"cache": "kv8"}, {"batch_slots": 2},
    {"cache_tier": "disk", "cache_tokens": 4}], ids=lambda options: " ".join(options))
def test_it_composes(saved: Saved, options: dict[str, Any]) -> None:
    folder, model = saved("qwen3_moe")
    sizes = {"batch": None} if "batch_slots" in options else {}
    with wrapped(folder, 3, **options, **sizes, experts_ahead=2) as lm:
        assert set(pools(lm.plan)) == {3} and lm.plan.schedule.routed.ahead == 2
        assert torch.equal(tokens(lm, **prompts()), tokens(model, **prompts()))


def least(folder: Path, slots: int) -> str:
    """The smallest budget that works with so many slots."""
    with pytest.raises(PlanError, match="the smallest that can is") as refused:
        wrapped(folder, slots, device="1KiB")
    return re.search(r"\((\d+) bytes", str(refused.value))[1]  # type: ignore[index]


def test_packed_experts(saved: Saved, tmp_path: Path) -> None:
    folder = tmp_path / "w4"
    quantize_model(saved("qwen3_moe")[0], folder, Wish("w4g32"))
    made = []
    for slots in (0, 2, 6):  # whole tables, in three rounds, in one
        with wrapped(folder, slots, device=least(folder, slots)) as lm:
            assert set(pools(lm.plan)) == {slots}
            made.append(tokens(lm, **prompts()))
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_micro_batches_stream_whole_tables(saved: Saved) -> None:
    folder, model = saved("qwen3_moe")
    with wrapped(folder, None, 4, micro_batches=2, cache_tier="disk") as lm:
        assert set(pools(lm.plan)) == {0}
        assert torch.equal(tokens(lm, **prompts(4)), tokens(model, **prompts(4)))
    with pytest.raises(PlanError, match="expert_slots"):
        wrapped(folder, 3, 4, micro_batches=2, cache_tier="disk").plan  # noqa: B018


def watch_routing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, SlotState, set[int]]]:
    """What each step named of each pool, as it runs: the address of what is known of it, its sizes, and the experts."""
    found: list[tuple[int, SlotState, set[int]]] = []
    bind = ASSIGN_SLOTS.bind["cpu"]

    def bound(use: Use) -> Call:
        index, state, _, *sizes = use.args
        call = bind(use)

        def run() -> None:
            found.append((state.data_ptr(), SlotState(*sizes[:5]), {*index.flatten().tolist()}))
            call()

        return run

    monkeypatch.setitem(ASSIGN_SLOTS.bind, "cpu", bound)  # type: ignore[arg-type]
    return found


def test_experts_lie_in_memory_as_in_pages_of_their_files(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So direct reads land in place, from whichever shard: those into slots of pools, and tiles of whole tables."""
    folder = Path(shutil.copytree(saved("qwen3_moe")[0], tmp_path / "padded"))
    for number, shard in enumerate(sorted(folder.glob("*.safetensors"))):
        whole = shard.read_bytes()
        size = struct.unpack("<Q", whole[:8])[0] + 8
        header = whole[8:size] + b" " * 8 * number
        shard.write_bytes(struct.pack("<Q", len(header)) + header + whole[size:])
    submit, seen = lookups.submit_slice, list[tuple[FileSlice, int]]()

    def submitted(reader: Any, src: FileSlice, address: int, *more: Any) -> None:
        seen.append((src, address))
        submit(reader, src, address, *more)

    monkeypatch.setattr(lookups, "submit_slice", submitted)
    with wrapped(folder, 5) as lm:
        tokens(lm, **prompts())
        prefill = lm.steps.program(lm.plan.schedule.prefill_chunk)
    tiles = [(i.src, i.dst.offset) for i in prefill.step if isinstance(i, Copy) and isinstance(i.src, FileSlice)
             and isinstance(i.dst, Span) and "experts.table" in i.label]
    assert len({src.page_offset for src, _ in seen}) > 2 and tiles
    for src, address in seen + tiles:
        assert address % PAGE_NBYTES == src.page_offset, src


def test_predicted_bytes_are_those_of_a_router_that_prefers_nobody(saved: Saved) -> None:
    folder, _ = saved("qwen3_moe")
    with wrapped(folder, 4, 3) as lm:
        program, entry = lm.steps.program(1), 3 * 64 * 32 * 4
        named = EXPERTS * (1 - (1 - 2 / EXPERTS) ** 3)
        assert lm.plan.schedule.routed.hit_rate == 4 / EXPERTS
        assert "assumed: 50 % are there, if the router picks all equally often" in explain_plan(lm.plan)
        assert lm.plan.prediction.streamed_nbytes == program.moved_nbytes() == round(3 * named * 0.5 * entry)


@pytest.mark.parametrize(("slots", "batch", "ahead"), [(6, 1, 0), (6, 3, 0), (3, 3, 0), (1, 1, 0), (4, 3, 2)])
def test_predicted_steps_are_means_over_what_layers_may_miss(saved: Saved, slots: int, batch: int, ahead: int) -> None:
    """In each case all that is named is either there or comes, and on average as much comes as is planned."""
    folder, _ = saved("qwen3_moe")
    with wrapped(folder, slots, batch, experts_ahead=ahead) as lm:
        program = lm.steps.program(1)
        assert lm.plan.prediction.streamed_nbytes == program.moved_nbytes()
    cases = by_missed_experts(program)
    assert len(cases) == CASES
    planned, *read = (sum(copy.src.typical * copy.src.nbytes for copy in fetches(each))  # type: ignore[union-attr]
                      for each in (program, *cases))
    assert read == sorted(read) and read[0] < read[-1] and sum(read) / CASES == pytest.approx(planned)
    for each in cases:
        shares = [i.kwargs["share"] for i in each.step if isinstance(i, Launch) and "entries" in i.kwargs]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) == pytest.approx(3)  # of three layers each has all that it names


def test_predicted_times_are_those_of_layers_that_miss_different_numbers(saved: Saved) -> None:
    """Of two experts a layer misses none, one or both, each read in a round of its own: the mean by the probability of
    each is longer than the time of the mean, as what is read while others are computed costs next to nothing."""
    folder, _ = saved("qwen3_moe")
    with wrapped(folder, 6, 1) as lm:
        program, default = lm.steps.program(1), Machine.default()
    links = tuple(replace(link, bandwidth_bytes_per_s=1e9, latency_s=0.0) for link in default.links)
    machine = replace(default, links=links, memory_bytes_per_s=5e8, dispatch_s=0.0, copy_issue_s=0.0, gemm=())

    def with_missing(count: int) -> Program:
        rounds = {i.kwargs["entries"].offset for i in program.step if isinstance(i, Launch) and "entries" in i.kwargs}
        of_round, step, copies = (1 - count / 2, min(1, count) / 2, max(0, count - 1) / 2), [], 0
        numbers = {at: n % 3 for n, at in enumerate(sorted(rounds))}
        for item in program.step:
            if isinstance(item, Launch) and "entries" in item.kwargs:
                share = of_round[numbers[item.kwargs["entries"].offset]]
                item = replace(item, kwargs={**item.kwargs, "share": share})
            elif isinstance(item, Copy) and isinstance(item.src, Rows) and item.src.keeps:
                item = replace(item, src=replace(item.src, typical=of_round[1 + copies % 2] * 2 / 6))
                copies += 1
            step.append(item)
        return replace(program, step=tuple(i for i in step if getattr(i, "op", "") != ASSIGN_SLOTS.name))

    times = [simulate(with_missing(count), machine).time_s for count in range(3)]
    exact = sum(share * time_s for share, time_s in zip((0.75**2, 2 * 0.75 * 0.25, 0.25**2), times, strict=True))
    mean = simulate(replace(program, step=tuple(
        i for i in program.step if getattr(i, "op", "") != ASSIGN_SLOTS.name)), machine).time_s
    assert simulate(program, machine).time_s == pytest.approx(exact, rel=0.02)
    assert mean < 0.97 * exact


def fetches(program: Program) -> list[Copy]:
    return [i for i in program.step if isinstance(i, Copy) and isinstance(i.src, Rows) and i.src.keeps]


def each_without_a_wait(program: Program) -> Iterator[Program]:
    for i, item in enumerate(program.step):
        if isinstance(item, Wait):
            yield replace(program, step=program.step[:i] + program.step[i + 1 :])


@pytest.mark.parametrize(("batch", "slots", "ahead", "copies", "waits"), [
    (3, 6, 0, 3, 12), (3, 4, 0, 3, 18), (3, 2, 0, 6, 36), (3, 1, 0, 6, 36), (1, 6, 0, 2, 9), (3, 6, 2, 4, 16),
    (3, 4, 2, 4, 22)])
def test_no_wait_may_be_missing(saved: Saved, batch: int, slots: int, ahead: int, copies: int, waits: int) -> None:
    """In rounds that are all read at once, and in those that share slots; also for what is read ahead."""
    folder, _ = saved("qwen3_moe")
    with wrapped(folder, slots, batch, experts_ahead=ahead) as lm:
        program = lm.steps.program(1)
    assert len(fetches(program)) == 3 * copies
    faulty = list(each_without_a_wait(program))
    assert len(faulty) >= waits
    for each in faulty:
        with pytest.raises(ProgramError):
            verify_program(each)


@pytest.mark.parametrize(("slots", "ahead"), [(6, 0), (4, 0), (4, 2)])
def test_copies_leave_to_others_no_more_than_they_were_told(saved: Saved, slots: int, ahead: int) -> None:
    folder, _ = saved("qwen3_moe")
    with wrapped(folder, slots, 3, experts_ahead=ahead) as lm:
        program = lm.steps.program(1)
    at = [i for i, item in enumerate(program.step) if isinstance(item, Copy) and isinstance(item.src, Rows)
          and item.src.spares]
    assert len(at) == 9
    for i in at[:3]:
        copy: Any = program.step[i]
        spares = copy.src.spares
        entries = [item.kwargs["entries"] for item in program.step if isinstance(item, Launch)
                   and "entries" in item.kwargs and item.kwargs["entries"].buffer == copy.src.index.buffer]
        others = [(*spares, each) for each in entries if each not in spares]
        for each in ([spares[:n] + spares[n + 1 :] for n in range(len(spares))] + others):
            faulty = replace(copy, src=replace(copy.src, spares=each))
            with pytest.raises(ProgramError):
                verify_program(replace(program, step=(*program.step[:i], faulty, *program.step[i + 1 :])))
        faulty = replace(program, step=tuple(item for item in program.step if not (
            isinstance(item, Launch) and item.label.endswith("_assign") and item.layer == copy.layer)))
        with pytest.raises(ProgramError, match="that may be its own"):
            verify_program(faulty)


def test_experts_that_are_there_are_computed_before_others_come(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slot into which a copy is issued holds NaN from then on, and what comes is held back until somebody waits:
    so who reads such a slot earlier, or another one too early, gives NaN."""
    folder, model = saved("qwen3_moe")
    routing = watch_routing(monkeypatch)
    held, wait = list[Any](), CopyLedger.wait

    def submitted(reader: Any, src: FileSlice, address: int, room: Any, done: Any) -> None:
        ctypes.memset(address, 0xFF, src.nbytes)
        held.append(partial(submit, reader, src, address, room, done))

    def waited(self: CopyLedger, mark: int) -> None:
        while held:
            held.pop(0)()
        wait(self, mark)

    submit = lookups.submit_slice
    monkeypatch.setattr(lookups, "submit_slice", submitted)
    monkeypatch.setattr(CopyLedger, "wait", waited)
    for slots, batch, ahead in ((6, 3, 0), (4, 3, 0), (5, 1, 0), (4, 3, 3)):
        with wrapped(folder, slots, batch, experts_ahead=ahead) as lm:
            assert torch.equal(tokens(lm, **prompts(batch)), tokens(model, **prompts(batch)))
    assert any(named for _, _, named in routing)


def test_what_is_kept_must_be_there(saved: Saved) -> None:
    """A pool whose contents end before a step brings what is missing would be read with whatever lay there."""
    folder, _ = saved("qwen3_moe")
    with wrapped(folder, 6, 3) as lm:
        program = lm.steps.program(1)
    resident = {name: span for name, span in program.resident.items() if not name.endswith(POOL)}
    with pytest.raises(ProgramError, match="which holds nothing by then"):
        verify_program(replace(program, resident=resident))


def logits(model: Any) -> torch.Tensor:
    """Those of each step of a prompt's answer."""
    made = model.generate(prompts(1)["input_ids"], max_new_tokens=NEW, do_sample=False, output_logits=True,
                          return_dict_in_generate=True)
    return torch.stack([each.float() for each in made.logits])


def test_experts_in_wrong_slots_are_seen(saved: Saved) -> None:
    folder, model = saved("qwen3_moe")
    with wrapped(folder, 5, 1) as lm:
        want = logits(lm)
        assert torch.allclose(want, logits(model), atol=1e-4) and torch.equal(logits(lm), want)
        (b,) = [b for b in lm.plan.buffers if b.name == "model.layers.1.mlp.experts.table" + POOL]
        memory = lm._session.device.arenas["device"].bytes[b.offset : b.offset + b.nbytes].view(5, -1)
        memory.copy_(memory.roll(1, 0))
        assert (logits(lm) - want).norm() > 1e-3


def test_an_interrupted_step_leaves_no_wrong_expert(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that ends between what says which experts come and their coming is not taken to have brought them."""
    folder, model = saved("qwen3_moe")
    bind, left = ASSIGN_SLOTS.bind["cpu"], [9]

    def bound(use: Use) -> Call:
        call = bind(use)

        def run() -> None:
            call()
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        return run

    monkeypatch.setitem(ASSIGN_SLOTS.bind, "cpu", bound)  # type: ignore[arg-type]
    with wrapped(folder, 5, 1) as lm:
        with pytest.raises(KeyboardInterrupt):
            logits(lm)
        assert torch.allclose(logits(lm), logits(model), atol=1e-4)
