"""The quantized checkpoint: what is written reads back, whatever is torn or altered is refused by name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

import forebay.rewriter.checkpoints.write_tensors as writing
from forebay.kernels.formats import packing
from forebay.kernels.formats.table import symmetric_name
from forebay.kernels.quantization.quantize.operator import dequantize, quantize
from forebay.rewriter.checkpoints import packed_writer as quantized_writer
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import (
    FILLER,
    MANIFEST,
    UNFINISHED,
    manifest_checksum,
    open_quantized,
    read_dequantized,
)
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError, parse_format
from forebay.rewriter.ir.alignment import PAGE_NBYTES

pytestmark = pytest.mark.usefixtures("private_cache")  # notes on verified checkpoints are kept there

LLAMA = LlamaConfig(vocab_size=160, hidden_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
                    intermediate_size=200, max_position_embeddings=64, tie_word_embeddings=True)
GPT2 = GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=4, n_positions=64)
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return _saved(LLAMA, tmp_path / "llama")


def _saved(config, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def _reference(w: torch.Tensor, bits: int, group: int, rounding: str = "minmax") -> torch.Tensor:
    parts = quantize(w.float().contiguous(), bits, group, -1, torch.float16, rounding)
    return dequantize(*parts, bits, group, -1, w.shape[1], w.dtype)


@pytest.mark.parametrize(("format", "rounding"), [
    ("w4g64", "minmax"), ("w4g32", "mse"), ("w8", "minmax"), ("w4g32s", "mse"), ("w8g32", "symmetric")])
def test_weights_read_back_as_the_operator_rounds_them(llama, tmp_path, format, rounding):
    made = quantize_model(llama, tmp_path / "out", Wish(format, rounding=rounding))
    source = load_file(llama / "model.safetensors")
    assert made.tensors.keys() == source.keys(), "a tied weight is one"
    for name, record in made.tensors.items():
        expected = source[name]
        if "_proj." in name:
            stored = parse_format(symmetric_name(format) if rounding == "symmetric" else format)
            assert record.packed is not None and record.packed.format == stored.name
            assert record.shape == (expected.shape[0], stored.row_nbytes(expected.shape[1], 2))
            expected = _reference(expected, stored.bits, stored.group_size,
                                  "symmetric" if stored.symmetric else rounding)
        else:
            assert record.packed is None, f"{name} was to keep its precision"
        assert torch.equal(read_dequantized(record), expected)
    again = open_checkpoint(tmp_path / "out")
    assert again.tensors == made.tensors and again.fingerprint == made.fingerprint
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((llama / "config.json").read_text())


def test_transposed_matrices_have_their_groups_along_the_inputs(tmp_path):
    folder = _saved(GPT2, tmp_path / "gpt2", torch.bfloat16)
    made = quantize_model(folder, tmp_path / "out", Wish("w4g32"))
    source = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    record, weight = made.tensors[name], source[name]  # [64, 192]
    assert record.packed.transposed and record.packed.shape == (64, 192) and record.shape[0] == 192
    assert torch.equal(read_dequantized(record), _reference(weight.t(), 4, 32).t())
    assert made.tensors["transformer.wpe.weight"].packed is None
    assert made.tensors["transformer.wte.weight"].packed is None


def test_shards_are_safetensors_files_of_whole_pages(llama, tmp_path):
    out = tmp_path / "out"
    made = quantize_model(llama, out, Wish("w4g64"), shard_nbytes=100_000)
    shards = sorted(out.glob("weights-*.safetensors"))
    assert len(shards) > 2
    held = {name: value for path in shards for name, value in load_file(path).items() if not name.startswith(FILLER)}
    assert held.keys() == made.tensors.keys()
    for name, record in made.tensors.items():
        assert record.offset % PAGE_NBYTES == 0
        assert torch.equal(held[name], read_tensor(record))
    assert all(path.stat().st_size % PAGE_NBYTES == 0 for path in shards)


def test_head_embeddings_and_overrides(tmp_path):
    config = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": False})
    folder = _saved(config, tmp_path / "untied")

    def formats(name: str, **wishes) -> dict[str, str]:
        made = quantize_model(folder, tmp_path / name, Wish("w4g64", **wishes))
        return {n: r.packed.format if r.packed else "native" for n, r in made.tensors.items()}

    plain = formats("plain")
    assert plain["lm_head.weight"] == plain["model.embed_tokens.weight"] == plain["model.norm.weight"] == "native"
    head = formats("head", head=True)
    assert head["lm_head.weight"] == "w4g64" and head["model.embed_tokens.weight"] == "native"
    mixed = formats("mixed", embeddings=True, overrides=(("*.layers.1.*", "w8"), (DOWN, "native")))
    assert mixed["model.embed_tokens.weight"] == "w4g64" and mixed["lm_head.weight"] == "native"
    assert mixed["model.layers.1.mlp.up_proj.weight"] == "w8" and mixed[DOWN] == "native"
    assert mixed["model.layers.1.input_layernorm.weight"] == "native", "patterns choose matrices only"
    with pytest.raises(CheckpointError, match=r"'\*norm\*' matches no weight matrix"):
        formats("none", overrides=(("*.layers.*", "w8"), ("*norm*", "w8")))


def test_tied_head_is_quantized_once(llama, tmp_path):
    made = quantize_model(llama, tmp_path / "out", Wish("w4g64", head=True))
    record = made.tensors["model.embed_tokens.weight"]
    assert record.packed.format == "w4g64" and "lm_head.weight" not in made.tensors


@pytest.mark.parametrize("wish", [Wish("w4"), Wish("w5g64"), Wish("w4g3"), Wish("w4g0"), Wish("int4"), Wish("keep"),
                                  Wish("w8", (("*", "w3"),)), Wish("w8", rounding="gptq")])
def test_unknown_wishes_are_refused(llama, tmp_path, wish):
    with pytest.raises(CheckpointError, match=r"format|rounding"):
        quantize_model(llama, tmp_path / "out", wish)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["w4g2", "w4g8", "w4g10", "w8g20", "w4g48", "w4g48s", "w8g544"])
@pytest.mark.parametrize("how", ["weights", "head", "override", "symmetric"])
def test_groups_that_no_kernel_reads_are_refused(llama, tmp_path, format, how):
    wish = {"weights": Wish(format), "head": Wish("w8", head=True, head_format=format),
            "override": Wish("w8", (("*down_proj*", format),)), "symmetric": Wish(format, rounding="symmetric")}[how]
    with pytest.raises(CheckpointError, match=f"the format '{format}' is one that no kernel reads: group_size must"):
        quantize_model(llama, tmp_path / "out", wish)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["w4g16", "w8g16s"])
def test_groups_of_16_need_pairs(llama, tmp_path, format):
    """The down projection has 200 inputs; all else has 96."""
    with pytest.raises(CheckpointError, match=f"'{format}' for 'model.layers.0.mlp.down_proj.weight' is one that no "
                                              "kernel reads: in_features must be a multiple of 32 .*--override"):
        quantize_model(llama, tmp_path / "out", Wish(format))
    assert not (tmp_path / "out").exists()
    made = quantize_model(llama, tmp_path / "out", Wish(format, (("*down_proj*", "native"),)))
    assert made.tensors[DOWN].packed is None and made.tensors[DOWN.replace("down", "up")].packed.format == format


def test_groups_of_16_of_a_transposed_matrix_lie_along_its_inputs(tmp_path):
    folder = _saved(GPT2Config(vocab_size=160, n_embd=80, n_layer=1, n_head=4, n_positions=64), tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match=r"mlp\.c_fc\.weight' is one that no kernel reads: .* got 80"):
        quantize_model(folder, tmp_path / "out", Wish("native", (("*c_fc*", "w4g16"),)))
    made = quantize_model(folder, tmp_path / "out", Wish("native", (("*mlp.c_proj*", "w4g16"),)))
    assert sum(record.packed is not None for record in made.tensors.values()) == 1


def test_values_beyond_fp16_get_bf16_scales_and_nan_is_refused(llama, tmp_path):
    from safetensors.torch import save_file

    weights = load_file(llama / "model.safetensors")
    weights[DOWN][0, 0] = 1e5
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    record = quantize_model(llama, tmp_path / "big", Wish("w8")).tensors[DOWN]
    assert record.packed.scale_dtype == torch.bfloat16
    assert abs(read_dequantized(record)[0, 0].item() - 1e5) < 1e5 / 128
    weights[DOWN][0, 0] = float("nan")
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{DOWN}.*NaN"):
        quantize_model(llama, tmp_path / "nan", Wish("w8"))


# ---- GGUF


KINDS = {"Q4_0": "w4g32s", "Q4_1": "w4g32", "Q8_0": "w8g32s"}


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_blocks_are_repacked_bit_for_bit(tmp_path, kind):
    """Rows of blocks, awkward ones too: negative, denormal and zero scales."""
    from forebay.rewriter.checkpoints.gguf_blocks import BLOCK_KINDS, repack

    ggml = gguf.GGMLQuantizationType[kind]
    random = np.random.default_rng(0)
    values = random.standard_normal((9, 96), dtype=np.float32) * np.float32(10.0) ** random.integers(-7, 3, (9, 1))
    values[3], values[4, :32], values[5] = 0, 0.5, -np.abs(values[5])
    blocks = gguf.quants.quantize(values, ggml)
    stored = parse_format(KINDS[kind])
    bits, group = stored.bits, stored.group_size
    rows = repack(blocks, BLOCK_KINDS[kind])
    assert rows.shape[1] == stored.row_nbytes(96, 4)
    parts = packing.unpack_rows(rows, 96, bits, group, torch.float16, stored.symmetric)
    made = dequantize(*parts, bits, group, -1, 96, torch.float32)
    assert torch.equal(made, torch.from_numpy(gguf.dequantize(blocks, ggml)))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gguf_model_equals_its_dequantized_conversion(tmp_path, architecture):
    path = tmp_path / "m.gguf"
    _write_gguf(path, architecture)
    expected = load_file(convert_gguf(path, tmp_path / "converted") / "model.safetensors")
    made = quantize_model(path, tmp_path / "kept", Wish("keep"))
    assert made.tensors.keys() == expected.keys()
    formats = {r.packed.format for r in made.tensors.values() if r.packed}
    assert {"w4g32s", "w8g32s"} <= formats <= set(KINDS.values())
    assert all(torch.equal(read_dequantized(r), expected[n]) for n, r in made.tensors.items())

    made = quantize_model(path, tmp_path / "w4g64", Wish("w4g64"))  # no format of GGUF's: rounded anew
    for name, record in made.tensors.items():
        w = expected[name]
        if record.packed:
            w = _reference(w.t(), 4, 64).t() if record.packed.transposed else _reference(w, 4, 64)
        assert torch.equal(read_dequantized(record), w), name
    assert sum(r.packed is not None for r in made.tensors.values()) == (14 if architecture == "llama" else 8)


def test_gguf_scales_too_large_for_their_lows_are_rounded_anew(tmp_path):
    from forebay.rewriter.checkpoints.gguf_repack import open_gguf

    path = tmp_path / "m.gguf"
    _write_gguf(path, "llama", scale=1e5)
    tensors = {t.name: t for t in open_gguf(path).tensors}
    kinds = {name: t.tensor.kind.name for name, t in tensors.items()}
    assert all(t.format() == "" for name, t in tensors.items() if kinds[name] in ("Q4_0", "Q8_0"))


def _write_gguf(path: Path, architecture: str, scale: float = 1.0) -> None:
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
    if architecture == "gpt2":
        sizes = dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    writer = gguf.GGUFWriter(path, architecture)
    inner, groups = (256, 4) if architecture == "gpt2" else (96, 2)
    for add, value in ((writer.add_block_count, 2), (writer.add_context_length, 64), (writer.add_embedding_length, 64),
                       (writer.add_feed_forward_length, inner), (writer.add_head_count, 4),
                       (writer.add_head_count_kv, groups),
                       (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_layer_norm_eps, 1e-5),
                       (writer.add_rope_dimension_count, 16), (writer.add_rope_freq_base, 1e4),
                       (writer.add_vocab_size, 64)):
        add(value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    parameters, random = model.state_dict(), np.random.default_rng(0)
    for i, (name, target) in enumerate(get_gguf_hf_weights_map(model, TensorProcessor()).items()):
        shape = tuple(parameters[target].shape)
        if name == "output.weight":
            continue
        if architecture == "gpt2" and name.endswith(("qkv.weight", "down.weight", "up.weight", "attn_output.weight")):
            shape = shape[::-1]
        kind = gguf.GGMLQuantizationType[(*KINDS, "F16")[i % 4] if len(shape) == 2 else "F32"]
        values = random.standard_normal(shape, dtype=np.float32) * (scale if kind.name in KINDS else 1)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- what is torn, altered or unfinished


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_byte_of_a_weight_is_refused_by_name(llama, tmp_path):
    out = tmp_path / "out"
    record = quantize_model(llama, out, Wish("w4g64")).tensors[DOWN]
    open_checkpoint(out)
    _flip(Path(record.path), record.offset + record.nbytes // 2)
    with pytest.raises(CheckpointError, match=f"{Path(record.path).name}.*{DOWN}"):
        open_checkpoint(out)
    open_quantized(out, check="never")
    _flip(Path(record.path), record.offset + record.nbytes // 2)
    open_checkpoint(out)


def test_a_flip_that_keeps_the_time_of_change_is_found_when_asked(llama, tmp_path):
    record = quantize_model(llama, tmp_path / "out", Wish("w4g64")).tensors[DOWN]
    before = os.stat(record.path)
    _flip(Path(record.path), record.offset)
    os.utime(record.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=DOWN):
        open_quantized(tmp_path / "out", check="always")


def test_a_copy_is_checked_once(llama, tmp_path):
    import shutil

    quantize_model(llama, tmp_path / "out", Wish("w4g64"))
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    seen: list[int] = []
    open_quantized(tmp_path / "copy", progress=lambda done, total: seen.append(done))
    assert seen
    first = len(seen)
    open_quantized(tmp_path / "copy", progress=lambda done, total: seen.append(done))
    assert len(seen) == first
    record = open_checkpoint(tmp_path / "copy").tensors[DOWN]
    _flip(Path(record.path), record.offset)
    with pytest.raises(CheckpointError, match=DOWN):
        open_checkpoint(tmp_path / "copy")
    open_checkpoint(tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "longer", "missing", "header", "manifest", "manifest cut", "config",
                                    "no config", "place"])
def test_torn_or_altered_files_are_refused_by_name(llama, tmp_path, damage):
    out = tmp_path / "out"
    quantize_model(llama, out, Wish("w4g64"), shard_nbytes=100_000)
    shard = sorted(out.glob("weights-*"))[1]
    manifest, config = out / MANIFEST, out / "config.json"
    name = shard.name
    if damage == "cut":
        os.truncate(shard, shard.stat().st_size - PAGE_NBYTES)
    elif damage == "longer":
        shard.write_bytes(shard.read_bytes() + bytes(PAGE_NBYTES))
    elif damage == "missing":
        shard.unlink()
    elif damage == "header":
        text = shard.read_bytes()
        shard.write_bytes(text.replace(b'"U8"', b'"I8"', 1))
    elif damage == "place":
        whole = json.loads(manifest.read_text())
        del whole["checksum"]
        next(iter(whole["shards"][name].values()))["offset"] += PAGE_NBYTES
        manifest.write_text(json.dumps(whole | {"checksum": manifest_checksum(whole)}))
    elif damage == "manifest":
        name = MANIFEST
        manifest.write_text(manifest.read_text().replace("w4g64", "w4g32", 1))
    elif damage == "manifest cut":
        name = MANIFEST
        manifest.write_bytes(manifest.read_bytes()[:-100])
    else:
        name = "config.json"
        config.unlink() if damage == "no config" else config.write_text(config.read_text() + " ")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(out)


@pytest.mark.parametrize("value", [None, 7, -1, "x", [], {}, [None], True, 10**30])
def test_fields_of_a_wrong_type_are_told_of_the_manifest(llama, tmp_path, value):
    """Each in turn, of the manifest and of a packed tensor, under a checksum that is right."""
    out, refused = tmp_path / "out", 0
    quantize_model(llama, out, Wish("w4g64"))
    good = json.loads((out / MANIFEST).read_text())
    shard, entries = next(iter(good["shards"].items()))
    tensor = next(name for name, entry in entries.items() if entry["packed"])
    within = ("shards", shard, tensor)
    fields = [("version",), ("shards",), ("shards", shard), within, *((*within, key) for key in entries[tensor]),
              *((*within, "packed", key) for key in entries[tensor]["packed"])]
    for path in fields:
        wrong = json.loads((out / MANIFEST).read_text())
        del wrong["checksum"]
        holder = wrong
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        (out / "wrong").mkdir(exist_ok=True)
        for file in out.iterdir():
            if file.is_file() and not (out / "wrong" / file.name).exists():
                (out / "wrong" / file.name).symlink_to(file)
        (out / "wrong" / MANIFEST).unlink()
        (out / "wrong" / MANIFEST).write_text(json.dumps(wrong | {"checksum": manifest_checksum(wrong)}))
        try:
            open_checkpoint(out / "wrong")
        except CheckpointError as error:
            assert len(str(error)) < 1000, path
            refused += 1
    assert refused > 0.8 * len(fields)  # a tensor may be unpacked, and its matrix transposed by anything that is true


def test_an_interrupted_run_goes_on_with_the_next_shard(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"
    whole = quantize_model(llama, tmp_path / "whole", Wish("w4g64"), shard_nbytes=100_000)

    class Killed(BaseException):
        pass

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise Killed

    with pytest.raises(Killed):
        quantize_model(llama, out, Wish("w4g64"), shard_nbytes=100_000, progress=interrupt)
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("weights-*.safetensors")}
    assert kept and not (out / MANIFEST).exists() and not list(out.glob("*.draft"))
    with pytest.raises(CheckpointError, match="not finished"):
        open_checkpoint(out)
    with pytest.raises(CheckpointError, match="settings"):
        quantize_model(llama, out, Wish("w8"), shard_nbytes=100_000)
    damaged = sorted(kept)[0]
    _flip(out / damaged, PAGE_NBYTES)
    made = quantize_model(llama, out, Wish("w4g64"), shard_nbytes=100_000)
    now = {p.name: p.stat().st_mtime_ns for p in out.glob("weights-*.safetensors")}
    assert all((now[name] == kept[name]) == (name != damaged) for name in kept), "only the damaged one is made again"
    assert not (out / UNFINISHED).exists()
    assert made.fingerprint == whole.fingerprint
    assert all(torch.equal(read_tensor(r), read_tensor(whole.tensors[n])) for n, r in made.tensors.items())
    assert quantize_model(llama, out, Wish("w4g64"), shard_nbytes=100_000).fingerprint == made.fingerprint


def test_a_full_disk_leaves_nothing_that_claims_to_be_whole(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"
    written = 0
    real = os.write

    def write(fd: int, data) -> int:
        nonlocal written
        written += len(data)
        if written > 120_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(quantized_writer.os, "write", write)
    with pytest.raises(CheckpointError, match=r"disk became full.*goes on"):
        quantize_model(llama, out, Wish("w4g64"), shard_nbytes=100_000)
    monkeypatch.undo()
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    assert not list(out.glob("*.draft"))
    with pytest.raises(CheckpointError, match="not finished"):
        open_checkpoint(out)
    quantize_model(llama, out, Wish("w4g64"), shard_nbytes=100_000)
    open_checkpoint(out)


@pytest.mark.parametrize(("code", "error", "part"), (
    (errno.EFBIG, CheckpointError, r"weights-00001-of-.*: a file of \d+ bytes is larger than .*ulimit -f.*shard-size"),
    (errno.EIO, OSError, r"Input/output error: '.*weights-00001-of-")))
def test_what_the_file_system_refuses_names_the_file(llama, tmp_path, monkeypatch, code, error, part):
    def write(fd: int, data) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(quantized_writer.os, "write", write)
    with pytest.raises(error, match=part):
        quantize_model(llama, tmp_path / "out", Wish("w4g64"), shard_nbytes=100_000)
    assert not list((tmp_path / "out").glob("*.draft"))


def test_too_little_space_is_known_before_the_first_byte(llama, tmp_path, monkeypatch):

    monkeypatch.setattr(writing, "_free_nbytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match="1000 free"):
        quantize_model(llama, tmp_path / "out", Wish("w4g64"))
    assert not list((tmp_path / "out").iterdir())


def test_chat_templates_are_copied(llama, tmp_path):
    """The one of chats, and those that have names, in a folder of their own."""
    (llama / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (llama / name).write_text(name)
    out = quantize_model(llama, tmp_path / "out", Wish("w8g32")).folder
    assert quantize_model(llama, out, Wish("w8g32")).folder == out  # which is finished
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (out / name).read_text() == name


def test_a_file_that_cannot_be_copied_names_the_folder_it_goes_to(llama, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match=f"cannot be copied to {tmp_path / 'out'}: No space left"):
        quantize_model(llama, tmp_path / "out", Wish("w4g64"))


def test_other_folders_are_left_alone(llama, tmp_path):
    with pytest.raises(CheckpointError, match="not empty"):
        quantize_model(llama, llama, Wish("w4g64"))
    quantize_model(llama, tmp_path / "out", Wish("w4g64"))
    with pytest.raises(CheckpointError, match="settings"):
        quantize_model(llama, tmp_path / "out", Wish("w8"))
    with pytest.raises(CheckpointError, match="already"):
        quantize_model(tmp_path / "out", tmp_path / "twice", Wish("w8"))
