"""`forebay quantize` as a command: memory bounded, killed and resumed, errors of one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from forked import run_code
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner, Result

from forebay.api import wrap
from forebay.commands.quantize import quantize_command
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import MANIFEST, UNFINISHED, read_dequantized

app = typer.Typer()
app.command()(quantize_command)

pytestmark = pytest.mark.usefixtures("private_cache")  # notes on verified checkpoints are kept there

SMALL = LlamaConfig(vocab_size=128, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
                    intermediate_size=128, max_position_embeddings=64)
# 200 MB in bf16, of which the embedding and the head are 33.5 MB each
LARGE = LlamaConfig(vocab_size=8192, hidden_size=2048, num_attention_heads=16, num_key_value_heads=16,
                    num_hidden_layers=2, intermediate_size=4096, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SMALL).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(LARGE).named_parameters()}
    noise = torch.randn(8192, 2048).bfloat16()
    save_file({name: noise.flatten()[: shape.numel()].reshape(shape).clone() for name, shape in shapes.items()},
              folder / "model.safetensors", {"format": "pt"})
    LARGE.save_pretrained(folder)
    return folder


def _quantize(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_writes_a_folder_with_all_that_a_model_needs(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = _quantize(small, out, "--weights", "w4g64", "--override", "*.down_proj.*=w8", "--rounding", "mse")
    assert result.exit_code == 0, result.output
    assert {p.name for p in out.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", MANIFEST, "weights-00001-of-00001.safetensors"}
    formats = [r.packed.format if r.packed else "native" for r in open_checkpoint(out).tensors.values()]
    assert (formats.count("w4g64"), formats.count("w8")) == (12, 2)
    assert "w4g64" in result.stderr and "12 tensors" in result.stderr


@pytest.mark.parametrize("format", ("native", "w4g64"))
def test_what_the_model_computes_in(small: Path, tmp_path: Path, format: str) -> None:
    """Values are torch's own roundings, codes as without; the model that is run computes and caches in it."""
    assert _quantize(small, tmp_path / "own", "--weights", format).exit_code == 0
    assert _quantize(small, tmp_path / "half", "--weights", format, "--dtype", "bfloat16").exit_code == 0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    own, half = (open_checkpoint(tmp_path / name).tensors for name in ("own", "half"))
    assert sum(record.packed is not None for record in half.values()) == (0 if format == "native" else 14)
    for name, record in half.items():
        assert torch.equal(read_dequantized(record), read_dequantized(own[name]).bfloat16())
        assert (record.packed or record).dtype == torch.bfloat16
    with wrap(tmp_path / "half", 1 << 28) as lm:
        assert lm.captured.dtype == torch.bfloat16 == lm.captured.states[0][0].dtype
        ids = torch.arange(12)[None]
        model = AutoModelForCausalLM.from_pretrained(small).bfloat16() if format == "native" else None
        got = lm.next_logits(ids).float()
        if model is not None:
            want = model(ids).logits[:, -1].float()
            assert (got - want).norm() < 0.02 * want.norm()
    refused = _quantize(small, tmp_path / "no", "--weights", format, "--dtype", "bf16")
    assert refused.exit_code == 2 and "there are bfloat16, float16, float32" in refused.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["--weights", "w4"], "no weight format 'w4'"),
    (["--weights", "w4g64", "--override", "*.foo=w8"], "'*.foo' matches no weight matrix"),
    (["--weights", "w4g64", "--override", "w8"], "expected PATTERN=FORMAT"),
    (["--weights", "keep"], "is for GGUF files"),
    (["--weights", "iq3"], "nothing is rounded to it"),
    (["--weights", "mixed"], "name --bits and --text"),
    ([], "name one of both: --weights FORMAT, or --bits"),
    (["--weights", "w8", "--bits", "4.5"], "name one of both"),
    (["--bits", "4.5"], "--bits 4.5 needs --text FILE"),
    (["--bits", "4.5", "--text", __file__], "tokenizer"),
    (["--weights", "w8", "--rounding", "gptq"], "no rounding 'gptq'"),
    (["--weights", "w8", "--shard-size", "big"], "cannot read 'big'"),
])
def test_mistakes_are_one_line(small: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = _quantize(small, tmp_path / "out", *arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    result = _quantize(tmp_path / "nowhere", tmp_path / "out", "--weights", "w8")
    assert result.exit_code == 2 and "nowhere" in result.stderr


MEASURED = """
import sys, threading, torch
torch.set_num_threads(1)
from forebay.commands.process_memory import MemoryWatch
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
import transformers.models.llama.modeling_llama, transformers.pytorch_utils
small, large, out, format = sys.argv[1:]
quantize_model(small, out + "-warm", Wish(format))  # what imports and allocators take once
MemoryWatch.PERIOD_S = 0.001
with MemoryWatch(()) as memory:
    quantize_model(large, out, Wish(format))
print(memory.peak - memory.before)
"""


@pytest.mark.parametrize("format", ["native", "w4g64"])
def test_memory_stays_within_two_of_the_largest_tensors(small: Path, large: Path, tmp_path: Path, format: str) -> None:
    largest = max(r.nbytes for r in open_checkpoint(large).tensors.values())
    total = open_checkpoint(large).nbytes
    ran = run_code(MEASURED, str(small), str(large), str(tmp_path / "out"), format)
    assert ran.returncode == 0, ran.stderr
    grown = int(ran.stdout.split()[-1])
    assert total > 4 * largest
    assert grown <= 2 * largest, f"{grown} bytes beyond the start, the largest tensor has {largest}"


@pytest.mark.all
def test_killed_and_run_again_it_finishes(large: Path, tmp_path: Path) -> None:
    """SIGKILL once the first file stands: the rest follows, the first stays."""
    out = tmp_path / "out"
    code = ("from forebay.commands.quantize import quantize_command; import typer, sys; app = typer.Typer(); "
            "app.command()(quantize_command); app()")
    command = [sys.executable, "-c", code, str(large), str(out), "--weights", "w8", "--shard-size", "16MiB"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (list(out.glob("weights-*.safetensors")) and list(out.glob("weights-*.draft"))):
        assert process.poll() is None and time.monotonic() < deadline, "no file was ever finished"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / MANIFEST).exists()
    recorded = json.loads((out / UNFINISHED).read_text())["shards"]
    times = {name: os.stat(out / name).st_mtime_ns for name in recorded}
    result = _quantize(large, out, "--weights", "w8", "--shard-size", "16MiB")
    assert result.exit_code == 0, result.output
    made = open_checkpoint(out)
    assert all(os.stat(out / name).st_mtime_ns == at for name, at in times.items())
    source = open_checkpoint(large).tensors
    assert made.tensors.keys() == source.keys() and not list(out.glob("*.draft"))
    name = "model.layers.1.mlp.down_proj.weight"
    packed, original = read_dequantized(made.tensors[name]).float(), read_dequantized(source[name]).float()
    assert (packed - original).abs().max() <= 0.55 * (original.max() - original.min()) / 255
