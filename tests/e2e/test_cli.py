"""The command line on a small model: jobs killed and resumed, bad input, plans dry, saved, explained and replayed, and
a short run of every other command."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from budgets import attention_nbytes
from forked import start_code
from serving.served import WORDS, save_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from forebay.commands.app import app
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import PlanError, load_plan, plan_from_dict
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.pipeline import plan_draft
from forebay.runtime.measure.kept import machine_cache_path
from forebay.runtime.run.draft_choice import DraftChoice

NEW = 16
DEVICE = (690 << 10) + attention_nbytes(2, 4, 32, 32)  # the weights take 1.3 MiB
BUDGET = f"device={DEVICE}"
COUNT = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a random Llama, its tokenizer of whole words, a machine profile, and prompts."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, 2)
    save_machine(Machine.default(), folder / "machine.json")
    lines = [{"id": f"p{i}", "prompt": " ".join(WORDS[i : i + 2 + 5 * i % 11])} for i in range(COUNT)]
    _write_lines(folder / "prompts.jsonl", lines)
    return folder


def _write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _forebay(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def _run_arguments(folder: Path, output: Path, **changes: object) -> list[str]:
    options = {"prompts": folder / "prompts.jsonl", "output": output, "budget": BUDGET, "new-tokens": NEW,
               "batch": 2, "machine": folder / "machine.json"} | {k.replace("_", "-"): v for k, v in changes.items()}
    named = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    return ["run", str(folder), "--no-chat", *named]


def _answers(path: Path) -> dict[Any, dict[str, Any]]:
    raw = path.read_bytes()
    assert not raw or raw.endswith(b"\n"), "half a line"
    entries = [json.loads(line) for line in raw.splitlines()]
    assert len({e["id"] for e in entries}) == len(entries), "an answer is repeated"
    return {e["id"]: e for e in entries}


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[Any, dict[str, Any]]:
    """The answers of a job that nothing interrupts."""
    result = _forebay(*_run_arguments(folder, folder / "reference.jsonl"))
    assert result.exit_code == 0, result.output
    for part in ("budget", format_nbytes(DEVICE), "Python included, used", "tokens/s", "per decode step as planned"):
        assert part in result.stdout, part
    assert len(result.stdout.splitlines()) <= 4  # of drafts one more
    return _answers(folder / "reference.jsonl")


def test_answers_are_those_of_transformers(folder: Path, reference: dict[Any, dict[str, Any]]) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert len(reference) == COUNT
    for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        ids = tokenizer(entry["prompt"], return_tensors="pt")
        whole: Any = model.generate(**ids, max_new_tokens=NEW, do_sample=False)  # type: ignore[misc]
        new = whole[0, ids["input_ids"].shape[1] :]
        answer = reference[entry["id"]]
        assert answer["text"] == tokenizer.decode(new, skip_special_tokens=True)
        assert answer["prompt"] == entry["prompt"] and answer["tokens"] == len(new)
        assert answer["prompt_tokens"] == ids["input_ids"].shape[1]


def _signal_at(pid: int | None, running: Callable[[], bool], output: Path, lines: int, number: int) -> None:
    """Send the signal once the output holds that many whole lines."""
    assert pid
    deadline = time.monotonic() + 300
    while running() and time.monotonic() < deadline:
        if output.exists() and output.read_bytes().count(b"\n") >= lines:
            os.kill(pid, number)
            break
        time.sleep(0.001)


def _stopped(arguments: list[str], output: Path, lines: int, number: int, told: Path) -> CompletedProcess[str]:
    """The command, to which the signal was sent then."""
    code = "import torch; torch.set_num_threads(1); from forebay.commands.cli import main; main()"
    started = start_code(told, code, *arguments)
    _signal_at(started.process.pid, started.process.is_alive, output, lines, number)
    return started.ended(300)


def test_killed_job_resumes_without_loss_or_repetition(
    folder: Path, reference: dict[Any, dict[str, Any]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    output, told = tmp_path / "out.jsonl", tmp_path_factory.mktemp("told")
    arguments = _run_arguments(folder, output)

    stopped = _stopped(arguments, output, 2, signal.SIGINT, told)
    assert stopped.returncode == 130, stopped.stderr
    assert "run the same command again" in stopped.stderr and "Traceback" not in stopped.stderr
    first = _answers(output)
    assert 2 <= len(first) < COUNT
    assert {p.name for p in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.settings"}  # nothing spilled is left

    killed = _stopped(arguments, output, len(first) + 2, signal.SIGKILL, told)
    assert killed.returncode == -signal.SIGKILL
    second = _answers(output)
    assert len(first) + 2 <= len(second) < COUNT
    assert list(second)[: len(first)] == list(first)
    with output.open("ab") as file:  # what a crash of the whole machine could leave
        file.write(b'{"id": "p3", "prompt": "w3 w')

    result = _forebay(*arguments)
    assert result.exit_code == 0, result.output
    assert f"{len(second)} of {COUNT} prompts are answered already" in result.stderr
    assert "bytes of an unfinished line" in result.stderr
    assert _answers(output) == reference
    before = output.read_bytes()
    assert _forebay(*arguments).exit_code == 0
    assert output.read_bytes() == before


def test_interrupt_before_the_first_answer_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """In a process that Python ends, as none does that is forked."""
    output = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay", *_run_arguments(folder, output)], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        _signal_at(process.pid, lambda: process.poll() is None, output, 0, signal.SIGINT)
        said = process.communicate(timeout=300)[1]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "interrupted" in said and "Traceback" not in said
    assert _answers(output) == {}


def test_bad_lines_are_reported_and_the_others_answered(
    folder: Path, reference: dict[Any, dict[str, Any]], tmp_path: Path
) -> None:
    good = json.loads((folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[4])
    lines = ['{"prompt": ', json.dumps({"id": "long", "prompt": "w1 " * 113}), '{"prompt": " "}', json.dumps(good),
             json.dumps(good), '{"messages": [{"role": "w1", "content": "w2 w3"}]}']
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("\n".join(lines), encoding="utf-8")
    result = _forebay(*_run_arguments(folder, tmp_path / "out.jsonl", prompts=prompts))
    assert result.exit_code == 3, result.output
    for part in ("line 1: not JSON", "line 2: the prompt is too long: 113 tokens, at most 112 fit",
                 "line 3: the prompt", "line 5: id 'p4' is already that of line 4", "4 lines of"):
        assert part in result.stderr, result.stderr
    answers = _answers(tmp_path / "out.jsonl")
    assert set(answers) == {"p4", 6}
    assert answers["p4"]["text"] == reference["p4"]["text"]
    assert answers[6]["prompt_tokens"] == 4 and answers[6]["messages"] == [{"role": "w1", "content": "w2 w3"}]


def test_prompts_that_the_budget_cannot_hold_are_named_and_the_others_answered(folder: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    _write_lines(prompts, [{"prompt": text} for text in ("w1 " * 100, "w1 w2", "w3 w4 w5", "w2 " * 90)])
    shape = ["--batch", 1, "--new-tokens", 4, "--machine", folder / "machine.json", "--budget", "device=20KiB"]
    refused = _forebay("plan", folder, "--prompt", 60, *shape).stderr
    budget = f"device={refused.split('(')[1].split(' bytes')[0]}"  # what 60 tokens need
    arguments = _run_arguments(folder, output, prompts=prompts, budget=budget, new_tokens=4, batch=1)
    result = _forebay(*arguments)
    assert result.exit_code == 3, result.output
    for part in ("too long for the budget", "prompt 100, 4 new tokens; the smallest that can is",
                 "line 1: a prompt of 100 tokens and an answer of 4 are too long for the budget; the plan has room for "
                 "7 together",
                 "line 4: a prompt of 90 tokens", "; 2 were"):
        assert part in result.stderr, result.stderr
    assert set(_answers(output)) == {2, 3}
    other = _forebay(*_run_arguments(folder, output, prompts=prompts, new_tokens=4))
    assert other.exit_code == 2 and "made in batches of 1, this job has 2" in other.stderr
    enough = _forebay(*_run_arguments(folder, output, prompts=prompts, new_tokens=4, batch=None))
    assert enough.exit_code == 0 and set(_answers(output)) == {1, 2, 3, 4}
    assert _forebay(*arguments).exit_code == 0, "what is answered needs no room"


def test_a_job_takes_room_for_its_longest_line_not_for_both_maxima(folder: Path, tmp_path: Path) -> None:
    """A long prompt with a short answer, and the reverse: each line fits what the longest takes."""
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "w1 " * 30, "max_new_tokens": 4}, {"prompt": "w2", "max_new_tokens": 33},
             {"prompt": "w3 " * 17, "max_new_tokens": 7}, {"prompt": "w4 " * 27, "max_new_tokens": 13}]
    _write_lines(prompts, 4 * lines[:1])
    refused = _forebay(*_run_arguments(folder, output, prompts=prompts, budget="device=20KiB", batch=1)).stderr
    _write_lines(prompts, lines)
    budget = f"device={refused.split('(')[1].split(' bytes')[0]}"
    result = _forebay(*_run_arguments(folder, output, prompts=prompts, budget=budget, batch=1))
    assert result.exit_code == 3 and "line 4: a prompt of 27 tokens and an answer of 13" in result.stderr, result.output
    assert "the plan has room for 34 together, 30 of a prompt" in result.stderr, result.stderr
    assert {key: answer["tokens"] for key, answer in _answers(output).items()} == {1: 4, 2: 33, 3: 7}
    alone = tmp_path / "alone.jsonl"
    assert _forebay(*_run_arguments(folder, alone, prompts=prompts, batch=1)).exit_code == 0
    assert {k: a["text"] for k, a in _answers(alone).items() if k < 4} == {
        k: a["text"] for k, a in _answers(output).items()}


@pytest.mark.all
def test_a_job_of_several_needs_no_more_than_each_alone(folder: Path, tmp_path: Path) -> None:
    """One after the other, where slots that are entered would need more."""
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"prompt": "w1 " * 40, "max_new_tokens": 8}
    _write_lines(prompts, [line])
    refused = _forebay(*_run_arguments(folder, output, prompts=prompts, budget="device=20KiB", batch=None)).stderr
    budget = f"device={refused.split('(')[1].split(' bytes')[0]}"
    _write_lines(prompts, [line, {"prompt": "w2", "max_new_tokens": 1}, line | {"id": "b"}])
    for i, batch in enumerate((None, 1)):
        arguments = _run_arguments(folder, tmp_path / f"{i}", prompts=prompts, budget=budget, batch=batch)
        assert (result := _forebay(*arguments)).exit_code == 0, result.output
        assert {k: a["tokens"] for k, a in _answers(tmp_path / f"{i}").items()} == {1: 8, 2: 1, "b": 8}


def test_a_job_of_fewer_lines_than_its_batch_goes_on_with_more(folder: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    _write_lines(prompts, [{"prompt": "w1 w2"}])
    arguments = _run_arguments(folder, output, prompts=prompts, new_tokens=2, batch=4)
    assert _forebay(*arguments).exit_code == 0
    _write_lines(prompts, [{"prompt": "w1 w2"}, {"prompt": "w3"}])
    assert (result := _forebay(*arguments)).exit_code == 0, result.output
    assert set(_answers(output)) == {1, 2}


def test_a_plan_leaves_alone_what_another_answered(folder: Path, tmp_path: Path) -> None:
    """Lines without room in it count where nothing has answered them; nor does a default that no line takes stop it."""
    prompts, output, saved = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "plan.json"
    short = [{"prompt": "w1 w2", "max_new_tokens": 3}, {"prompt": "w3", "max_new_tokens": 2}]
    _write_lines(prompts, short)
    made = _run_arguments(folder, tmp_path / "first", prompts=prompts, save_plan=saved, new_tokens=100)
    assert _forebay(*made).exit_code == 0
    _write_lines(prompts, [*short, {"prompt": "w4 " * 30, "max_new_tokens": 5}])
    replayed = ["run", folder, "--no-chat", "--prompts", prompts, "--output", output, "--plan", saved,
                "--new-tokens", 100]
    assert (result := _forebay(*replayed)).exit_code == 3 and "; 2 were" in result.stderr, result.output
    roomy = _run_arguments(folder, output, prompts=prompts, new_tokens=100, batch=None)
    assert (result := _forebay(*roomy)).exit_code == 0, result.output
    assert (result := _forebay(*replayed)).exit_code == 0 and "3 of 3 prompts are answered" in result.stderr


@pytest.mark.all
def test_one_prompt_too_long_for_the_batch_stops_no_job(folder: Path, tmp_path: Path) -> None:
    """Nor does one whose answer is to be too long, by a line's own word."""
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    _write_lines(prompts, [{"prompt": "w1 " * 100}, {"prompt": "w1 w2"}, {"prompt": "w3 w4 w5", "max_new_tokens": 2},
                           {"prompt": "w6", "max_new_tokens": 90}, {"prompt": "w7", "max_new_tokens": 128}])
    shape = ["--batch", 2, "--prompt", 10, "--new-tokens", 4, "--machine", folder / "machine.json"]
    refused = _forebay("plan", folder, *shape, "--budget", "device=20KiB").stderr
    budget = f"device={refused.split('(')[1].split(' bytes')[0]}"
    result = _forebay(*_run_arguments(folder, output, prompts=prompts, budget=budget, new_tokens=4))
    assert result.exit_code == 3, result.output
    for part in ("too long for the budget", "line 1: a prompt of 100 tokens and an answer of 4 are too long",
                 "line 4: a prompt of 1 tokens and an answer of 90 are too long for the budget, with --batch 2",
                 "line 5: max_new_tokens leaves no room for a prompt", "; 2 were"):
        assert part in result.stderr, result.stderr
    answers = _answers(output)
    assert {key: answer["tokens"] for key, answer in answers.items()} == {2: 4, 3: 2}
    assert answers[3]["max_new_tokens"] == 2 and "max_new_tokens" not in answers[2]


@pytest.mark.parametrize("suffix", ["", ".settings"])
def test_answers_are_not_written_into_the_prompts(folder: Path, tmp_path: Path, suffix: str) -> None:
    prompts = tmp_path / f"out{suffix}" if suffix else tmp_path / "in"
    if not suffix:
        (tmp_path / "out").symlink_to(prompts)
    prompts.write_text('{"prompt": "w1"}\n{"prompt": "w2"}', encoding="utf-8")
    result = _forebay(*_run_arguments(folder, tmp_path / "out", prompts=prompts))
    assert result.exit_code == 2 and "is the same file" in result.stderr
    assert prompts.read_text(encoding="utf-8") == '{"prompt": "w1"}\n{"prompt": "w2"}'


@pytest.mark.parametrize(("option", "value", "part"), [
    ("trace", "no/such/trace.json", "--trace: "), ("save_plan", "no/such/plan.json", "--save-plan: "),
    ("trace", ".", "is a folder"), ("budget", f"{BUDGET},disk=prompts.jsonl", "no spill file can be made here"),
    ("budget", f"{BUDGET},disk=prompts.jsonl/below", "no spill file can be made here"),
])
def test_what_cannot_be_written_is_told_before_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, part: str
) -> None:
    import forebay.api

    def opened(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was opened first")

    monkeypatch.chdir(folder)
    with monkeypatch.context() as patch:
        patch.setattr(forebay.api, "open_model", opened)
        result = _forebay(*_run_arguments(folder, tmp_path / "out.jsonl", **{option: value}))
    assert result.exit_code == 2 and part in result.stderr and result.stderr.count("\n") == 1, result.output
    assert not list(tmp_path.iterdir())


def test_empty_prompts_file_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n", encoding="utf-8")
    result = _forebay(*_run_arguments(folder, tmp_path / "out", prompts=tmp_path / "in"))
    assert result.exit_code == 0 and "holds no prompts" in result.stderr


def test_a_draft_changes_no_answer_of_a_job(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts for itself, so much stands; it says what drafts, and what was checked."""
    monkeypatch.setattr(plan_draft, "MIN_SPEEDUP", 0.0)  # whatever is predicted
    monkeypatch.setattr(DraftChoice, "_worth", lambda *_: (3, 0.0))
    told = {}
    for name, drafts in (("plain", {}), ("drafted", {"draft": folder})):
        arguments = _run_arguments(folder, tmp_path / name, budget="device=9MB", **drafts)
        lookup = ["--prompt-lookup-num-tokens", "none"] if name == "plain" else []
        told[name] = _forebay(*arguments, *lookup, "--json")
        assert told[name].exit_code == 0, told[name].output
    plain, drafted = (_answers(tmp_path / name) for name in ("plain", "drafted"))
    assert {i: each["text"] for i, each in drafted.items()} == {i: each["text"] for i, each in plain.items()}
    found, alone = (json.loads(told[name].stdout) for name in ("drafted", "plain"))
    assert found["accepted_tokens"] > 0 == alone["drafted_tokens"] and found["steps"] < alone["steps"]
    assert "draft: " in told["drafted"].stderr and "of drafted tokens right" in told["drafted"].stderr


@pytest.mark.parametrize("asked", [
    {"cache_tier": "disk", "micro_batches": 2, "cache_tokens": 4, "prefill_chunk": 5, "batch": 4,
     "budget": "device=4MB"},
    {"slots": 3, "lead": 2}])
def test_a_job_takes_what_the_table_has_and_answers_the_same(
    folder: Path, reference: dict[Any, dict[str, Any]], tmp_path: Path, asked: dict[str, Any]
) -> None:
    saved, output = tmp_path / "plan.json", tmp_path / "out.jsonl"
    result = _forebay(*_run_arguments(folder, output, save_plan=saved, **asked))
    assert result.exit_code == 0, result.output
    assert {i: each["text"] for i, each in _answers(output).items()} == {
        i: each["text"] for i, each in reference.items()}
    schedule = load_plan(saved).schedule
    found = (schedule.batching.cache.tier, schedule.batching.micro_batches.count, schedule.prefill_chunk)
    assert found == ("disk", 2, 5) if "cache_tier" in asked else (schedule.slots, schedule.lead) == (3, 2)


def test_answers_of_other_values_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert _forebay(*_run_arguments(folder, output)).exit_code == 0
    other = _forebay(*_run_arguments(folder, output, kv_blocks=0.5))
    assert other.exit_code == 2 and "kv_blocks 1.0, this job has 0.5" in other.stderr


def test_slots_beside_a_plan_are_refused(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    assert _forebay("plan", folder, "--budget", BUDGET, "--machine", folder / "machine.json", "--save-plan", saved
                    ).exit_code == 0
    result = _forebay(*_run_arguments(folder, tmp_path / "out", budget=None, batch=None, plan=saved, slots=7))
    assert result.exit_code == 2 and "slots: the plan has" in result.stderr and "leave it out" in result.stderr


@pytest.mark.parametrize(("content", "part"), [
    (None, "config.json is missing"), ("{", "config.json describes no model"), ("{}", "config.json describes no model"),
    ('{"model_type": "foo"}', "model type `foo`"), ('{"model_type": "llama", "num_attention_heads": 0}', "config.json"),
    ('{"model_type": "llama", "hidden_size": "x"}', "'hidden_size' expected int"),
])
def test_config_that_describes_no_model_is_one_line(folder: Path, tmp_path: Path, content: str | None, part: str
                                                    ) -> None:
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    commands = (["plan", tmp_path, "--budget", BUDGET, "--machine", folder / "machine.json"],
                ["quantize", tmp_path, tmp_path / "out", "--weights", "w8"])
    for command in commands:
        result = _forebay(*command)
        assert result.exit_code == 2 and part in result.stderr and result.stderr.count("\n") == 1, result.output


def test_eval_refuses_text_and_profiles_that_are_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"w1 \xff")
    result = _forebay("eval", folder, "--text", tmp_path / "text")
    assert result.exit_code == 2 and "is not UTF-8" in result.stderr
    (tmp_path / "text").write_text("w1 w2", encoding="utf-8")
    result = _forebay("eval", folder, "--text", tmp_path / "text", "--machine", tmp_path / "text")
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_other_settings_are_refused(folder: Path, reference: dict[Any, dict[str, Any]], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for suffix in ("", ".settings"):
        shutil.copy(folder / f"reference.jsonl{suffix}", f"{output}{suffix}")
    before = output.read_bytes()
    result = _forebay(*_run_arguments(folder, output, new_tokens=NEW + 1))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "new_tokens 16, this job has 17" in result.stderr
    sampled = _forebay(*_run_arguments(folder, output, temperature=0.7))
    assert sampled.exit_code == 2 and "sampling 'greedy'" in sampled.stderr
    forced = _forebay(*_run_arguments(folder, output, new_tokens=NEW + 1), "--force")
    assert forced.exit_code == 0, forced.output
    assert output.read_bytes() == before


def test_sampling_depends_on_the_seed_alone(folder: Path, tmp_path: Path) -> None:
    texts = []
    _write_lines(tmp_path / "in", [{"prompt": "w3 w4 w5"}, {"prompt": "w8"}, {"prompt": "w1 w2"}])
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = _forebay(*_run_arguments(folder, tmp_path / name, prompts=tmp_path / "in", new_tokens=6,
                                          temperature=1.5, seed=seed))
        assert result.exit_code == 0, result.output
        texts.append({k: v["text"] for k, v in _answers(tmp_path / name).items()})
    assert texts[0] == texts[1] != texts[2]


def test_plan_is_printed_saved_explained_and_replayed(
    folder: Path, reference: dict[Any, dict[str, Any]], tmp_path: Path
) -> None:
    shape = ["--batch", 2, "--prompt", 16, "--new-tokens", NEW, "--machine", folder / "machine.json"]
    saved = tmp_path / "plan.json"
    result = _forebay("plan", folder, "--budget", BUDGET, *shape, "--json", "--save-plan", saved)
    assert result.exit_code == 0, result.output
    plan = plan_from_dict(json.loads(result.stdout))
    assert plan == load_plan(saved)
    assert plan.prediction.decode_time_s > 0 and 0 < plan.prediction.peak_nbytes["device"] <= DEVICE
    assert plan.prediction.streamed_nbytes > 0

    frontier = tmp_path / "frontier.svg"
    text = _forebay("plan", folder, "--budget", BUDGET, *shape, "--pareto", frontier).stdout
    for part in ("total", "copies", "bottleneck", "smallest", "would still work"):
        assert part in text, part
    points = json.loads(frontier.with_suffix(".json").read_text())
    assert len(points) > 1 and points == sorted(points, key=lambda point: point["tokens_per_s"])
    assert [point["latency_s"] for point in points] == sorted(point["latency_s"] for point in points)
    lines = [line.split() for line in text.splitlines() if line.startswith("frontier ")]
    assert [int(line[1]) for line in lines] == [point["sequences"] for point in points]
    assert frontier.read_text().lstrip().startswith("<?xml")

    picture = tmp_path / "memory.png"
    shown = _forebay("explain", saved, "--memory", picture, "--timeline")
    assert shown.exit_code == 0, shown.output
    assert "decode: " in shown.stdout and "letters: " in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000

    replayed = _forebay(*_run_arguments(folder, tmp_path / "out.jsonl", budget=None, batch=None, plan=saved,
                                        save_plan=tmp_path / "again.json", trace=tmp_path / "trace.json"))
    assert replayed.exit_code == 0, replayed.output
    assert _answers(tmp_path / "out.jsonl") == reference
    assert load_plan(tmp_path / "again.json") == plan
    lanes = {e["args"]["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
             if e["ph"] == "M"}
    assert {"actual", "planned", "compute", "disk"} <= lanes


def test_times_of_a_job_are_those_of_its_typical_prompts(folder: Path, tmp_path: Path) -> None:
    """The mean of all prompts, also of those that are answered already; where a line names a longer answer, there is
    room for it behind its prompt."""
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    lines[0]["max_new_tokens"] = 2 * NEW
    _write_lines(tmp_path / "in", lines)
    lengths = [len(line["prompt"].split()) for line in lines]
    saved = tmp_path / "plan.json"
    result = _forebay(*_run_arguments(folder, tmp_path / "out", prompts=tmp_path / "in", save_plan=saved))
    assert result.exit_code == 0, result.output
    work = load_plan(saved).workload
    assert (work.prompt, work.context) == (max(lengths), max(lengths[0] + 2 * NEW, max(lengths) + NEW))
    assert work.typical == (round(sum(lengths) / COUNT), round((COUNT + 1) * NEW / COUNT)) < (max(lengths), 2 * NEW)
    assert "typical lengths" in _forebay("explain", saved).stdout


def test_a_plan_may_be_told_what_is_usual(folder: Path) -> None:
    shape = ["plan", folder, "--budget", BUDGET, "--batch", 1, "--prompt", 48, "--new-tokens", 48, "--machine",
             folder / "machine.json", "--json"]
    longest, typical = (plan_from_dict(json.loads(_forebay(*shape, *more).stdout))
                        for more in ((), ("--typical", "8,4")))
    assert typical.workload == dataclasses.replace(longest.workload, typical_prompt=8, typical_new_tokens=4)
    assert typical.arenas["device"] <= DEVICE
    assert typical.prediction.prefill_time_s < longest.prediction.prefill_time_s
    for bad in ("8", "8,x", "0,4", "49,4"):
        refused = _forebay(*shape, "--typical", bad)
        assert refused.exit_code == 2 and "typical" in refused.output, bad


def test_impossible_budget_names_the_smallest_which_works(folder: Path) -> None:
    shape = ["--batch", 2, "--prompt", 16, "--new-tokens", NEW, "--machine", folder / "machine.json"]
    result = _forebay("plan", folder, "--budget", "device=20KiB", *shape)
    assert result.exit_code == 2 and result.stdout == ""
    assert "20.0 KiB cannot work" in result.stderr and "Traceback" not in result.stderr
    smallest = int(result.stderr.split("(")[1].split(" bytes")[0])
    assert _forebay("plan", folder, "--budget", f"device={smallest}", *shape).exit_code == 0
    assert _forebay("plan", folder, "--budget", f"device={smallest - 1}", *shape).exit_code == 2


@pytest.mark.parametrize(("arguments", "part"), [
    (["plan", "MODEL", "--budget", "gpu=1MiB"], "unknown tier 'gpu'"),
    (["plan", "MODEL", "--budget", "device=lots"], "cannot read 'lots'"),
    (["plan", "/nowhere", "--budget", "device=1MiB"], "no model at /nowhere"),
    (["run", "MODEL", "--prompts", "/none.jsonl", "--output", "/tmp/never", "--budget", "1MiB"], "/none.jsonl"),
    (["run", "MODEL", "--prompts", "PROMPTS", "--output", "/dev/null/x", "--budget", "1MiB"], "cannot write"),
    (["run", "MODEL", "--prompts", "PROMPTS", "--output", "/tmp/never", "--budget", "1MiB", "--top-p", "2"], "top_p"),
    (["run", "MODEL", "--prompts", "PROMPTS", "--output", "/tmp/never", "--budget", "1MiB", "--new-tokens", "128"],
     "leaves no room for a prompt"),
    (["explain", "/nowhere.json"], "cannot read the plan /nowhere.json"),
    (["explain", "MODEL/config.json"], "version"),
    (["machine", "--folder", "/nowhere"], "/nowhere: not a folder"),
    (["plan", "MODEL", "--budget", "1MiB", "--machine", "MODEL/config.json"], "machine profile"),
    (["plan", "--budget", "1MiB"], "name a MODEL, or a --config"),
    (["plan", "MODEL", "--config", "opt-1.3b"], "name a MODEL, or a --config"),
    (["plan", "MODEL", "--budget", "1MiB", "--latency", "3"], "--latency needs --config"),
    (["plan", "--config", "opt-1", "--machine", "t4"], "'opt-1' is neither a config.json nor a preset model"),
    (["plan", "--config", "opt-1.3b", "--machine", "t5"], "'t5' is neither a file nor a machine preset"),
    (["plan", "--config", "opt-1.3b", "--machine", "t4", "--budget", "gpu=1MiB"], "unknown tier 'gpu'"),
    (["plan", "--config", "opt-1.3b", "--machine", "t4", "--budget", "1MiB", "--explore"], "binding tier is device"),
    (["plan", "--config", "opt-1.3b", "--machine", "t4", "--objective", "fame"], "objective"),
    (["plan", "--config", "opt-1.3b", "--machine", "t4", "--explore", "--slots", "2"], "--slots is for plans that run"),
    (["plan", "--config", "opt-1.3b", "--machine", "t4", "--quantize"], "--quantize needs --config and --explore"),
    (["quantize", "MODEL", "/tmp/never", "--weights", "w3"], "no weight format 'w3'"),
    (["quantize", "/nowhere", "/tmp/never", "--weights", "w8"], "no model at /nowhere"),
    (["eval", "MODEL"], "name what to measure on"),
    (["eval", "MODEL", "--text", "/none.txt"], "/none.txt"),
    (["calibrate", "MODEL", "--prompts", "PROMPTS", "--output", "/tmp/never", "--budget", "1MiB", "--dtype", "fp8"],
     "--dtype must be fp16 or bf16"),
    (["calibrate", "MODEL", "--prompts", "/none.jsonl", "--output", "/tmp/never", "--budget", "1MiB"], "/none.jsonl"),
    (["allocate", "/none.csv"], "/none.csv"),
    (["allocate", "MODEL/config.json"], "config.json"),
])
def test_errors_are_one_line_and_exit_code_2(folder: Path, arguments: list[str], part: str) -> None:
    filled = [a.replace("MODEL", str(folder)).replace("PROMPTS", str(folder / "prompts.jsonl")) for a in arguments]
    result = _forebay(*filled)
    assert result.exit_code == 2, result.output
    assert part in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not Path("/tmp/never").exists()


@pytest.mark.parametrize(("command", "part"), [
    ("run", "--prompts"), ("plan", "--config"), ("explain", "PLAN.json"), ("machine", "--measure"),
    ("quantize", "--weights"), ("eval", "--words"), ("calibrate", "--dtype"), ("allocate", "--capacity"),
])
def test_every_command_has_help(command: str, part: str) -> None:
    assert f" {command} " in _forebay("--help").stdout
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})
    assert shown.exit_code == 0 and f" {command} " in shown.stdout and part in shown.stdout


def test_plan_of_a_config_alone(folder: Path, tmp_path: Path) -> None:
    shape = ["--config", folder / "config.json", "--machine", folder / "machine.json", "--prompt", 8, "--new-tokens", 4]
    saved, picture = tmp_path / "plan.json", tmp_path / "frontier.png"
    result = _forebay("plan", *shape, "--budget", BUDGET, "--batch", 2, "--save-plan", saved, "--json", "--pareto",
                      picture)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["kind"] == "plan" and load_plan(saved) == plan_from_dict(found["plan"])
    assert load_plan(saved).workload.batch == 2 and picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(picture.with_suffix(".json").read_text()) == found["pareto"]
    assert _forebay("explain", saved).exit_code == 0
    text = _forebay("plan", *shape)
    assert text.exit_code == 0, text.output
    assert "a plan, as it would run: " in text.stdout and "tokens/s" in text.stdout and "advice" in text.stdout


def test_a_policy_of_a_config_alone(tmp_path: Path) -> None:
    shape = ["--config", "opt-1.3b", "--machine", "t4", "--prompt", 64, "--new-tokens", 8, "--batch", 4, "--explore"]
    text = _forebay("plan", *shape)
    assert text.exit_code == 0, text.output
    assert "opt-1.3b on t4, prompt 64, 8 new tokens" in text.stdout and "tokens/s" in text.stdout
    picture = tmp_path / "frontier.png"
    result = _forebay("plan", *shape, "--budget", "device=1GB,host=16GB", "--json", "--pareto", picture)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["kind"] == "policy" and found["workload"] == {"prompt": 64, "new_tokens": 8}
    assert found["policy"]["capacity_nbytes"]["device"] == 10**9
    assert 0 < found["policy"]["peak_nbytes"]["device"] <= 10**9
    assert json.loads(picture.with_suffix(".json").read_text()) == found["pareto"]


ON_TERMINAL = """
import os, sys
os.dup2(os.open(sys.argv.pop(1), os.O_WRONLY | os.O_NOCTTY), 1)
from forebay.commands.cli import main
main()
"""


def test_terminal_gets_a_table_and_a_pipe_plain_text(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    shape = ["--batch", 2, "--prompt", 16, "--new-tokens", NEW, "--machine", folder / "machine.json"]
    assert _forebay("plan", folder, "--budget", BUDGET, *shape, "--save-plan", saved).exit_code == 0
    piped = _forebay("explain", saved).stdout
    assert "│" not in piped and "lm_head.weight" in piped
    ours, theirs = os.openpty()
    started = start_code(tmp_path / "told", ON_TERMINAL, os.ttyname(theirs), "explain", str(saved), COLUMNS="110",
                         TERM="xterm")
    assert select.select([ours], [], [], 60)[0], "nothing is shown"
    shown = os.read(ours, 1 << 16)
    os.close(theirs)  # the other process has it open
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    assert started.ended(60).returncode == 0
    lines = re.sub("\x1b\\[[0-9;]*m", "", shown.decode()).splitlines()
    assert any(line.startswith("│ lm_head.weight") for line in lines)
    tabled, plain = ([line for line in text if "total" in line] for text in (lines, piped.splitlines()))
    assert tabled[0].replace("│", " ").split() == plain[0].split()
    assert any(line.startswith("budget") for line in lines)


def test_quantize_writes_a_model(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    result = _forebay("quantize", folder, out, "--weights", "w4g32", "--override", "*.down_proj.*=w8")
    assert result.exit_code == 0, result.output
    formats = json.loads((out / "forebay.json").read_text())["settings"]["formats"]
    assert formats["model.layers.1.mlp.down_proj.weight"] == "w8" and formats["lm_head.weight"] == "native"
    assert formats["model.layers.1.mlp.up_proj.weight"] == "w4g32"
    assert "w4g32" in result.stderr and f"wrote {out}" in result.stderr


def test_eval_measures_a_text(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[:60]), encoding="utf-8")
    result = _forebay("eval", folder, "--text", text, "--context", 32, "--budget", BUDGET, "--json",
                      "--machine", folder / "machine.json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tokens"] == 59 and found["perplexity"] > 1 and found["budget"] == DEVICE
    unknown = _forebay("eval", folder, "--bogus")
    assert unknown.exit_code == 2 and "--bogus" in unknown.stderr


def test_calibrate_measures_the_scores_of_prompts(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "calibration.json"
    result = _forebay("calibrate", folder, "--prompts", folder / "prompts.jsonl", "--output", output, "--budget",
                      "device=4MiB", "--tokens", 8)
    assert result.exit_code == 0, result.output
    assert f"{COUNT} prompts" in result.stderr and json.loads(output.read_text())


def test_calibrate_names_bad_lines_and_cuts_long_prompts(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": \n' + json.dumps({"prompt": "w1 " * 300}) + '\n{"prompt": "  "}\n', encoding="utf-8")
    arguments = ["calibrate", folder, "--prompts", prompts, "--budget", "device=4MiB", "--output"]
    unwritable = _forebay(*arguments, tmp_path / "none" / "out")
    assert unwritable.exit_code == 2 and "none/out: No such file" in unwritable.stderr
    result = _forebay(*arguments, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "line 1: not JSON" in result.stderr and "line 3: the prompt is empty" in result.stderr
    assert json.loads((tmp_path / "out").read_text())["tokens"] == 127  # of the model's 128 positions


def test_allocate_places_the_buffers_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text("id,lower,upper,size\na,0,2,100\nb,1,3,60\nc,2,4,100\n", encoding="utf-8")
    result = _forebay("allocate", "in.csv", "--capacity", "160")
    assert result.exit_code == 0, result.output
    assert "height: 160 bytes" in result.stdout
    offsets = [int(line.split(",")[-1]) for line in Path("in.offsets.csv").read_text().splitlines()[1:]]
    assert offsets[0] == offsets[2] and offsets[1] in (0, 100)
    small = _forebay("allocate", "in.csv", "--capacity", "159")
    assert small.exit_code == 2 and small.stderr.startswith("error: ") and small.stderr.count("\n") == 1


def test_debug_keeps_the_traceback(folder: Path) -> None:
    result = _forebay("plan", folder, "--budget", "gpu=1MiB", "--debug")
    assert isinstance(result.exception, PlanError) and result.exit_code == 1


def test_unknown_option_is_refused(folder: Path) -> None:
    result = _forebay("plan", folder, "--budget", "1MiB", "--bogus")
    assert result.exit_code == 2 and "--bogus" in result.stderr


def test_full_disk_is_one_clear_line(folder: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    result = _forebay(*_run_arguments(folder, Path("/dev/full")))
    assert result.exit_code == 2
    assert "error: /dev/full: No space left on device" in result.stderr


def test_machine_profile_is_shown(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured when there is none, then kept: what --json prints is what the cache holds."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path))
    measured: list[bool] = []

    poor = "link disk to device by direct (R2 0.30)"

    def measure(where: Path, *, quick: bool, progress: Any) -> Machine:
        measured.append(quick)
        progress("disk", 0.5)
        return dataclasses.replace(Machine.default(), guessed=(poor,), others_share=0.4)

    monkeypatch.setattr("forebay.runtime.measure.machine.measure_machine", measure)
    shown = _forebay("machine", "--folder", tmp_path, "--json")
    assert shown.exit_code == 0, shown.output
    kept = machine_cache_path(tmp_path).read_text()
    assert measured == [False] and json.loads(shown.stdout) == json.loads(kept)
    text = _forebay("machine", "--folder", tmp_path, "--measure")
    assert text.exit_code == 0 and "disk to device" in text.stdout and "default-guess" in text.stdout
    assert "others took 40%" in text.stdout and "R2 1.000" in text.stdout
    assert re.search(f"a guess, until.*{re.escape(poor)}", text.stdout)


def test_profile_that_cannot_be_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made with it all the same, after a warning; `forebay machine` refuses before measuring."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "file" / "cache"))
    measured: list[Path] = []

    def measure(where: Path, *, quick: bool, progress: Any) -> Machine:
        measured.append(where)
        return Machine.default()

    monkeypatch.setattr("forebay.runtime.measure.machine.measure_machine", measure)
    refused = _forebay("machine", "--folder", tmp_path)
    assert refused.exit_code == 2 and "FOREBAY_CACHE" in refused.stderr and not measured
    result = _forebay("plan", folder, "--budget", BUDGET)
    assert result.exit_code == 0, result.output
    assert measured == [folder] and "warning: " in result.stderr and "FOREBAY_CACHE" in result.stderr


def test_help_and_import_stay_light() -> None:
    code = ("import sys, forebay, forebay.commands.app; from forebay import Budget, load_plan; "
            "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib')))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "machine" in _forebay("--help").stdout
