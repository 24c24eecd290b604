import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import forebay.rewriter.checkpoints.write_tensors as writing
from forebay.rewriter.checkpoints.checkpoint import DTYPES, read_tensor
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.records import CheckpointError, log_once
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.checkpoints.write_tensors import write_tensors
from forebay.runtime.disk.page_cache import in_page_cache_filesystem, resident_nbytes


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, dtype in DTYPES.items():
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5 * dtype.itemsize), generator=generator)
        out[name] = data.to(torch.uint8).view(dtype)
    return out | {"scalar": torch.tensor(7.0), "empty": torch.empty(0, 4), "page": torch.randn(2, 1024)}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def write_raw(path, header, data: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def save_shards(folder, tensors):
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        shard = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_reads_what_the_safetensors_library_wrote(tmp_path):
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    opened = open_checkpoint(tmp_path)
    assert set(opened.tensors) == set(tensors)
    assert opened.nbytes == sum(t.nbytes for t in tensors.values())
    for name, tensor in tensors.items():
        record = opened.tensors[name]
        assert (record.dtype, record.shape, record.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert same_bytes(read_tensor(record), tensor)
    as_file = open_checkpoint(tmp_path / "model.safetensors")
    assert as_file.tensors == opened.tensors and as_file.folder == tmp_path


def test_shards_are_one_checkpoint(tmp_path):
    tensors = random_tensors()
    weight_map = save_shards(tmp_path, tensors)
    opened = open_checkpoint(tmp_path)
    assert {name: os.path.basename(r.path) for name, r in opened.tensors.items()} == weight_map
    assert all(same_bytes(read_tensor(opened.tensors[name]), tensor) for name, tensor in tensors.items())


def test_opening_reads_no_weight(tmp_path):
    if in_page_cache_filesystem(tmp_path):
        pytest.skip("files here live in the page cache")
    save_file({"big": torch.zeros(4 << 20), "odd": torch.arange(777.0)}, tmp_path / "model.safetensors")
    with open(tmp_path / "model.safetensors", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened = open_checkpoint(tmp_path)
    assert resident_nbytes(tmp_path / "model.safetensors") < 1 << 20  # the header and its read-ahead, of 16 MiB
    for record in opened.tensors.values():
        read_tensor(record)
    with open(tmp_path / "model.safetensors", "rb") as file:  # what the header's read-ahead had brought in
        os.posix_fadvise(file.fileno(), 0, 4096, os.POSIX_FADV_DONTNEED)
    assert resident_nbytes(tmp_path / "model.safetensors") == 0


def test_fingerprint_follows_content_not_place(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    save_file({"a": torch.zeros(3)}, one / "model.safetensors")
    (one / "config.json").write_text('{"x": 1}')
    shutil.copytree(one, two)
    first = open_checkpoint(one).fingerprint
    assert open_checkpoint(two).fingerprint == first
    (two / "config.json").write_text('{"x": 2}')
    assert open_checkpoint(two).fingerprint != first
    seen = {first}
    for tensors in ({"b": torch.zeros(3)}, {"a": torch.zeros(3, 1)}, {"a": torch.zeros(3, dtype=torch.int32)}):
        save_file(tensors, one / "model.safetensors")
        seen.add(open_checkpoint(one).fingerprint)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"{}", b"", 1 << 40, "corrupt header: its length"),
        (b"{}", b"", 500, "truncated: the header ends at byte 508, the file has 10 bytes"),
        (b"{nonsense", b"", None, "not JSON"),
        (b"[" * 100_000, b"", None, "not JSON"),
        (b"[1, 2]", b"", None, "not a JSON object"),
        (b'{"a": {"dtype": "F32"}}', b"", None, "'a' is not dtype, shape, data_offsets"),
        (b'{"a": 1, "a": 2}', b"", None, "duplicate entry 'a'"),
        ({"a": entry(7)}, bytes(8), None, "'a' has dtype 7"),
        ({"a": entry("F4")}, bytes(8), None, "'a' is F4"),
        ({"a": entry(shape=(3,))}, bytes(8), None, r"'a' is F32 \[3\], 12 bytes, but its offsets span 8"),
        ({"a": entry(shape=(-2,), end=-8)}, bytes(8), None, "'a' has shape"),
        ({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12), None, "'b' overlaps"),
        ({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20), None, "'b' leaves a hole"),
        ({"a": entry()}, bytes(6), None, "truncated: expected .* bytes, the file has"),
        ({"a": entry()}, bytes(9), None, "bytes after the last tensor"),
    ],
)
def test_damaged_files_are_refused(tmp_path, header, data, length, message):
    path = tmp_path / "model.safetensors"
    write_raw(path, header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 8, 60, -1])
def test_every_truncation_is_noticed(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file(random_tensors(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tmp_path)


def test_a_file_cut_after_opening_is_noticed(tmp_path):
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    record = open_checkpoint(tmp_path).tensors["a"]
    os.truncate(record.path, record.offset + 10)
    with pytest.raises(CheckpointError, match=f"'a' needs {record.offset + 400} bytes"):
        read_tensor(record)


def test_bad_indexes_are_refused(tmp_path):
    tensors = {name: torch.zeros(2) for name in "abcd"}
    weight_map = save_shards(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    first, second = weight_map["a"], weight_map["b"]

    def refused(message: str, changed: object) -> None:
        index.write_text(changed if isinstance(changed, str) else json.dumps({"weight_map": changed}))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)

    refused("corrupt index", "{")
    refused("corrupt index", '{"other": 1}')
    refused("'e' in .*, which does not hold it", weight_map | {"e": first})
    refused("'a' in .*, which does not hold it", weight_map | {"a": second})
    refused("does not lie in the folder", weight_map | {"a": "../other.safetensors"})
    refused("shard gone.safetensors is named in .* but missing", weight_map | {"a": "gone.safetensors"})
    save_file({"a": torch.zeros(2), **{n: tensors[n] for n in "bd"}}, tmp_path / second)
    refused("'a' is both in", weight_map)


def test_what_is_not_safetensors_is_refused_with_advice(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"):
        (tmp_path / name).write_bytes(b"never read")
        for path in (tmp_path / name, tmp_path):
            with pytest.raises(CheckpointError, match=r"arbitrary code.*convert it once"):
                open_checkpoint(path)
        (tmp_path / name).unlink()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a GGUF file: name the file itself"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(("names", "message"), [
    (["model-00001-of-00002.safetensors"], r"which says what its shards hold; fetch it again"),
    (["consolidated.safetensors", "params.json"], r"Mistral's own format.*It has: consolidated\.safetensors$"),
    (["adapter_model.safetensors", "adapter_config.json"], "holds an adapter .*name the base as the model"),
    (["._model.safetensors", "._a.gguf"], "holds no checkpoint"),
    (["model_index.json"], "pipeline of diffusers"),
    (["config.json"], "holds no checkpoint: neither"),
    (["notes.txt"], r"no model's folder: it holds no checkpoint and no config\.json$"),
    (["one/config.json", "two/config.json"], r"no model's folder.*name one of one, two$"),
])
def test_weights_of_other_names_lead_in_no_circle(tmp_path, names, message):
    """A folder is not sent to its file where the file is sent to its folder."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)
    if not any(name.endswith("safetensors") for name in names) and "config.json" not in names:
        with pytest.raises(CheckpointError, match=message):
            resolve_model(tmp_path)
    if "adapter_model.safetensors" in names:
        with pytest.raises(CheckpointError, match=message):
            resolve_model(tmp_path / "adapter_model.safetensors")


def test_of_a_file_and_an_index_the_file_is_read(tmp_path, caplog):
    """As transformers chooses, and said; hidden files and Mistral's own are passed over in silence."""
    tensors = random_tensors()
    save_shards(tmp_path, tensors)
    for name in ("._model.safetensors", "._model-00001-of-00002.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"not read")
    log_once.cache_clear()
    with caplog.at_level("WARNING", "forebay"):
        assert open_checkpoint(tmp_path).tensors.keys() == tensors.keys() and not caplog.messages
        save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
        assert set(open_checkpoint(tmp_path).tensors) == {"a"}
    assert ["the first is read" in text for text in caplog.messages] == [True]


def test_written_files_are_the_formats_own(tmp_path):
    tensors = random_tensors()
    reads = []

    def read(name):
        reads.append(name)
        return tensors[name]

    fd = os.open(tmp_path / "model.safetensors", os.O_WRONLY | os.O_CREAT)
    seen = []
    specs = [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    write_tensors(fd, tmp_path, specs, read, metadata={"k": "v"}, progress=lambda done, all_: seen.append((done, all_)))
    os.close(fd)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys() and all(same_bytes(loaded[name], t) for name, t in tensors.items())
    opened = open_checkpoint(tmp_path)
    assert next(iter(opened.tensors)) in ("page", "empty") and opened.tensors["page"].offset % 4096 == 0
    assert all(record.offset % record.dtype.itemsize == 0 for record in opened.tensors.values())
    assert sorted(reads) == sorted(tensors) and seen[-1] == (opened.nbytes, opened.nbytes)


def test_a_full_disk_is_named_before_and_during_writing(tmp_path, monkeypatch):
    fd = os.open(tmp_path / "model.safetensors", os.O_WRONLY | os.O_CREAT)
    specs = [("a", torch.float32, (1 << 20,))]

    def write() -> None:
        write_tensors(fd, tmp_path, specs, lambda name: torch.zeros(1 << 20))

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_free_nbytes", lambda folder: 1 << 20)
        with pytest.raises(CheckpointError, match=f"{tmp_path}: not enough disk space: 4198400 bytes needed, 1048576"):
            write()
    assert os.fstat(fd).st_size == 0
    real = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(CheckpointError, match="not enough disk space: 4198400 bytes needed"):
        write_tensors(real, tmp_path, specs, lambda name: torch.zeros(1 << 20))
    os.close(real)
    os.close(fd)
