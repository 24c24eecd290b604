"""`forebay partition` as it is typed: what is chosen, the frontier, the picture, and bad input in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import families
import pytest
import typer
from typer.testing import CliRunner

from forebay.commands.partition import partition
from forebay.rewriter.machine.mesh_links import RING_STEPS, ExchangeLink, MeshLinks
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.preset_models import PRESET_CONFIGS

app = typer.Typer()
app.command()(partition)


def typed(*arguments: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(app, list(arguments))
    return ran.exit_code, ran.stdout, ran.stderr


def test_choice_memory_and_frontier(tmp_path: Path) -> None:
    picture = tmp_path / "cost.png"
    code, out, _ = typed("palm-8b", "--mesh", "2x2", "--batch", "4", "--pareto", str(picture), "--json")
    found = json.loads(out)
    assert code == 0 and found["chips"] == 4 and found["gap"] < 1e-6 and found["parallel_blocks"]
    memory = found["memory_nbytes"]
    assert memory["margin"] == pytest.approx(memory["capacity"] - memory["weights"] - memory["cache"]
                                             - memory["working"])
    for phase in ("prefill", "decode"):
        mine = [p for p in found["frontier"] if p["phase"] == phase]
        assert [p["latency_s"] for p in mine] == sorted(p["latency_s"] for p in mine) and len(mine) > 3
        costs = [p["chip_seconds_per_token"] for p in mine]
        assert costs == sorted(costs, reverse=True)
        chosen = next(p for p in mine if p["batch"] == 4)  # of the only mesh
        assert chosen["latency_s"] == pytest.approx(found["phases"][phase]["latency_s"])
    assert picture.read_bytes()[:4] == b"\x89PNG" and json.loads(picture.with_suffix(".json").read_text())


def test_a_config_is_enough(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PRESET_CONFIGS["qwen2.5-0.5b"]))
    code, out, _ = typed(str(config), "--mesh", "2", "--machine", "h100", "--batch", "2", "--prompt", "64")
    assert code == 0 and "serial blocks: a prediction\n" in out and "launch   " in out and "left\n" in out
    assert "1D weight-stationary" in out and "torchrun --nproc-per-node=2 " in out


def test_the_command_is_of_the_best_layout_that_runs(tmp_path: Path) -> None:
    """Where a phase takes another one, it is said how far behind the choice that is predicted to be."""
    asked = ("palm-62b", "--mesh", "4x4", "--batch", "4", "--memory", "200GiB")
    code, out, _ = typed(*asked, "--json")
    found = json.loads(out)
    assert code == 0 and found["launch"].endswith("--mesh tensor=4x4,layout=x,attention=batch")
    assert found["launched"]["total_s"] > found["total_s"]
    _, text, _ = typed(*asked)
    above = 100 * (found["launched"]["total_s"] / found["total_s"] - 1)
    assert f"of what runs here the best, {above:.1f} % above the choice" in text


def test_prompts_that_gather_weights_are_launched(tmp_path: Path) -> None:
    """Many tokens, and decode steps in two dimensions beside them."""
    for shape, mesh in (("4x4x4", "tensor=4x4x4,layout=xy"), ("8x8", "layout=x")):
        code, out, _ = typed("palm-540b", "--mesh", shape, "--batch", "512", "--prompt", "2048", "--json")
        found = json.loads(out)
        assert code == 0 and "gathered" in found["launched"]["prefill"]["feedforward"], found["launched"]
        assert found["launch"].split("--mesh ")[1].endswith(",attention=batch") and mesh in found["launch"]


def test_what_is_launched_divides_the_model(tmp_path: Path) -> None:
    """Of a family whose heads stay together, attention over the batch; within its positions, and just that memory."""
    families.falcon().save_pretrained(tmp_path)
    asked = (str(tmp_path), "--mesh", "2", "--machine", "h100", "--prompt", "16", "--new-tokens", "4", "--batch", "4")
    free, kept = (json.loads(typed(model, *asked[1:], "--memory", "1000001", "--json")[1])
                  for model in (str(tmp_path / "config.json"), str(tmp_path)))
    assert "--budget device=1000001 " in kept["launch"] and "attention=batch" in kept["launch"]
    assert "attention=batch" not in free["launch"] and free["launched"]["total_s"] < kept["launched"]["total_s"]
    code, _, errors = typed(*asked[:6], "125", *asked[7:])
    assert code != 0 and "exceed the model's 128 positions" in errors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.rewriter.pipeline.shard_captured.shard_captured", refuse)
        code, out, _ = typed(*asked)
    assert code == 0 and "launch   none of the layouts that run here divides this model: no part of it" in out


def refuse(*given: object) -> None:
    raise ValueError("no part of it")


def test_sums_are_exchanged_in_chunks_where_that_pays(tmp_path: Path) -> None:
    """Of prompts, whose products take as long as exchanges, not of a token's; nowhere, where cores make them."""
    asked = ("llama-3-70b", "--mesh", "8", "--machine", "h100", "--batch", "32")
    code, out, _ = typed(*asked, "--json")
    found = json.loads(out)
    (prefill,), (decode,) = (found["phases"][phase]["layers"] for phase in ("prefill", "decode"))
    assert code == 0 and found["launch"].endswith(f"--mesh tensor=8,chunks={prefill['chunks']}/1")
    assert prefill["chunks"] > 1 == decode["chunks"] and 0 < prefill["hidden_s"] < prefill["communication_s"]
    assert sum(c["what"] == "output partial sums" for c in prefill["collectives"]) == 2 * prefill["chunks"]
    assert f"sums exchanged in {prefill['chunks']} chunks beside products" in typed(*asked)[1]
    links = tuple(ExchangeLink(kind, 2, 1e9, 1e-4) for kind in RING_STEPS)
    for overlap_penalty in (1.0, 0.1):
        machine = replace(Machine.default(), mesh=MeshLinks(2, "gloo", "", links, overlap_penalty=overlap_penalty))
        (profile := tmp_path / f"{overlap_penalty}.json").write_text(machine.to_json())
        code, out, _ = typed("qwen2.5-0.5b", "--mesh", "2", "--machine", str(profile), "--batch", "2", "--weights",
                             "float32", "--json")
        assert code == 0 and ("chunks=" in json.loads(out)["launch"]) == (overlap_penalty < 1)


def test_inputs_are_gathered_in_chunks_where_that_pays(tmp_path: Path) -> None:
    """Beside products of prompts, in two dimensions; nowhere, where cores make exchanges."""
    asked = ("llama-3-70b", "--mesh", "2x4", "--batch", "2")
    code, out, _ = typed(*asked, "--machine", "h100", "--links", "100,300", "--json")
    found = json.loads(out)
    (prefill,), (decode,) = (found["phases"][phase]["layers"] for phase in ("prefill", "decode"))
    chunks, gathers = prefill["chunks"], prefill["gather_chunks"]
    assert code == 0 and found["launch"].endswith(f"layout=2d,chunks={chunks}/1,gather_chunks={gathers}/1")
    assert gathers > 1 == decode["gather_chunks"] and 0 < prefill["hidden_s"] < prefill["communication_s"]
    whats = [c["what"] for c in prefill["collectives"]]
    assert whats.count("inner") == 2 * gathers and whats.count("output partial sums") == 2
    assert f"inputs gathered in {gathers} chunks beside products" in typed(*asked, "--machine", "h100", "--links",
                                                                            "100,300")[1]
    machine = replace(PRESETS["h100"], mesh=MeshLinks(
        2, "nccl", "", tuple(ExchangeLink(kind, 2, 1e11, 1e-5) for kind in RING_STEPS), overlap_penalty=1.0))
    (profile := tmp_path / "held_up.json").write_text(machine.to_json())
    code, out, _ = typed(*asked, "--machine", str(profile), "--json")
    layers = [kind for phase in json.loads(out)["phases"].values() for kind in phase["layers"]]
    assert code == 0 and "chunks" not in json.loads(out)["launch"]
    assert all(kind["chunks"] == kind["gather_chunks"] == 1 and kind["hidden_s"] == 0 for kind in layers)


@pytest.mark.parametrize(("arguments", "message"), [
    (("palm-8b", "--mesh", "4x"), "--mesh 4x"), (("palm-8b", "--mesh", "0x4"), "at least 1 chip"),
    (("nothing", "--mesh", "8"), "palm-540b"), (("palm-8b", "--mesh", "8", "--machine", "t4"), "--links"),
    (("palm-8b", "--mesh", "8", "--links", "a"), "--links a"),
    (("palm-8b", "--mesh", "8", "--links", "1,2"), "2 rates"),
    (("palm-8b", "--mesh", "8", "--weights", "int3"), "int3"),
    (("palm-8b", "--mesh", "8", "--memory", "x"), "--memory"),
    (("palm-8b", "--mesh", "8", "--machine", "none"), "presets are"),
    (("palm-540b", "--mesh", "2x2x2"), "bytes more than there are")])
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = typed(*arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err
