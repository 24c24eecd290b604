"""`generate` on tiny checkpoints: Hugging Face's meaning, every budget and switch, and clear refusals."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from e2e.agreement import assert_same_tokens
from selection import at_length

import forebay.language_model as model_module
import forebay.rewriter.pipeline.plan_task as plan_task
from forebay.api import wrap
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import PlanError, load_plan
from forebay.rewriter.ir.program import LOOKUP, UNORDERED, UPLOAD, Copy, Rows, Span
from forebay.rewriter.planning.options import Options
from forebay.rewriter.verify.program import verify_program
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.disk.open_file import TruncatedFileError
from forebay.runtime.run.step_inputs import StepInputs


def answer(lm: LanguageModel, checkpoint: Any, **options: Any) -> torch.Tensor:
    settings = dict(max_new_tokens=8, pad_token_id=0, eos_token_id=None) | options
    return lm.generate(checkpoint.ids, attention_mask=checkpoint.mask, **settings)


def check(lm: LanguageModel, checkpoint: Any) -> None:
    assert_same_tokens(answer(lm, checkpoint), checkpoint.expected, checkpoint.mask, checkpoint.model, lm.next_logits)


# -- offloading is real, and right


def test_bytes_read_are_the_bytes_planned(llama_checkpoint: Any, reader_log: Any) -> None:
    with llama_checkpoint.language_model(0.5, slots=2) as lm:
        marks: list[tuple[int, int]] = []
        answer(lm, llama_checkpoint, on_token=lambda column: marks.append((reader_log.slices, reader_log.rows)))
        per_step = [b[0] - a[0] for a, b in itertools.pairwise(marks)]
        planned = lm.plan.prediction.streamed_nbytes
        assert planned > 0.4 * llama_checkpoint.nbytes
        assert per_step == [planned] * 7
        gathered = [w for w in lm.plan.weights if w.gather]
        rows = [b[1] - a[1] for a, b in itertools.pairwise(marks)]
        assert rows == [3 * sum(96 * 4 for _ in gathered)] * 7, "one row per sequence"


def test_a_model_that_fits_reads_each_weight_once(llama_checkpoint: Any, reader_log: Any) -> None:
    with llama_checkpoint.language_model(1.5) as lm:
        check(lm, llama_checkpoint)
        assert reader_log.slices == llama_checkpoint.nbytes and reader_log.rows == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_three_layers_at_every_depth(llama_checkpoint: Any, slots: int) -> None:
    with llama_checkpoint.language_model(0.35, slots=slots) as lm:
        assert lm.plan.schedule.slots == slots and lm.plan.prediction.streamed_nbytes > 0
        check(lm, llama_checkpoint)


def test_a_tied_weight_is_one_weight(tied_checkpoint: Any, reader_log: Any) -> None:
    """Resident it is held once; streamed, its product reads it once and its lookup only the rows it needs."""
    with tied_checkpoint.language_model(1.5) as lm:
        assert sum(w.nbytes for w in lm.plan.weights) == tied_checkpoint.nbytes
        check(lm, tied_checkpoint)
        assert reader_log.slices == tied_checkpoint.nbytes
    with tied_checkpoint.language_model(0.4, slots=2) as lm:
        table = max(lm.plan.weights, key=lambda w: w.nbytes)
        assert table.tier == "disk" and table.gather and table.tile_rows
        assert lm.plan.prediction.streamed_nbytes <= tied_checkpoint.nbytes
        check(lm, tied_checkpoint)


def test_prefill_in_chunks_of_three(llama_checkpoint: Any) -> None:
    with llama_checkpoint.language_model(0.5, prefill_chunk=3) as lm:
        assert lm.plan.schedule.prefill_chunk == 3
        check(lm, llama_checkpoint)


def test_constants_are_real_and_not_on_meta(llama_checkpoint: Any) -> None:
    """Rotary frequencies are in no checkpoint: a non-persistent buffer, carried in the arena."""
    with llama_checkpoint.language_model(0.5) as lm:
        assert lm.captured.constants and all(t.device.type == "cpu" for t in lm.captured.constants.values())
        placed = {b.name for b in lm.plan.buffers if b.kind == "constant"}
        assert placed == set(lm.captured.constants)
        check(lm, llama_checkpoint)


def test_another_budget_captures_nothing_anew(llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_checkpoint.opened  # noqa: B018
    monkeypatch.setattr("forebay.rewriter.capture.language_model.capture_model",
                        lambda *a, **k: pytest.fail("captured again"))
    for share in (0.4, 0.9):
        with llama_checkpoint.language_model(share, batch=1, prompt=2, new_tokens=2) as lm:
            check(lm, llama_checkpoint)  # and a larger workload plans again


@pytest.mark.parametrize("skip", ["", "hoist_prefetch"])
def test_steps_of_every_size_hand_each_other_the_same_copies(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, skip: str
) -> None:
    """Prefill leaves copies in flight that decoding waits for: same bytes, same slots, same events."""
    monkeypatch.setenv("FOREBAY_SKIP", skip)
    with llama_checkpoint.language_model(0.6, slots=3, prompt=40, prefill_chunk=32) as lm:
        programs = [lm.steps.program(tokens) for tokens in (1, *lm.plan.schedule.prefill_chunks)]
        assert len(programs) > 2
        assert len(programs[0].prologue) == (0 if skip else 6)
        assert all(p.prologue == programs[0].prologue for p in programs[1:])
        assert len({p.streamed_nbytes() for p in programs}) == 1


# -- switches


@pytest.mark.parametrize("switch", [
    at_length({"FOREBAY_POISON": "1"}), at_length({"FOREBAY_SYNC": "1"}), {"FOREBAY_NO_REUSE": "1"},
    at_length({"FOREBAY_SKIP": "hoist_prefetch"}),
    {"FOREBAY_SKIP": "hoist_prefetch,fuse_residual", "FOREBAY_POISON": "1", "FOREBAY_SYNC": "1"},
    {"FOREBAY_BISECT": "1"}, {"FOREBAY_VERIFY": "0"},
])
def test_same_tokens_under_every_switch(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, switch: dict[str, str]
) -> None:
    for name, value in switch.items():
        monkeypatch.setenv(name, value)
    with llama_checkpoint.captured_anew().language_model(0.5, slots=2) as lm:
        assert lm.plan.prediction.streamed_nbytes > 0
        check(lm, llama_checkpoint)


def test_dump_holds_both_phases(llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREBAY_DUMP", str(tmp_path))
    with llama_checkpoint.captured_anew().language_model(0.5) as lm:
        assert {p.name for p in tmp_path.iterdir()} == {"captured", "1_tokens", "10_tokens", "plan.json"}
        assert load_plan(tmp_path / "plan.json") == lm.plan


def test_trace_holds_planned_and_actual(llama_checkpoint: Any, tmp_path: Path) -> None:
    with llama_checkpoint.language_model(0.5) as lm:
        with pytest.raises(RuntimeError, match="start_trace"):
            lm.save_trace(tmp_path / "trace.json")
        lm.start_trace()
        check(lm, llama_checkpoint)
        lm.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(1, "compute"), (1, "disk"), (2, "compute"), (2, "disk")} <= lanes


# -- the host tier


def test_host_memory_takes_what_the_device_cannot(llama_checkpoint: Any, reader_log: Any) -> None:
    with llama_checkpoint.language_model(0.4, host=llama_checkpoint.nbytes // 3, slots=2) as lm:
        assert 0 < lm.plan.nbytes_on("host") <= llama_checkpoint.nbytes // 3 and lm.plan.nbytes_on("disk") > 0
        program = lm.steps.program(1)
        uploaded = sum(i.dst.nbytes for i in program.step if isinstance(i, Copy) and i.stream == UPLOAD)
        assert uploaded == lm.plan.nbytes_on("host")
        assert lm.plan.prediction.streamed_nbytes == program.streamed_nbytes() + uploaded
        marks: list[int] = []
        answer(lm, llama_checkpoint, on_token=lambda column: marks.append(reader_log.slices))
        assert {b - a for a, b in itertools.pairwise(marks)} == {program.streamed_nbytes()}
        check(lm, llama_checkpoint)


@pytest.mark.parametrize(("slots", "host"), [
    at_length(1, 0), (2, 600_000), (3, 0), at_length(1, 600_000)])
def test_the_program_of_a_gpu_computes_the_same_here(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, slots: int, host: int
) -> None:
    """Disk to pinned host slots to the device, rows of lookups too: the Program that a GPU runs, proved and run."""
    source = plan_task.step_graphs
    monkeypatch.setattr(plan_task, "step_graphs", lambda *a, **k: source(*a, **k | {"host_hop": True}))
    with llama_checkpoint.language_model(0.4, host=host, slots=slots) as lm:
        assert lm.plan.schedule.host_hop and lm.plan.schedule.slots == slots
        assert (lm.plan.nbytes_on("host") > 0) is (host > 0) and lm.plan.nbytes_on("disk") > 0
        for tokens in (1, 10):
            program = lm.steps.program(tokens)
            verify_program(program, {"device": lm.plan.budget.device, "host": host or None})
            from_disk = [i for i in (*program.prologue, *program.step) if isinstance(i, Copy) and i.stream in UNORDERED]
            assert from_disk and all(i.dst.arena == "host" for i in from_disk)
            assert any(isinstance(i.src, Rows) for i in from_disk)
        check(lm, llama_checkpoint)


@pytest.mark.parametrize("hop", [True, False])
def test_rows_of_a_lookup_come_from_host_memory_that_has_room(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, hop: bool
) -> None:
    """No byte is read from the disk then; a row that the table lacks is refused by name."""
    source = plan_task.step_graphs
    monkeypatch.setattr(plan_task, "step_graphs", lambda *a, **k: source(*a, **k | {"host_hop": hop}))
    with llama_checkpoint.language_model(0.4, host=4 * llama_checkpoint.nbytes, slots=2) as lm:
        assert lm.plan.nbytes_on("disk") == 0 and any(w.gather and w.tier == "host" for w in lm.plan.weights)
        for tokens in (1, 10):
            program = lm.steps.program(tokens)
            verify_program(program, {"device": lm.plan.budget.device, "host": lm.plan.budget.host})
            looked_up = [i for i in program.step if isinstance(i, Copy) and i.stream == LOOKUP]
            assert looked_up and all(isinstance(i.src, Rows) and isinstance(i.src.table, Span) for i in looked_up)
            assert {i.dst.arena for i in looked_up} == {"host" if hop else "device"}
        check(lm, llama_checkpoint)
        zeros = torch.zeros(3, dtype=torch.int64)
        with pytest.raises(RuntimeFault, match=r"embed_tokens.*row 1000000 \(lowest 1000000\) of a table of"):
            lm.session.step(StepInputs(torch.full((3, 1), 10**6), zeros, zeros))


# -- generate's arguments


@pytest.fixture(scope="module")
def resident(llama_checkpoint: Any) -> Any:
    """A model that fits, for what does not depend on streaming."""
    with llama_checkpoint.language_model(2.0, batch=4, prompt=10, new_tokens=12) as lm:
        yield lm


def test_batch_smaller_than_the_plan_and_each_row_alone(resident: LanguageModel, llama_checkpoint: Any) -> None:
    plan = resident.plan
    for row in range(3):
        ids, mask = llama_checkpoint.ids[row : row + 1], llama_checkpoint.mask[row : row + 1]
        got = resident.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None)
        assert torch.equal(got, llama_checkpoint.expected[row : row + 1])
        bare = resident.generate(ids[:, mask[0].bool()], max_new_tokens=8, eos_token_id=None)
        assert torch.equal(bare[:, -8:], got[:, -8:]), "padding changes nothing"
    assert resident.plan is plan, "nothing was planned again"


def test_larger_requests_plan_again(llama_checkpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "forebay")
    with llama_checkpoint.language_model(1.5, batch=1, prompt=4, new_tokens=2) as lm:
        first = lm.plan
        lm.generate(llama_checkpoint.ids[2:, :4], max_new_tokens=2)
        assert lm.plan is first and "planning anew" not in caplog.text
        check(lm, llama_checkpoint)
        assert (lm.plan.workload.batch, lm.plan.workload.prompt) == (3, 10)
        assert "planning anew for 3 of 10 + 8 tokens; the plan was for 1 of 4 + 2" in caplog.text


def test_eos_ends_a_row_and_pads_it(resident: LanguageModel, llama_checkpoint: Any) -> None:
    expected = llama_checkpoint.expected
    eos = int(expected[0, 12])
    end = 10 + expected[0, 10:].tolist().index(eos) + 1
    with torch.no_grad():
        reference = llama_checkpoint.model.generate(
            llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=8, do_sample=False,
            eos_token_id=eos, pad_token_id=7)
    for given in (eos, [eos], [eos, 10**6]):
        got = answer(resident, llama_checkpoint, eos_token_id=given, pad_token_id=7)
        assert torch.equal(got, reference)
    assert (got[0, end:] == 7).all() and got.shape[1] > end
    unpadded = answer(resident, llama_checkpoint, eos_token_id=eos, pad_token_id=None)
    assert (unpadded[0, end:] == eos).all(), "the default pad is the first eos"
    alone = resident.generate(llama_checkpoint.ids[:1], attention_mask=llama_checkpoint.mask[:1], max_new_tokens=8,
                              eos_token_id=eos)
    assert alone.shape[1] == end, "it ends when every row has"


def test_the_models_own_eos_is_the_default(llama_checkpoint: Any, tmp_path: Path) -> None:
    """Of generation_config.json, or of the module in memory, as transformers has it."""
    folder = tmp_path / "model"
    shutil.copytree(llama_checkpoint.folder, folder)
    eos = int(llama_checkpoint.expected[0, 12])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 10**6]}))
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids, mask = llama_checkpoint.ids[:1], llama_checkpoint.mask[:1]
    expected = module.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=7)
    assert expected.shape[1] < 18, "it ends early"
    for model in (folder, module):
        with wrap(model, 2 * llama_checkpoint.nbytes, prompt=10, new_tokens=8) as lm:
            assert torch.equal(lm.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=7), expected)
            on = lm.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None)
            assert torch.equal(on, llama_checkpoint.expected[:1])


@pytest.mark.parametrize("given", [True, False])
def test_a_generation_config_that_names_no_eos_is_taken_as_it_is(
    llama_checkpoint: Any, tmp_path: Path, given: bool
) -> None:
    """Whatever config.json names, which counts where there is no other file."""
    folder = tmp_path / "model"
    shutil.copytree(llama_checkpoint.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": int(llama_checkpoint.expected[0, 12])}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if given:
        (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 7}))
    ids, asked = llama_checkpoint.ids[:1], {"attention_mask": llama_checkpoint.mask[:1], "max_new_tokens": 8,
                                            "pad_token_id": 7}
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).generate(ids, **asked)
    assert (expected.shape[1] == 18) == given
    with wrap(folder, 2 * llama_checkpoint.nbytes, prompt=10, new_tokens=8) as lm:
        assert torch.equal(lm.generate(ids, **asked), expected)


def test_lengths(resident: LanguageModel, llama_checkpoint: Any) -> None:
    assert torch.equal(answer(resident, llama_checkpoint, max_new_tokens=None, max_length=15),
                       llama_checkpoint.expected[:, :15])
    one = resident.generate(llama_checkpoint.ids[:1], attention_mask=llama_checkpoint.mask[:1], max_new_tokens=1)
    assert torch.equal(one, llama_checkpoint.expected[:1, :11])
    assert resident.generate(inputs=llama_checkpoint.ids[2:], max_new_tokens=3, eos_token_id=None).shape == (1, 13)


def test_sampling_is_reproducible_and_its_narrowest_is_greedy(resident: LanguageModel, llama_checkpoint: Any) -> None:
    def draw(seed: int, **options: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return answer(resident, llama_checkpoint, do_sample=True, generator=generator, **options)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(3, top_k=1), llama_checkpoint.expected)
    assert torch.equal(draw(3, top_k=None, temperature=1e-5), llama_checkpoint.expected)


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(input_ids=torch.zeros(0, 3, dtype=torch.int64)), "at least one token"),
    (dict(input_ids=torch.zeros(3, dtype=torch.int64)), r"\[B, T\]"),
    (dict(input_ids=torch.tensor([[1.5]])), "whole numbers, found torch.float32"),
    (dict(input_ids=torch.tensor([[997]])), r"must lie in \[0, 997\)"),
    (dict(input_ids=torch.tensor([[-1]])), r"must lie in \[0, 997\)"),
    (dict(input_ids=torch.tensor([[1, 2]]), attention_mask=torch.tensor([[1]])), "attention_mask has shape"),
    (dict(input_ids=torch.tensor([[1, 2]]), inputs=torch.tensor([[1]])), "given twice"),
    (dict(input_ids=torch.tensor([[1], [2]]), attention_mask=torch.tensor([[1], [0]])), "row 1 has no token"),
    (dict(input_ids=torch.tensor([[1]]), max_new_tokens=0), "max_new_tokens must be at least 1"),
    (dict(input_ids=torch.tensor([[1, 2]]), max_length=2), "max_length 2 leaves no room"),
    (dict(input_ids=torch.tensor([[1]]), max_new_tokens=200), "exceed the model's 128 positions"),
    (dict(input_ids=torch.tensor([[1]]), do_sample=True, temperature=0.0), "temperature"),
    (dict(input_ids=torch.tensor([[1]]), do_sample=True, top_p=2.0), "top_p"),
])
def test_arguments_that_cannot_be_are_refused(resident: LanguageModel, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resident.generate(**arguments)
    with pytest.raises(ValueError, match="num_beems"):
        resident.generate(torch.tensor([[1]]), num_beems=4)


# -- models in memory, plans, files


def in_memory(checkpoint: Any, loaded: bool) -> torch.nn.Module:
    """The same weights in a module of their own: mapped from the file, as from_pretrained leaves them, or allocated."""
    if loaded:
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder).eval()
    module = transformers.AutoModelForCausalLM.from_config(checkpoint.model.config).eval()
    module.load_state_dict(checkpoint.model.state_dict())
    return module


@pytest.mark.parametrize("loaded", [True, False])
def test_a_module_in_memory_moves_to_disk_and_computes_the_same(
    llama_checkpoint: Any, tmp_path: Path, loaded: bool
) -> None:
    module = in_memory(llama_checkpoint, loaded)
    with wrap(module, {"device": llama_checkpoint.share(0.5), "disk": str(tmp_path)}, batch=3, prompt=10,
              new_tokens=8) as lm:
        assert sum(p.untyped_storage().nbytes() for p in module.parameters()) == 0, "its memory is given back"
        assert lm.plan.prediction.streamed_nbytes > 0
        check(lm, llama_checkpoint)
    assert list(tmp_path.iterdir()) == [], "no spill file is left"


def test_a_module_in_memory_is_left_whole_when_its_budget_cannot_work(llama_checkpoint: Any, tmp_path: Path) -> None:
    module = in_memory(llama_checkpoint, loaded=False)
    with pytest.raises(PlanError, match="the smallest that can is"):
        wrap(module, {"device": 10_000, "disk": str(tmp_path)}, batch=3, prompt=10, new_tokens=8)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), llama_checkpoint.model.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_saved_plan_is_replayed_as_it_is(llama_checkpoint: Any, tmp_path: Path) -> None:
    with llama_checkpoint.language_model(0.5, slots=3, prefill_chunk=4) as lm:
        lm.plan.save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    captured, checkpoint, files = llama_checkpoint.opened
    with LanguageModel(captured, checkpoint, files, plan.budget, plan.workload, Options(), plan=plan) as again:
        assert again.plan == lm.plan
        check(again, llama_checkpoint)
    with pytest.raises(PlanError, match="made for another model"):
        LanguageModel(captured, checkpoint, files, plan.budget, plan.workload, Options(),
                      plan=replace(plan, fingerprint="else"))


@pytest.mark.parametrize(("name", "other"), [
    ("slots", 4), ("slot_nbytes", 64), ("lead", 1), ("prefill_chunk", 5), ("cache", "kv8"), ("micro_batches", 2),
    ("order", "row"), ("cache_tier", "disk"), ("cpu_attention", True), ("checkpoints", (1, 2)),
    ("hidden_tier", "disk"), ("kv_blocks", 0.5), ("batch_slots", 3), ("prompt_lookup_num_tokens", 4)])
def test_a_replayed_plan_keeps_no_wish_that_it_was_not_made_for(
    llama_checkpoint: Any, replayed: tuple[Any, dict[str, Any]], name: str, other: Any
) -> None:
    plan, wished = replayed
    with pytest.raises(PlanError, match=f"^{name}: .*leave it out, or plan anew"):
        wrap(llama_checkpoint.folder, {"device": plan.budget.device}, plan=plan, **wished | {name: other})


@pytest.fixture(scope="module")
def replayed(llama_checkpoint: Any) -> tuple[Any, dict[str, Any]]:
    """A plan made for options, with which it can be replayed."""
    wished = {"slots": 3, "slot_nbytes": 8192, "lead": 2, "prefill_chunk": 4}
    with llama_checkpoint.language_model(0.5, **wished) as lm:
        plan = lm.plan
    with wrap(llama_checkpoint.folder, {"device": plan.budget.device}, plan=plan, **wished) as again:
        assert again.plan == plan
    return plan, wished


def test_a_budget_that_cannot_work_names_the_smallest_that_can(llama_checkpoint: Any) -> None:
    with pytest.raises(PlanError, match="the smallest that can is") as refusal:
        llama_checkpoint.language_model(10_000)
    smallest = int(str(refusal.value).split(" bytes: ")[0].rsplit("(", 1)[1])
    with pytest.raises(PlanError):
        llama_checkpoint.language_model(smallest - 1)
    with llama_checkpoint.language_model(smallest) as lm:
        check(lm, llama_checkpoint)


def test_a_file_cut_short_while_running_is_named(llama_checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_checkpoint.folder, folder)
    lm = wrap(folder, {"device": llama_checkpoint.share(0.5)}, batch=3, prompt=10, new_tokens=8, slots=2)
    answer(lm, llama_checkpoint, max_new_tokens=2)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed"):
        answer(lm, llama_checkpoint)
    shutil.copy(llama_checkpoint.folder / "model.safetensors", path)
    lm = wrap(folder, {"device": llama_checkpoint.share(0.5)}, batch=3, prompt=10, new_tokens=8, slots=2)
    with pytest.raises(TruncatedFileError, match=r"model\.safetensors"):
        answer(lm, llama_checkpoint, on_token=lambda _: os.truncate(path, path.stat().st_size // 2))
    lm.close()  # told once
    shutil.copy(llama_checkpoint.folder / "model.safetensors", path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed"):  # the same again, for all one knows
        answer(lm, llama_checkpoint)
    lm = wrap(folder, {"device": llama_checkpoint.share(0.5)}, batch=3, prompt=10, new_tokens=8, slots=2)
    check(lm, llama_checkpoint)
    lm.close()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        wrap(folder, {"device": llama_checkpoint.nbytes})


@pytest.mark.parametrize("asked", ["generate", "next_logits"])
def test_after_a_step_that_broke_off_the_next_answer_is_right(llama_checkpoint: Any, asked: str) -> None:
    """Copies for the step stand in slots that the next one does not expect there."""

    def broken() -> None:
        raise KeyboardInterrupt

    with llama_checkpoint.language_model(0.3, slots=3) as lm:
        check(lm, llama_checkpoint)
        chunk = lm.plan.schedule.prefill_chunk
        for third in (1, 2):
            lm.session.load()  # a step that loads is bound by itself
            bound = lm.session.bound(chunk)
            bound._step[third * len(bound._step) // 3] = broken
            with pytest.raises(KeyboardInterrupt):
                answer(lm, llama_checkpoint) if asked == "generate" else lm.next_logits(llama_checkpoint.ids)
            check(lm, llama_checkpoint)


def test_a_model_that_is_dropped_waits_for_its_reads_and_ends_its_threads(llama_checkpoint: Any) -> None:
    before = threading.active_count()
    lm = llama_checkpoint.language_model(0.3, slots=3)
    answer(lm, llama_checkpoint, max_new_tokens=2)  # reads for a third step are under way
    device = lm.session.device
    finish, finished = device.finish, []

    def noted() -> None:
        finish()
        finished.append(len(device.arenas))

    device.finish = noted
    assert threading.active_count() > before
    del lm
    assert finished == [1] and not device.arenas, "its memory was there until its reads were done"
    assert threading.active_count() == before


def test_garbage_is_looked_for_where_a_model_ends_and_not_while_one_is_made(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes tenths of a second, which `wrap` took longer after the graphs of a few models had been let go."""
    looked: list[str] = []
    monkeypatch.setattr(model_module, "collect_when_due", lambda: looked.append("looked"))
    lm = wrap(llama_checkpoint.folder, "64MiB", batch=1, prompt=4, new_tokens=2)
    assert not looked
    lm.reserve(1, 8, 4)
    assert len(looked) == 1, "graphs of the plan before"
    lm.close()
    assert len(looked) == 2
    del lm
    assert len(looked) == 3, "of a model that nobody closed"


def test_memory_that_cannot_be_had_leaves_no_thread(llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()

    def refuse(self: object, arenas: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("forebay.runtime.devices.cpu.device.ThreadDevice.allocate", refuse)
    with llama_checkpoint.language_model(0.5) as lm, pytest.raises(MemoryError, match="no room"):
        answer(lm, llama_checkpoint)
    assert threading.active_count() == before


def test_a_failed_copy_is_told_once_and_closing_does_not_wait_for_ever(llama_checkpoint: Any) -> None:
    host = {"host": 2 * llama_checkpoint.nbytes}
    device = llama_checkpoint.share(0.5)
    with wrap(llama_checkpoint.folder, {"device": device} | host, batch=3, prompt=10, new_tokens=8, slots=2) as lm:
        check(lm, llama_checkpoint)
        lm.session.device._worker(UPLOAD).error = OSError("a copy failed")
        with pytest.raises(OSError, match="a copy failed"):
            answer(lm, llama_checkpoint)
        check(lm, llama_checkpoint)


def test_a_call_that_no_plan_serves_leaves_the_plan_before(llama_checkpoint: Any) -> None:
    with llama_checkpoint.language_model(0.5) as lm:
        before = lm.plan
        for beams in (60, 400):  # beams of a sequence are computed together
            with pytest.raises(PlanError, match="cannot work"):
                lm.generate(llama_checkpoint.ids, max_new_tokens=20, num_beams=beams, pad_token_id=0)
        assert lm.plan is before
        check(lm, llama_checkpoint)


def test_two_threads_take_turns(llama_checkpoint: Any) -> None:
    found: list[Any] = []
    with llama_checkpoint.language_model(0.4, slots=2) as lm:
        lm.start_trace()

        def ask() -> None:
            found.append([answer(lm, llama_checkpoint) for _ in range(3)])

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2
        for tokens in itertools.chain(*found):
            assert_same_tokens(tokens, llama_checkpoint.expected, llama_checkpoint.mask, llama_checkpoint.model,
                               lm.next_logits)


def test_arguments_without_effect_are_not_looked_at(resident: LanguageModel, llama_checkpoint: Any) -> None:
    """What transformers takes as 'not set'."""
    for options in (dict(temperature=None, top_p=None, top_k=None), dict(temperature=0.0)):
        assert torch.equal(answer(resident, llama_checkpoint, **options), llama_checkpoint.expected)


@pytest.mark.parametrize(("options", "message"), [
    (dict(batch=0), "batch must be at least 1, found 0"), (dict(prompt=0), "prompt"), (dict(slots=0), "slots"),
    (dict(prefill_chunk=-3), "prefill_chunk must be at least 1, found -3"), (dict(slots=2, lead=9), "lead 9"),
    *((dict(prompt_lookup_num_tokens=wrong), f"prompt_lookup_num_tokens must be {said}") for wrong, said in (
        (0, "at least 1, found 0"), (-1, "at least 1"), ("x", "a whole number, found 'x'"), (1.5, "a whole number"),
        (True, "a whole number"), ([4], "a whole number"))),
    *((dict(batch_slots=wrong), f"slots must be {said}") for wrong, said in (
        (0, "at least 1, found 0"), (-1, "at least 1"), ("x", "a whole number"), (2.0, "a whole number"))),
    *((dict(checkpoints=wrong), "checkpoints must be two whole numbers") for wrong in (
        1, "12", (1,), (1, 2, 3), (0.5, 1), ("1", "2"), (True, 2), {1, 2})),
    *((dict(cache_shares=wrong), "cache_shares must be two numbers") for wrong in (
        0.5, (0.5,), ("a", 1), (-0.1, 1), (0, 1.5), (0, float("nan")))),
    (dict(order="x"), "order must be one of 'row', 'zigzag', found 'x'"), (dict(batch="3"), "batch must be a whole"),
    (dict(cache_tier="ram"), "cache_tier must be one of"), (dict(cpu_attention="yes"), "cpu_attention must be one of"),
    (dict(slot_nbytes=0), "slot_nbytes must be at least 1"), (dict(cache="kv3"), "kv3")])
def test_what_cannot_be_planned_is_refused_by_name(llama_checkpoint: Any, options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        wrap(llama_checkpoint.folder, llama_checkpoint.nbytes, **options)


def test_under_inference_mode(llama_checkpoint: Any) -> None:
    """The arenas are made in the caller's mode; uploads are made by a thread that is in none."""
    host = {"host": 2 * llama_checkpoint.nbytes}
    device = llama_checkpoint.share(0.5)
    with wrap(llama_checkpoint.folder, {"device": device} | host, batch=3, prompt=10, new_tokens=8, slots=2) as lm:
        with torch.inference_mode():
            check(lm, llama_checkpoint)
        check(lm, llama_checkpoint)
