"""A pipe or a device in the place of any file that is read ends a command at once with one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import forebay
from forebay.commands.app import app
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.machine.profile import Machine, save_machine

LIMIT_S = 60  # of what takes less than a second
SPECIAL: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero")}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, the same quantized, one of shards, prompts, a plan, a calibration and a profile."""
    folder = tmp_path_factory.mktemp("special")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32))
    model.save_pretrained(folder / "model")
    vocabulary = {f"w{i}": i for i in range(64)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="w0"))
                            ).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    shutil.copytree(folder / "model", folder / "shards")
    (folder / "shards/model.safetensors").unlink()
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    quantize_model(folder / "model", folder / "quantized", Wish("w8g32"))
    (folder / "prompts").write_text(json.dumps({"prompt": "w1 w2"}) + "\n")
    save_machine(Machine.default(), folder / "machine")
    with forebay.wrap(folder / "model", "device=1MiB", prompt=4, new_tokens=2, machine=Machine.default()) as lm:
        lm.plan.save(folder / "plan")
    for name in ("calibration", "text", "words", "buffers", "trace", "workload", "model.gguf"):
        (folder / name).write_text("{}")
    return folder


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """End what takes longer; a pipe would be waited for without an end."""
    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


RUN = ("--prompts", "prompts", "--output", "answers", "--budget", "device=1MiB", "--machine", "machine",
       "--new-tokens", "2")
CASES = [
    *((f"model/{name}", ("run", "model", "w1", "--budget", "device=1MiB")) for name in (
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
        "chat_template.jinja")),
    *((f"model/{name}", ("chat", "model", "--budget", "device=1MiB")) for name in (
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
    *((f"shards/{name}", ("run", "shards", *RUN)) for name in (
        "config.json", "model.safetensors.index.json", "model-00001-of-00004.safetensors")),
    *((f"quantized/{name}", ("run", "quantized", *RUN)) for name in (
        "config.json", "forebay.json", "weights-00001-of-00001.safetensors")),
    *((name, ("run", "model", *RUN)) for name in ("machine", "prompts")),
    ("calibration", ("run", "model", *RUN, "--calibration", "calibration")),
    ("answers.settings", ("run", "model", *RUN)),
    ("plan", ("run", "model", *RUN, "--plan", "plan")),
    ("plan", ("explain", "plan")),
    ("model.gguf", ("run", "model.gguf", *RUN)),
    ("model.gguf", ("quantize", "model.gguf", "out", "--weights", "w8g32")),
    ("model/config.json", ("quantize", "model", "out", "--weights", "w8g32")),
    ("model/config.json", ("serve-plan", "--model", "model/config.json")),
    ("model/config.json", ("plan", "model", "--budget", "device=1MiB", "--machine", "machine")),
    ("text", ("eval", "model", "--text", "text")),
    ("words", ("eval", "model", "--words", "words")),
    ("buffers", ("allocate", "buffers")),
    ("workload", ("serve-plan", "--model", "model/config.json", "--workload", "workload")),
]


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(("file", "command"), CASES, ids=[f"{c[0]}-{f}" for f, c in CASES])
def test_a_command_ends_at_once(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, command: tuple[str, ...], kind: str
) -> None:
    place = tmp_path / "place"
    shutil.copytree(origin, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    if file == "answers.settings":
        (place / "answers").write_text('{"id": 1, "prompt": "w1 w2", "text": "", "tokens": 1}\n')
    else:
        (place / file).unlink()
    SPECIAL[kind](place / file)
    with at_most(LIMIT_S):
        done = CliRunner().invoke(app, list(command))
    assert done.exit_code == 2, done.output
    said = done.stderr.strip().splitlines()[-1]
    assert Path(file).name in said and (kind in said or file == "answers.settings"), said
