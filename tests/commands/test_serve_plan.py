"""`forebay serve-plan` as it is typed: a table, JSON, pictures, a workload in YAML, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from forebay.commands.app import app

RUNNER = CliRunner()
QUICK = ("--model", "llama-3-8b", "--machine", "h100", "--gpus", "2", "--requests", "40", "--runs", "2", "--jobs", "1",
         "--ttft", "100", "--tpot", "15")


def call(*arguments: str, exit_code: int = 0) -> Result:
    result = RUNNER.invoke(app, ["serve-plan", *arguments])
    assert result.exit_code == exit_code, result.output + repr(result.exception)
    return result


def test_a_table_says_what_serves() -> None:
    shown = call(*QUICK, "--rate", "5", "--price", "2.5").stdout
    assert "llama-3-8b on h100" in shown and "left out: tp 4, tp 8: an instance takes more" in shown
    rows = [line.split() for line in shown.splitlines() if " tp1 " in line or " tp2 " in line]
    assert [row[:2] for row in rows[:1]] == [["1m", "tp1"]] and len(rows) == 4 and all("yes" in row for row in rows)
    assert call(*QUICK, "--rate", "5", "--price", "2.5").stdout == shown


def test_json_and_pictures(tmp_path: Path) -> None:
    found = json.loads(call(*QUICK, "--tp", "1", "--json", "--save-dir", str(tmp_path / "new")).stdout)
    assert [row["devices"] for row in found["strategies"]] and found["refused"] == {}
    best = found["strategies"][0]
    assert best["goodput_per_device"] == max(row["goodput_per_device"] for row in found["strategies"]) > 0
    assert best["serves_rate"] is None and best["cost_per_million_tokens"] is None
    for name in ("times.png", "against_rate.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "new" / "serve_plan.json").read_text())["strategies"] == found["strategies"]


def test_a_workload_file_and_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("".join(
        json.dumps({"arrival": i / 2, "prompt": 100 + 10 * i, "output": 10 + i}) + "\n" for i in range(9)))
    (tmp_path / "load.yaml").write_text("rate: 3\nttft: 300\ntpot: 20\npercentile: 95\ntrace: trace.jsonl\n")
    arguments = ("--model", "llama-3-8b", "--machine", "h100", "--gpus", "1", "--requests", "40", "--runs", "1",
                 "--jobs", "1", "--workload", str(tmp_path / "load.yaml"), "--json")
    found = json.loads(call(*arguments).stdout)
    assert (found["isl"], found["osl"], found["percentile"], found["rate"]) == (140, 14, 95, 3)
    assert json.loads(call(*arguments, "--rate", "4").stdout)["rate"] == 4
    assert "a trace says how long" in call(*arguments, "--isl", "5000", exit_code=2).stderr
    (tmp_path / "trace.jsonl").write_text('{"arrival": 0, "prompt": 1.5, "output": 1}\n')
    assert "line 1: prompt and output are whole numbers" in call(*arguments, exit_code=2).stderr
    (tmp_path / "trace.jsonl").write_text('{"arrival": 0, "prompt": 5000, "output": 9000}\n')
    assert "14000 tokens go beyond the 8192 positions" in call(*arguments, exit_code=2).stderr
    (tmp_path / "trace.jsonl").write_text('{"arrival": 0, "prompt": 50, "output": 90}\n')
    assert json.loads(call(*arguments).stdout)["isl"] == 50
    call(*QUICK, "--rate", "1e300", "--gpus", "1", "--tp", "1", "--instances", "1")  # no traceback


def test_a_model_with_recurrent_layers_is_served(tmp_path: Path) -> None:
    """Granite 4.0 H Small."""
    config = {"model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 10, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 100352, "num_local_experts": 72, "num_experts_per_tok": 10,
              "intermediate_size": 768, "shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_head": 64,
              "mamba_d_state": 128, "layer_types": ["mamba"] * 9 + ["attention"],
              "dtype": "bfloat16", "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("--model", str(tmp_path / "config.json"), *QUICK[2:])
    found = json.loads(call(*model, "--tp", "1", "--gpus", "1", "--budget", "5GB", "--runs", "1", "--isl", "256",
                            "--osl", "8", "--ttft", "9000", "--tpot", "900", "--json").stdout)
    assert found["strategies"][0]["strategy"] == "1m tp1" and found["strategies"][0]["goodput"] > 0
    assert any(row["offloaded_batch"] for row in found["strategies"])
    assert not any(row["checkpoint_share"] for row in found["strategies"])  # these are of K and V alone
    explored = RUNNER.invoke(app, ["plan", "--config", str(tmp_path / "config.json"), "--explore", "--machine", "h100"])
    assert explored.exit_code == 2 and "--explore places K and V, and this model keeps other states" in explored.stderr


def test_a_model_that_fits_no_device_is_served_by_one_that_streams() -> None:
    shown = call("--model", "codellama-34b", "--machine", "rtx4090", "--gpus", "1", "--isl", "256", "--osl", "8",
                 "--ttft", "60000", "--tpot", "9000", "--requests", "30", "--runs", "1", "--jobs", "1").stdout
    assert "1 offloaded" in shown and "cache on host" in shown and "does not fit 1 x rtx4090" in shown
    assert "launch 1 offloaded" in shown and "forebay serve MODEL --budget device=" in shown


def test_offloading_on_a_cheaper_device_is_ranked_by_its_price() -> None:
    """A tenth of the price for more than a tenth of the load: first, though it serves less."""
    found = json.loads(call("--model", "opt-13b", "--machine", "h100", "--offload-machine", "rtx4090", "--price", "3",
                            "--offload-price", "0.05", "--gpus", "1", "--isl", "256", "--osl", "8", "--ttft", "2000",
                            "--tpot", "600", "--requests", "30", "--runs", "1", "--jobs", "1", "--json").stdout)
    rows = found["strategies"]
    assert [row["machine"] for row in rows] == ["rtx4090", "rtx4090", "h100"]
    assert rows[0]["goodput"] < rows[2]["goodput"] and rows[0]["price_per_hour"] == 0.05
    costs = [row["cost_per_million_tokens"] for row in rows]
    assert costs == sorted(costs)
    assert [row["checkpoint_share"] is None for row in rows] == [False, False, True]


@pytest.mark.parametrize(("arguments", "said"), [
    (("--rate", "-1"), "--rate"), (("--rate", "nan"), "--rate"), (("--ttft", "0"), "ttft"), (("--isl", "0"), "isl"),
    (("--ttft", "inf"), "ttft: inf ms"), (("--tpot", "-5"), "tpot: -5 ms"),
    (("--price", "0"), "--price"), (("--price", "1", "--offload-price", "0"), "--offload-price"),
    (("--offload-price", "1"), "--price"), (("--tp", "1,x"), "--tp"), (("--tp", ""), "--tp"), (("--tp", "8"), "--gpus"),
    (("--machine", "nosuch"), "presets are"), (("--model", "nosuch"), "presets are"), (("--budget", "x"), "--budget"),
    (("--paper", "--chunk", "64"), "--chunk"), (("--paper", "--budget", "8GiB"), "--budget"),
    (("--paper", "--offload-machine", "rtx4090"), "--offload-machine"), (("--chunk", "8"), "chunk"),
    (("--workload", "/nosuch.yaml"), "No such file"), (("--prefill-batch", "9999999"), "--tp"),
    (("--isl", "8000", "--osl", "193"), "8193 tokens go beyond the 8192 positions")])
def test_what_cannot_be_meant_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = call(*QUICK, *arguments, exit_code=2)
    assert said in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(("text", "said"), [
    ("rat: 1\n", "there is no 'rat'"), ("- 1\n", "expected fields"), ("rate: [\n", "not YAML"), ("isl: 1.5\n", "isl"),
    ("rate: true\n", "rate"), ("trace: 3\n", "trace"), ("trace: none.jsonl\n", "No such file"),
    ("shared_prefix: 4096\n", "shared_prefix"), ("percentile: 0\n", "percentile"), ("arrival_cv: -1\n", "arrival_cv")])
def test_a_wrong_workload_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    path.write_text(text)
    result = call(*QUICK, "--workload", str(path), exit_code=2)
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_a_prefix_has_no_place_in_paper_mode(tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    path.write_text("shared_prefix: 64\n")
    assert "shared_prefix: --paper" in call(*QUICK, "--paper", "--workload", str(path), exit_code=2).stderr
