"""The example of each way of use runs as it stands; those of exported files are run in tests/exported."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Checkpointed

EXAMPLES = Path(__file__).parents[1] / "examples"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [f"w{i}" for i in range(1000)]


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(llama_checkpoint: Checkpointed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(llama_checkpoint.folder, folder, dirs_exist_ok=True)
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])},
                                     unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                            pad_token="<pad>").save_pretrained(folder)
    return folder


def test_a_compiled_module(capsys: pytest.CaptureFixture[str]) -> None:
    example("compile_module").main()
    said = capsys.readouterr().out
    found = re.search(r"largest difference from eager: (\S+)", said)
    assert found is not None and float(found[1]) < 1e-4 and "moved: 72 tensors, 18.1 MiB" in said


def test_a_bundle_that_answers(folder: Path, llama_checkpoint: Checkpointed, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    example("export_bundle").main(str(folder), str(tmp_path / "out"), "w5 w7 w11")
    answer = llama_checkpoint.model.generate(_ids([5, 7, 11]), max_new_tokens=16, do_sample=False, pad_token_id=0)
    wanted = [WORDS[i - 4] for i in answer[0].tolist() if i > 3]
    assert capsys.readouterr().out.split()[: len(wanted)] == wanted and len(wanted) > 3


def _ids(numbers: list[int]) -> Any:
    import torch

    return torch.tensor([[n + 4 for n in numbers]])


def test_a_batch_job(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [{"id": f"p{i}", "prompt": " ".join(WORDS[i : i + 3 + i])} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    example("batch_job").main(str(folder), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    said = capfd.readouterr().out
    assert all(re.search(rf"^p{i}: ", said, re.MULTILINE) for i in range(3))


def test_a_job_on_workers_of_ray(folder: Path, llama_checkpoint: Checkpointed, tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, each with a budget; of answers that are there none is made again, and a torn line is."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    spoken = [[5 + i, 7, 11 + 3 * i][: 2 + i % 2] for i in range(5)]
    lines = [{"id": f"p{i}", "prompt": " ".join(WORDS[n] for n in words)} for i, words in enumerate(spoken)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps({"id": "p3", "text": "kept"}) + "\n" + '{"id": "p1", "te')
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        job = example("ray_batch")
        for _ in range(2):  # there is nothing left the second time
            job.main(str(folder), str(tmp_path / "in.jsonl"), str(out), 2, "60MB", 2, 6)
    finally:
        ray.shutdown()
    found = {answer["id"]: answer["text"] for answer in map(json.loads, out.read_text().splitlines())}
    assert len(out.read_text().splitlines()) == 5 and found.pop("p3") == "kept"
    for i, words in enumerate(spoken):
        made = llama_checkpoint.model.generate(_ids(words), max_new_tokens=6, do_sample=False, pad_token_id=0)
        if i != 3:
            ids = made[0, len(words) :].tolist()
            assert found[f"p{i}"].split() == [WORDS[n - 4] for n in ids if n > 3]


@pytest.mark.parametrize(("name", "given", "advice"), [
    ("run_onnx", ("{no}", "w1"), "write one with forebay export MODEL OUT --format onnx"),
    ("run_onnx", ("{model}", "w1"), "write one with forebay export MODEL OUT --format onnx"),
    ("run_onnx", ("{onnx}", ""), "give each at least one"),
    ("run_pt2", ("{no}", "w1"), "write one with forebay export MODEL OUT --format pt2"),
    ("run_pt2", ("{onnx}", "w1"), "write one with forebay export MODEL OUT --format pt2"),
    ("run_genai", ("{no}", "w1"), "write one with forebay export MODEL OUT --format onnx"),
    ("export_bundle", ("{no}", "{out}", "w1"), "expected `demo`, a folder"),
    ("export_bundle", ("{model}", "{model}", "w1"), "holds no exported model"),
    ("export_bundle", ("{model}", "{out}", " "), "give it at least one"),
])
def test_what_cannot_be_is_one_line(
    name: str, given: tuple[str, ...], advice: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    exported = tmp_path / "onnx"
    exported.mkdir()
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(folder / file, exported)
    (exported / "export.json").write_text('{"format": "onnx", "dialect": "microsoft"}')
    batch_slots = {"no": tmp_path / "no", "model": folder, "onnx": exported, "out": tmp_path / "out"}
    monkeypatch.setattr(sys, "argv", [name, *(each.format(**batch_slots) for each in given)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(said) == 1 and advice in said[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.all
def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    cells = json.loads((EXAMPLES / "tutorial.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        exec(compile(cell, "tutorial.ipynb", "exec"), names)
    assert len(code) == 5 and "equal: True" in capsys.readouterr().out
    assert names["speeds"]["60MiB", 8] > names["speeds"]["60MiB", 1] < names["speeds"]["160MiB", 1]
