"""What `forebay serve-plan --save-dir` writes to be launched: it starts what runs, and says what does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from serving.served import save_model
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.commands.serve_launch import launch_of
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.predict.model_shapes import PRESET_MODELS
from forebay.rewriter.serving.goodput import Goodput, Measured, ServiceLevel
from forebay.rewriter.serving.strategies import ServiceWanted, Strategy
from forebay.rewriter.serving.traffic import Traffic

QUICK = ("--requests", "20", "--runs", "1", "--jobs", "1", "--json")
GPUS = ("--model", "llama-3-70b", "--machine", "h100", "--gpus", "8", "--isl", "256", "--osl", "32", *QUICK)


def planned(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["serve-plan", *arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return json.loads(result.stdout)


@contextmanager
def started(script: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A script in a process of its own, and the port that it says it serves at."""
    own = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PORT": "0"} | environment
    with subprocess.Popen([script], env=own, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if " in " in said and (at := said.find("http://127.0.0.1:")) >= 0:
                    yield process, int(said[at + len("http://127.0.0.1:") :].split()[0])
                    break
            else:
                raise AssertionError(said)
        finally:
            process.kill()


@pytest.mark.all
def test_the_script_of_an_instance_serves(tmp_path: Path) -> None:
    save_model(tmp_path)
    default = Machine.default()
    tiers = default.tiers | {"device": replace(default.tiers["device"], capacity_nbytes=1 << 26)}
    save_machine(replace(default, tiers=tiers), tmp_path / "machine.json")
    found = planned("--model", str(tmp_path), "--machine", str(tmp_path / "machine.json"), "--gpus", "1", "--isl", "8",
                    "--osl", "4", "--ttft", "60000", "--tpot", "60000", "--batch", "2", "--save-dir",
                    str(tmp_path / "out"), *QUICK)
    launch = found["launch"]
    assert launch["why_not"] is None and launch["strategy"] == "1m tp1" and launch["model"] == str(tmp_path)
    assert launch["instances"][0]["command"] == (
        f"forebay serve {tmp_path} --budget device=64MiB --batch-slots 2 --prompt 8 --new-tokens 4 --ttft 60000 "
        "--tpot 60000 --isl 8 --osl 4 --port 8000")
    choice = json.loads((tmp_path / "out/choice.json").read_text())
    assert choice["launch"] == launch and choice["best"] == found["strategies"][0]
    assert not (tmp_path / "out/launch.sh").exists()
    with started(tmp_path / "out/instance-1.sh") as (process, port):
        client = HTTPConnection("127.0.0.1", port, timeout=120)
        client.request("POST", "/v1/completions", json.dumps({"prompt": "w1 w2", "max_tokens": 4, "temperature": 0}),
                       {"Content-Type": "application/json"})
        reply = client.getresponse()
        assert reply.status == 200 and json.loads(reply.read())["usage"]["completion_tokens"] >= 1
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_lengths_that_spread_are_served_up_to_the_positions_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text("isl: 5000\nosl: 100\nlength_cv: 0.5\n")
    found = planned("--model", "llama-3-8b", "--machine", "h100", "--gpus", "1", "--tp", "1", "--workload",
                    str(tmp_path / "load.yaml"), *QUICK)
    words = found["launch"]["instances"][0]["command"].split()
    prompt, output = (int(words[words.index(option) + 1]) for option in ("--prompt", "--new-tokens"))
    assert 8190 <= prompt + output <= 8192 and output == 161


def test_what_nothing_runs_is_said_and_what_runs_is_launched_instead(tmp_path: Path) -> None:
    launch = planned(*GPUS, "--osl", "2", "--ttft", "20000", "--tpot", "8000", "--tp", "4", "--instances", "1",
                     "--budget", "40GiB", "--price", "2.5", "--save-dir", str(tmp_path))["launch"]
    assert "several ranks" in launch["why_not"] and launch["instead"] and "offloaded" in launch["strategy"]
    assert launch["job"].startswith("torchrun --nproc-per-node=") and "forebay run MODEL" in launch["job"]
    command = launch["instances"][0]["command"]
    assert "--budget device=40960MiB,host=" in command and command.startswith("CUDA_VISIBLE_DEVICES=0 forebay serve ")
    ran = subprocess.run([tmp_path / "instance-1.sh"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert ran.returncode and "set MODEL to the folder of llama-3-70b" in ran.stderr


def test_several_instances_are_started_and_ended_together(tmp_path: Path) -> None:
    launch = planned(*GPUS[:1], "llama-3-8b", *GPUS[2:], "--tp", "1", "--instances", "2", "--ttft", "500", "--tpot",
                     "50", "--rate", "60", "--save-dir", str(tmp_path))["launch"]
    assert launch["strategy"] == "2m tp1" and [one["port"] for one in launch["instances"]] == [8000, 8001]
    (tmp_path / "forebay").write_text(  # dash may lose a signal that comes while it starts a process
        f"#!{sys.executable}\nimport os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        'print(os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[1:], flush=True)\nwhile True:\n    signal.pause()\n')
    (tmp_path / "forebay").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "/m"}
    with subprocess.Popen([tmp_path / "launch.sh"], env=environment, stdout=subprocess.PIPE, text=True) as all_of_them:
        assert all_of_them.stdout is not None
        said = sorted(all_of_them.stdout.readline() for _ in range(2))
        assert [line.split()[:3] for line in said] == [["0", "serve", "/m"], ["1", "serve", "/m"]]
        assert [line.split()[-1] for line in said] == ["8000", "8001"]
        all_of_them.terminate()
        assert all_of_them.wait(60) == 0


def test_prefill_and_decode_apart_are_launched_in_pairs() -> None:
    service = ServiceWanted(PRESET_MODELS["llama-3-8b"], PRESETS["h100"], Traffic(1.0, 20, 256, 32))
    at = Measured(1.0, 0.1, 0.01, 0.0, 0.0)
    found = [Goodput(Strategy(prefill=p, decode=d), 1.0, at, None) for p, d in ((2, 1), (2, 2))]
    launch = launch_of(found, service, ServiceLevel(1.0, 1.0), None, "m")
    assert "one process that decodes" in launch["why_not"] and launch["strategy"] == "2p2d tp1"
    commands = [one["command"] for one in launch["instances"]]
    assert [command.split()[0] for command in commands] == [f"CUDA_VISIBLE_DEVICES={i}" for i in range(4)]
    assert [f"--role {role} --handoff decode-{i}.sock" in command and "--ttft" not in command for command, (i, role)
            in zip(commands, product((1, 2), ("decode", "prefill")), strict=True)] == [True] * 4


@pytest.mark.parametrize(("arguments", "why"), [
    (("--machine", "tpu-v4", "--tp", "4"), "not on TPU"), (("--machine", "h100", "--tp", "4"), "several ranks")])
def test_no_command_is_made_up(arguments: tuple[str, ...], why: str) -> None:
    launch = planned(*GPUS[:2], *GPUS[4:], *arguments, "--instances", "1", "--ttft", "9000", "--tpot", "900")["launch"]
    assert why in launch["why_not"] and launch["instances"] == [] and launch["strategy"] is None
    assert (launch["job"] is None) == ("TPU" in why)
