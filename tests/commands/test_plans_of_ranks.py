"""Plans of all ranks: written by `forebay partition` and `forebay plan`, shown, and run by what `partition` prints."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import families
import pytest
import torch
import transformers as T
from forked import start_code
from selection import ALL, at_length
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.read_mesh import read_mesh
from forebay.rewriter.ir.plan import PlanError, load_plan
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.pipeline.plan_ranks import Steps, require_alike

COMMAND = "import sys; from forebay.commands.cli import main; main()"
PROMPTS = ["w5 w17 w80 w33", "w7 w150", "w60 w61 w12", "w9 w9 w9 w9 w9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads share keys and values, with its tokenizer and the profile of a machine."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = T.AutoModelForCausalLM.from_config(families.llama(2, num_key_value_heads=1, eos_token_id=None))
    for p in model.parameters():
        p.data.normal_(0, 0.3 if p.dim() > 1 else 0.1)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(families.VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    T.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)
    save_machine(Machine.default(), path / "machine.json")
    (path / "in.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    return path


def typed(*arguments: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(app, list(arguments))
    return ran.exit_code, ran.stdout, ran.stderr


def launched(command: Sequence[str], told: Path) -> list[CompletedProcess[str]]:
    """What ranks come to that torchrun would start with this command; with FOREBAY_TEST_ALL it does."""
    run, ranks, no_python, forebay, *arguments = command
    count = int(ranks.removeprefix("--nproc-per-node="))
    assert (run, no_python, forebay) == ("torchrun", "--no-python", "forebay")
    if ALL:
        python = [sys.executable, "-m", "torch.distributed.run", ranks, "-m", "forebay", *arguments]
        return [subprocess.run(python, capture_output=True, text=True, timeout=300, check=False)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [start_code(told / f"rank{rank}", COMMAND, *arguments, RANK=str(rank), WORLD_SIZE=str(count),
                          LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
               for rank in range(count)]
    return [each.ended(300) for each in started]


def answers(path: Path) -> list[str]:
    return [answer["text"] for answer in sorted(map(json.loads, path.read_text().splitlines()),
                                                  key=lambda answer: answer["id"])]


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One device's answers."""
    out = tmp_path_factory.mktemp("one") / "out.jsonl"
    code, _, error = typed("run", str(folder), "--prompts", str(folder / "in.jsonl"), "--output", str(out), "--budget",
                           "device=4MB", "--new-tokens", "6", "--machine", str(folder / "machine.json"))
    assert code == 0, error
    return answers(out)


@pytest.mark.all
@pytest.mark.parametrize(("mesh", "rates"), [at_length("4", "1"), ("2x2", "0.5,100")])
def test_the_command_that_is_printed_runs_with_the_plans_that_are_written(
    folder: Path, tmp_path: Path, expected: list[str], mesh: str, rates: str
) -> None:
    """One axis whose links are slow makes two dimensions the better layout."""
    plans, out, machine = tmp_path / "plans", tmp_path / "out.jsonl", str(folder / "machine.json")
    code, text, error = typed("partition", str(folder), "--mesh", mesh, "--machine", machine, "--links", rates,
                              "--memory", "900kB", "--batch", "4", "--prompt", "8", "--new-tokens", "6", "--weights",
                              "float32", "--plans", str(plans), "--json")
    assert code == 0, error
    found = json.loads(text)
    command = shlex.split(found["launch"].replace("IN.jsonl", str(folder / "in.jsonl")).replace("OUT.jsonl", str(out)))
    shape = command[-1]
    assert ("layout=2d" in shape) == (mesh == "2x2")
    named = [load_plan(plans / f"rank{rank}.json").fingerprint.partition(" ")[2] for rank in range(4)]
    assert named == [f"rank {rank} of {read_mesh(shape).mesh}" for rank in range(4)]
    ended = launched([*command, "--new-tokens", "6", "--machine", machine], tmp_path)
    assert [each.returncode for each in ended] == [0] * len(ended), ended[0].stderr
    assert answers(out) == expected
    code, shown, _ = typed("explain", str(plans / "rank3.json"))
    assert code == 0 and "rank 3 of" in shown


def test_plan_shows_a_rank_and_writes_all_and_ranks_of_a_job_write_theirs(
    folder: Path, tmp_path: Path, expected: list[str]
) -> None:
    """Those that a job saves are those that one process makes, and go with nobody else's."""
    plans, machine, out = tmp_path / "plans", str(folder / "machine.json"), tmp_path / "out.jsonl"
    shape = ("--batch", "4", "--prompt", "5", "--new-tokens", "6")
    code, text, error = typed("plan", str(folder), "--mesh", "tensor=2,attention=batch", "--budget", "device=700kB",
                              *shape, "--machine", machine, "--save-plan", str(plans), "--rank", "1")
    assert code == 0, error
    assert "rank 1 of tensor=2,attention=batch" in text and "decode step" in text.splitlines()[-1]
    job = ["run", str(folder), "--prompts", str(folder / "in.jsonl"), "--output", str(out), "--budget", "device=700kB",
           "--new-tokens", "6", "--batch", "4", "--machine", machine, "--mesh", "tensor=2,attention=batch",
           "--prompt-lookup-num-tokens", "none"]
    ended = launched(["torchrun", "--nproc-per-node=2", "--no-python", "forebay", *job, "--save-plan",
                      str(tmp_path / "saved")], tmp_path)
    assert [each.returncode for each in ended] == [0] * len(ended), ended[0].stderr
    assert answers(out) == expected
    for rank in range(2):
        own, saved = (load_plan(path / f"rank{rank}.json") for path in (plans, tmp_path / "saved"))
        assert own.weights == saved.weights and own.buffers == saved.buffers and own.gemm == saved.gemm
        assert own.fingerprint == saved.fingerprint
    other = load_plan(plans / "rank1.json")
    require_alike([Steps.of(load_plan(plans / "rank0.json")), Steps.of(other)])
    with pytest.raises(PlanError, match="the plan of rank 1 has other steps than that of rank 0"):
        require_alike([Steps.of(other), Steps.of(replace(other, cache_format="kv8"))])
    replace(other, schedule=replace(other.schedule, prefill_chunks=(4,)), gemm=(), buffers=tuple(
        b for b in other.buffers if b.kind not in ("activation", "io"))).save(plans / "rank1.json")
    job[job.index("--output") + 1] = str(tmp_path / "other.jsonl")
    ended = launched(["torchrun", "--nproc-per-node=2", "--no-python", "forebay", *job, "--plan", str(plans)], tmp_path)
    assert ended[0].returncode != 0 and "rank 1" in ended[0].stderr


def test_what_cannot_be_is_one_line(folder: Path, tmp_path: Path) -> None:
    machine, plans = str(folder / "machine.json"), tmp_path / "plans"
    budget = ("--budget", "device=700kB", "--machine", machine)
    for arguments, message in (
            (("plan", str(folder), "--rank", "1", *budget), "--rank is for the plans of a --mesh"),
            (("plan", str(folder), "--mesh", "2", "--rank", "2", *budget), "ranks 0 to 1"),
            (("plan", "--config", "opt-6.7b", "--mesh", "2", "--machine", "t4"), "--mesh is for the weights"),
            (("plan", str(folder), "--mesh", "2", "--picture", str(tmp_path / "a.png"), *budget), "of one device"),
            (("plan", str(folder), "--mesh", "2", "--draft", "w4", *budget), "leave it or --draft out"),
            (("plan", str(folder), "--mesh", "8", *budget), "8 ranks cannot share 4 heads"),
            (("plan", str(folder), "--mesh", "stages=2,tensor=2x2,layout=xyz", *budget), "without stages"),
            (("plan", str(folder), "--mesh", "2", "--budget", "device=9kB", "--machine", machine), "rank 0: "),
            (("partition", "palm-8b", "--mesh", "2", "--plans", str(plans)), "is no folder with a model's weights")):
        code, out, error = typed(*arguments)
        assert code == 2 and out == "" and error.count("error: ") == 1 and message in " ".join(error.split()), error
    assert not plans.exists()
    plans.mkdir()
    (plans / "rank2.json").write_text("{}")
    code, _, error = typed("plan", str(folder), "--mesh", "2", "--save-plan", str(plans), *budget)
    assert code == 2 and "more than 2 ranks" in error
