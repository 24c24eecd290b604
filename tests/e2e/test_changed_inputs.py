"""A job whose inputs change: between two runs, under a running one, or with their times set back."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import ALL, at_length
from transformers import LlamaForCausalLM

from forebay.calibrate import calibrate
from forebay.commands.jobs import AnswerFile
from forebay.rewriter.checkpoints.checkpoint import read_header
from tests.e2e.test_cli import COUNT, DEVICE, _answers, _forebay, _run_arguments, folder, reference

__all__ = ["folder", "reference"]  # fixtures


@pytest.fixture
def half(folder: Path, reference: dict[Any, Any], tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the model's folder, and a job on it of which half the answers are written."""
    model, output = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(folder, model)
    lines = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[: COUNT // 2]))
    result = _forebay(*_run_arguments(model, output, prompts=tmp_path / "few.jsonl"))
    assert result.exit_code == 0 and len(_answers(output)) == COUNT // 2, result.output
    return model, output


def _another_model(model: Path) -> None:
    """Same shapes, sizes and config; other weights, written at the same time."""
    before = os.stat(model / "model.safetensors")
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaForCausalLM.from_pretrained(model).config).save_pretrained(model / "other")
    (model / "other" / "model.safetensors").replace(model / "model.safetensors")
    os.utime(model / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))


def _one_byte(model: Path) -> None:
    """Where no sample is taken, with the time set back."""
    path = model / "model.safetensors"
    before = os.stat(path)
    largest = max(read_header(path).values(), key=lambda record: record.nbytes)
    with path.open("r+b") as file:
        file.seek(largest.offset)
        file.write(b"\x01")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _another_vocabulary(model: Path) -> None:
    path = model / "tokenizer.json"
    path.write_text(path.read_text().replace('"w1":', '"x":').replace('"w2":', '"w1":').replace('"x":', '"w2":'))


def _another_template(model: Path) -> None:
    for path in (model / "tokenizer_config.json", model / "chat_template.jinja"):
        if path.exists():
            path.write_text(path.read_text().replace("w9", "w8"))


def _another_end(model: Path) -> None:
    settings = json.loads((model / "generation_config.json").read_bytes())
    (model / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 5}))


@pytest.mark.parametrize(("change", "part"), [
    at_length(_another_model, "with another model"), (_one_byte, "before the model's files were last written"),
    (_another_vocabulary, "with another tokenizer"), at_length(_another_template, "with another"),
    at_length(_another_end, "with eos [2]")])
def test_answers_of_two_models_are_not_mixed(folder: Path, half: tuple[Path, Path], change: Any, part: str) -> None:
    model, output = half
    change(model)
    before = output.read_bytes()
    refused = _forebay(*_run_arguments(model, output))
    assert refused.exit_code == 2 and part in refused.stderr and refused.stderr.count("\n") == 1, refused.output
    assert output.read_bytes() == before
    if change is _one_byte or ALL:
        forced = _forebay(*_run_arguments(model, output), "--force")
        assert forced.exit_code == 0 and len(_answers(output)) == COUNT, forced.output


def test_answers_of_two_calibrations_are_not_mixed(
    folder: Path, half: tuple[Path, Path], reference: dict[Any, Any], tmp_path: Path
) -> None:
    """On a GPU another range rounds otherwise; the job that was begun with a calibration goes on with it alone."""
    model, output = half
    found = calibrate(folder, [torch.arange(3, 12)], {"device": DEVICE, "disk": str(tmp_path)})
    shifted = replace(found, layers=tuple(replace(s, largest=s.largest + 1) for s in found.layers))
    for name, each in (("ranges", found), ("others", shifted)):
        each.save(tmp_path / f"{name}.json")

    def run(*more: str) -> Any:
        return _forebay(*_run_arguments(model, output, prompts=tmp_path / "few.jsonl"), *more)

    refused = run("--calibration", str(tmp_path / "ranges.json"))
    assert refused.exit_code == 2 and "does not say with which calibration" in refused.stderr, refused.output
    output.unlink()
    assert run("--calibration", str(tmp_path / "ranges.json")).exit_code == 0
    for more in (("--calibration", str(tmp_path / "others.json")), ()):
        refused = run(*more)
        assert refused.exit_code == 2 and "with another calibration" in refused.stderr, refused.output
    assert run("--calibration", str(tmp_path / "ranges.json")).exit_code == 0


def test_an_unchanged_model_goes_on(folder: Path, half: tuple[Path, Path], reference: dict[Any, Any]) -> None:
    model, output = half
    result = _forebay(*_run_arguments(model, output))
    assert result.exit_code == 0 and _answers(output) == reference, result.output


@pytest.mark.parametrize(("after", "how"), [
    (0, "replaced"), at_length(1, "in place"), at_length(1, "replaced"), (4, "in place")])
def test_nothing_computed_from_changed_weights_is_written(
    folder: Path, reference: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, how: str
) -> None:
    """The file is overwritten, and its time set back, while the job runs."""
    model, output = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(folder, model)
    path, write, steps = model / "model.safetensors", AnswerFile.write, 0

    def spoil() -> None:
        before = os.stat(path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2 :] = os.urandom(len(content) - len(content) // 2)
        if how == "in place":
            with path.open("r+b") as file:
                file.write(content)
        else:
            (model / "new").write_bytes(content)
            (model / "new").replace(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def writing(self: AnswerFile, answer: Any) -> None:
        nonlocal steps
        write(self, answer)
        steps += 1
        if steps == after:
            spoil()

    monkeypatch.setattr(AnswerFile, "write", writing)
    if not after:
        from forebay.language_model import LanguageModel

        reserve = LanguageModel._reserve
        monkeypatch.setattr(LanguageModel, "_reserve", lambda self, *a: (reserve(self, *a), spoil())[0])
    result = _forebay(*_run_arguments(model, output))
    assert result.exit_code == 2, result.output
    assert "model.safetensors was changed or replaced while it was in use" in result.stderr
    found = _answers(output)
    assert len(found) == after and all(found[name] == reference[name] for name in found)


def test_generate_does_not_return_what_came_from_changed_weights(folder: Path, tmp_path: Path) -> None:
    import forebay
    from forebay.rewriter.checkpoints.records import CheckpointError

    model = tmp_path / "model"
    shutil.copytree(folder, model)
    with forebay.wrap(model, DEVICE, prompt=4, new_tokens=4) as lm:
        assert lm.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)
        with pytest.raises(CheckpointError, match="changed or replaced"):
            lm.generate(torch.tensor([[5, 6]]), max_new_tokens=3, on_token=lambda _: _one_byte(model))
        with pytest.raises(CheckpointError, match="changed or replaced"):
            lm.next_logits(torch.tensor([[5, 6]]))


@pytest.mark.parametrize("seen", [at_length(True), False])
def test_a_tampered_shard_with_its_time_set_back_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """Also where no note says what passed before, and by --verify even where the note is forged."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    assert _forebay("quantize", folder, model, "--weights", "w8g32").exit_code == 0
    shutil.copy(folder / "prompts.jsonl", tmp_path / "prompts.jsonl")
    arguments = _run_arguments(model, tmp_path / "out", prompts=tmp_path / "prompts.jsonl",
                               machine=folder / "machine.json", budget="device=2MiB")
    assert _forebay(*arguments, "--verify").exit_code == 0
    (shard,) = model.glob("*.safetensors")
    before = os.stat(shard)
    with shard.open("r+b") as file:
        file.seek(9000)
        file.write(b"\x77" * 64)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    if not seen:
        shutil.rmtree(tmp_path / "cache" / "verified")
    result = _forebay(*arguments)
    assert result.exit_code == 2 and "altered or damaged" in result.stderr, result.output
    (tmp_path / "cache" / "verified").mkdir(exist_ok=True)
    from forebay.rewriter.checkpoints.packed import open_quantized, remember_verified

    remember_verified(open_quantized(model, check="never"))
    assert _forebay("plan", model, "--budget", "device=2MiB", "--machine", folder / "machine.json").exit_code == 0
    verified = _forebay(*arguments, "--verify")
    assert verified.exit_code == 2 and "altered or damaged" in verified.stderr, verified.output


def test_verify_needs_checksums(folder: Path, tmp_path: Path) -> None:
    result = _forebay(*_run_arguments(folder, tmp_path / "out"), "--verify")
    assert result.exit_code == 2 and "has no checksums to compare" in result.stderr
