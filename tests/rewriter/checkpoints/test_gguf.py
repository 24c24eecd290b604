import os
import signal
import struct

import gguf
import numpy as np
import pytest
import torch
from forked import run_code
from safetensors.torch import load_file
from tiny_gguf import CONFIGS, write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import forebay.rewriter.checkpoints.write_tensors as writing
from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.gguf_architectures import ARCHITECTURES
from forebay.rewriter.checkpoints.gguf_config import read_gguf_config
from forebay.rewriter.checkpoints.gguf_header import read_gguf
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.records import CheckpointError


def loaded_by_transformers(path) -> dict[str, torch.Tensor]:
    header = read_gguf(path)
    own = {"config": read_gguf_config(header)} if header.get("expert_count") else {}  # it does not read experts' widths
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **own)
    return model.state_dict()


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [(name, tied) for name in CONFIGS if name in ARCHITECTURES for tied in (True, False)
     if tied or not name.startswith("gemma")],  # which is always tied
)
def test_equals_transformers_bit_for_bit(tmp_path, architecture, tied):
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    write_model(path, architecture, tied)
    expected = loaded_by_transformers(path)
    assert convert_gguf(path, out) == out
    written = load_file(out / "model.safetensors")
    assert ("lm_head.weight" in written) is not tied
    assert expected.keys() - written.keys() <= {"lm_head.weight"} and written.keys() <= expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in written.items())

    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32 and type(model).__name__ == model.config.architectures[0]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(out)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert tokenizer("hello there").input_ids == reference("hello there").input_ids
    assert model.generation_config.eos_token_id == model.config.eos_token_id


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_the_rounded_float32(tmp_path, dtype):
    write_model(tmp_path / "m.gguf", "llama")
    full = load_file(convert_gguf(tmp_path / "m.gguf", tmp_path / "full") / "model.safetensors")
    half = load_file(convert_gguf(tmp_path / "m.gguf", tmp_path / "half", dtype=dtype) / "model.safetensors")
    assert all(torch.equal(half[name], value.to(getattr(torch, dtype))) for name, value in full.items())
    assert AutoConfig.from_pretrained(tmp_path / "half").dtype == getattr(torch, dtype)
    with pytest.raises(CheckpointError, match="choose one of float32"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "int", dtype="int8")


def test_progress_counts_every_byte(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen2")
    seen: list[tuple[int, int]] = []
    out = convert_gguf(tmp_path / "m.gguf", tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    total = open_checkpoint(out).nbytes
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1] == (total, total)


def test_nothing_remains_of_a_failed_conversion(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", drop="blk.1.ffn_up")
    with pytest.raises(CheckpointError, match=r"incomplete: no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    write_model(tmp_path / "m.gguf", "llama")
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", progress=interrupt)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_too_little_space_is_known_before_anything_is_written(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf", "llama")
    monkeypatch.setattr(writing, "_free_nbytes", lambda folder: 1000)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)  # not reached
    with pytest.raises(CheckpointError, match=r"not enough disk space: .* 1000 free"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_a_killed_conversion_is_not_taken_for_a_finished_one(tmp_path):
    write_model(tmp_path / "m.gguf", "llama")
    code = (
        "import os, signal, sys; from forebay.rewriter.checkpoints.gguf import convert_gguf\n"
        f"convert_gguf(sys.argv[1], sys.argv[2], progress=lambda *_: os.kill(os.getpid(), {int(signal.SIGKILL)}))"
    )
    done = run_code(code, str(tmp_path / "m.gguf"), str(tmp_path / "out"))
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    open_checkpoint(tmp_path / "out")


def test_an_existing_folder_is_not_overwritten(tmp_path):
    write_model(tmp_path / "m.gguf", "llama")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="already there"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("architecture", ["falcon", "bloom", "rwkv6"])
def test_unknown_architectures_are_refused_by_name(tmp_path, architecture):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"architecture '{architecture}'; those converted are arcee"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_damaged_files_are_refused(tmp_path):
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    write_model(path, "llama")
    whole = path.read_bytes()

    def refused(data: bytes, message: str) -> None:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            convert_gguf(path, out)

    data_start = gguf.GGUFReader(path).data_offset
    for keep in (6, 20, 30, 200, 1000, data_start - 100):
        refused(whole[:keep], "is truncated: its header")
    for keep in (data_start, data_start + 5000):
        refused(whole[:keep], f"is truncated: expected .* bytes, the file has {keep}")
    refused(b"PK\3\4" + whole[4:], "is not a GGUF file")
    refused(b"", "is not a GGUF file")
    refused(whole[:4] + struct.pack("<I", 9) + whole[8:], "GGUF version 9")
    refused(whole[:4] + struct.pack(">I", 3) + whole[8:], "corrupt header: GGUF version")
    refused(whole[:16] + struct.pack("<Q", 1 << 62) + whole[24:], "corrupt header|truncated")
    name = b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name)
    refused(whole[:at] + struct.pack("<I", 2) + struct.pack("<Q", 1 << 50) + whole[at + 12 :], "truncated: expected")
    kind = at + 4 + 16
    refused(whole[:kind] + struct.pack("<I", 999) + whole[kind + 4 :], "tensor 'blk.0.attn_q.weight' has type 999")
    with pytest.raises(CheckpointError, match="no GGUF file at"):
        convert_gguf(tmp_path / "absent.gguf", out)
    assert os.listdir(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize(("name", "kind", "value"), [
    ("llama.block_count", "uint32", 1_000_000), ("llama.block_count", "uint64", 1 << 60),
    ("llama.block_count", "int32", -1), ("llama.embedding_length", "uint64", 1 << 60),
    ("llama.vocab_size", "uint32", 4_000_000_000), ("llama.attention.head_count", "uint64", 1 << 62),
])
def test_sizes_that_no_tensor_bears_out_are_refused_before_anything_is_built(tmp_path, monkeypatch, name, kind, value):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    getattr(writer, f"add_{kind}")(name, value)
    writer.add_tensor("token_embd.weight", np.ones((8, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)  # not reached
    with pytest.raises(CheckpointError, match=rf"corrupt header: {name} is {value}, but the file has \d+"):
        convert_gguf(path, tmp_path / "out")


def test_tensors_of_very_many_dimensions_are_refused(tmp_path):
    """Their product alone would take for ever."""
    path, dims = tmp_path / "m.gguf", 100_000
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", dims)
                     + struct.pack("<Q", (1 << 63) + 1) * dims + struct.pack("<IQ", 0, 0))
    with pytest.raises(CheckpointError, match="has 100000 dimensions, at most 4 are possible"):
        convert_gguf(path, tmp_path / "out")
