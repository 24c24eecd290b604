"""What somebody meets who tries the command for the first time: a prompt, a conversation, what is missing, how much."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from selection import at_length
from serving.served import save_model
from typer.testing import CliRunner, Result

import forebay
from forebay.commands.app import app
from forebay.commands.options import within_positions
from forebay.commands.plan_serving import plan_serving
from forebay.rewriter.planning.options import Options

RUNNER = CliRunner()


def call(*arguments: str, said: str | None = None, exit_code: int = 0) -> Result:
    result = RUNNER.invoke(app, list(arguments), input=said)
    assert result.exit_code == exit_code, result.output + repr(result.exception)
    return result


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """The batch job's greedy answer to a prompt, and what it measured."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "in.jsonl").write_text(json.dumps({"prompt": "The capital of France is"}) + "\n")
    found = call("run", "demo", "--prompts", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl"),
                 "--budget", "200MB", "--new-tokens", "10", "--json", "--picture", str(folder / "memory.svg"))
    drawn = (folder / "memory.svg").read_text()
    assert "budget, Python and threads" in drawn and "cache" in drawn
    return json.loads((folder / "out.jsonl").read_text())["text"], json.loads(found.stdout)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, for what a large one shows no better."""
    save_model(folder := tmp_path_factory.mktemp("small"), 2)
    return str(folder)


@pytest.mark.parametrize("greedy", [(), at_length(("--temperature", "0", "--top-k", "5"))])
def test_one_prompt_is_answered_as_the_job_answers_it(answered: tuple[str, dict], greedy: tuple[str, ...]) -> None:
    found = call("run", "demo", "The capital of France is", "--budget", "200MB", "--new-tokens", "10", *greedy)
    assert found.stdout.strip() == answered[0].strip()
    assert re.search(r"10 tokens: .* s to load, .* s of prefill, .* s of decode", found.stderr)


def test_what_a_run_measured_as_json(answered: tuple[str, dict]) -> None:
    found = answered[1]
    assert found["answers"] == 1 and found["tokens"] == found["steps"] == 10
    assert found["budget_nbytes"] == 200_000_000 >= found["planned_peak_nbytes"]
    parts = found["load_s"] + found["prefill_s"] + found["decode_s"]
    assert min(found["prefill_s"], found["decode_s"], found["load_s"]) > 0 and parts <= found["time_s"]


@pytest.mark.all
def test_a_process_is_as_large_as_plan_said(tmp_path: Path) -> None:
    """In a process of its own, for the suite's own memory is not Python's and its imports'."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "One, two, three,"}) + "\n")
    command = [sys.executable, "-m", "forebay"]
    said = subprocess.run([*command, "plan", "demo", "--budget", "150MB", "--prompt", "16", "--new-tokens", "8"],
                          capture_output=True, text=True, check=True).stdout
    line = next(line for line in said.splitlines() if line.startswith("process "))
    expected, planned, python, beside = (float(x) for x in re.findall(r"([\d.]+) MiB", line))
    assert expected == pytest.approx(python + planned + beside, abs=0.3)
    ran = subprocess.run([*command, "run", "demo", "--prompts", str(tmp_path / "in.jsonl"), "--output",
                          str(tmp_path / "out.jsonl"), "--budget", "150MB", "--new-tokens", "8", "--json"],
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(ran.stdout)["process_peak_nbytes"] / (1 << 20)
    assert 0.8 * measured < expected < 1.35 * measured


def test_a_conversation_goes_on_from_what_was_said(small: str) -> None:
    options = ("chat", small, "--budget", "4MB", "--new-tokens", "6", "--temperature", "0")
    both = call(*options, said="w1 w2 w3\n\nw4 w5\n")
    first = call(*options, said="w1 w2 w3\n").stdout.strip()
    alone = call(*options, said="w4 w5\n").stdout.strip()
    assert both.stdout.startswith(first) and len(both.stderr.splitlines()) == 2
    assert both.stdout.removeprefix(first).strip() != alone, "the second answer did not see the first turn"


def test_answers_are_as_long_as_the_positions_allow(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = "the model has 128 positions: 64 are for an answer, 64 for a prompt\n"
    talked = call("chat", small, "--budget", "4MB", said="w1\n" + "w4 " * 128, exit_code=2).stderr
    assert talked.startswith(said) and talked.endswith("exceed the model's 128 positions; begin anew\n")
    with plan_serving(Path(small), "4MB", Options(batch_slots=1)).lm as lm:
        assert (lm.plan.workload.prompt, lm.plan.workload.new_tokens) == (64, 64)
    assert within_positions(Options(prompt=100), 128, 512, 256).new_tokens == 28
    assert capsys.readouterr().err == said + "the model has 128 positions: 28 are for an answer\n"
    for options in (Options(prompt=128), Options(new_tokens=64)):
        assert within_positions(options, 128, 64, 256) == replace(options, prompt=options.prompt or 64,
                                                                  new_tokens=options.new_tokens or 256)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (("run", "demo"), "name a \"PROMPT\" to answer here"), (("run", "demo", "  "), "the prompt is empty"),
    (("run", "demo", "Hi", "--output", "x"), "--output is for the prompts of a file"),
    (("run", "demo", "Hi", "--json"), "--json is for the prompts of a file"),
    (("run", "demo", "Hi", "--budget", "1GB", "--new-tokens", "8192"), "exceed the model's 8192 positions"),
    (("chat", "demo", "--temperature", "-1"), "temperature: -1.0"), (("chat", "demo", "--top-p", "3"), "top_p: 3.0")])
def test_what_cannot_be_is_said_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    found = call(*arguments, exit_code=2, said="Hi\n")
    assert message in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize(("package", "command"), [("typer", "plan"), at_length("rich", "papers")])
def test_without_the_extra_it_says_what_to_install(tmp_path: Path, package: str, command: str) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('none', name={package!r})")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run([sys.executable, "-m", "forebay", command], capture_output=True, text=True,
                           env=os.environ | {"PYTHONPATH": path})
    assert found.returncode != 0
    assert found.stderr.strip().splitlines()[-1].endswith(f"{package} is not installed; pip install "
                                                          "'forebay[models,cli]'")
    assert "Traceback" not in found.stderr


def test_version_types_and_completion() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", forebay.__version__)
    assert call("--version").stdout.strip() == forebay.__version__
    assert (Path(forebay.__file__).parent / "py.typed").exists()
    assert "--install-completion" in call("--help").stdout


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Forebay's logger as a process begins with it."""
    logger = logging.getLogger("forebay")
    kept = logger.handlers[:], logger.level
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:] = kept[0]
    logger.setLevel(kept[1])


def test_the_logger_is_quiet_until_asked(logger: logging.Logger, small: str) -> None:
    run = ("run", small, "w1", "--budget", "4MB", "--new-tokens", "2")
    quiet = call(*run).stderr
    assert not logger.handlers and logger.level == logging.NOTSET
    heard = call("-vv", *run).stderr
    assert "forebay: " not in quiet
    for part in ("forebay: planned 1 of", "forebay: took memory in", "forebay: made step of 1 tokens"):
        assert part in heard


def test_a_picture_of_a_step(tmp_path: Path, small: str) -> None:
    call("plan", small, "--budget", "900kB", "--picture", str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    wrong = call("plan", small, "--budget", "900kB", "--picture", str(tmp_path / "step.xyz"), exit_code=2)
    assert "cannot write the picture" in wrong.stderr
