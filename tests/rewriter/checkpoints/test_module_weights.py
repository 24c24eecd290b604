import ctypes
import gc
import mmap
import os
import queue
import signal
import subprocess
import sys

import pytest
import torch
from forked import run_code
from safetensors import safe_open
from selection import at_length
from torch import nn

import forebay.rewriter.checkpoints.write_tensors as writing
from forebay.rewriter.checkpoints import module_weights as spill
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.module_weights import PREFIX, spill_module, spill_tensors
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.runtime.disk.chunks import Read
from forebay.runtime.disk.page_cache import in_page_cache_filesystem, resident_nbytes
from forebay.runtime.disk.reader import open_reader

pytestmark = pytest.mark.filterwarnings("ignore:.*lies in memory")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.inner = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
        self.again = self.inner
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(self.inner[0].weight.t())  # the same storage, read another way: no tie
        self.register_buffer("scratch", torch.zeros(7), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("none_left", torch.empty(0, 3))


def test_every_name_reads_back_and_each_storage_is_written_once(tmp_path):
    module = Tied().bfloat16()
    spilled = spill_module(module, tmp_path)
    expected = dict(module.state_dict())
    assert spilled.tensors.keys() == expected.keys() and "scratch" not in spilled.tensors
    for name, tensor in expected.items():
        read = read_tensor(spilled.tensors[name])
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
    assert spilled.ties["head.weight"] == "embed.weight"
    assert {f"again.{n}" for n, _ in module.again.state_dict().items()} <= spilled.ties.keys()
    assert not {"turned", "nothing", "none_left"} & spilled.ties.keys()
    stored = {name: tensor for name, tensor in expected.items() if name not in spilled.ties}
    assert spilled.nbytes == sum(tensor.nbytes for tensor in stored.values())
    with safe_open(spilled.tensors["turned"].path, "pt") as file:
        assert set(file.keys()) == stored.keys() and "embed.weight" in file.metadata()["ties"]


def test_the_path_opens_with_o_direct_and_nothing_stays_cached(tmp_path):
    if in_page_cache_filesystem(tmp_path):
        pytest.skip("files here live in the page cache")
    weight = torch.randn(512, 1024)
    spilled = spill_tensors({"bias": torch.randn(3), "weight": weight}, tmp_path)
    record = spilled.tensors["weight"]
    assert resident_nbytes(record.path) < 1 << 20  # the header, read once more
    fd = os.open(record.path, os.O_RDONLY | os.O_DIRECT)
    data = mmap.mmap(-1, record.nbytes)
    assert record.offset % 4096 == 0 and os.preadv(fd, [data], record.offset) == record.nbytes
    os.close(fd)
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32).reshape(512, 1024), weight)


@pytest.mark.parametrize("unnamed_files", [True, False])
def test_no_name_ever_appears_and_collection_frees_the_disk(tmp_path, monkeypatch, unnamed_files):
    if not unnamed_files:
        monkeypatch.setattr(spill, "_open_unnamed", spill._open_then_unlink)
    spilled = spill_tensors({"a": torch.arange(1000.0)}, tmp_path)
    path, record = spilled.tensors["a"].path, spilled.tensors["a"]
    assert os.listdir(tmp_path) == [] and os.stat(path).st_size == 4096 + 4000
    other = spill_tensors({"a": torch.zeros(1000)}, tmp_path)
    assert other.tensors["a"].path != path
    del spilled
    gc.collect()
    assert os.stat(path).st_size == 0
    third = spill_tensors({"a": torch.ones(1000)}, tmp_path)
    assert third.tensors["a"].path not in (path, other.tensors["a"].path)  # a path never comes to mean another file
    with pytest.raises(CheckpointError, match="truncated"):
        read_tensor(record)
    assert torch.equal(read_tensor(other.tensors["a"]), torch.zeros(1000))


def test_a_descriptor_lives_as_long_as_its_path(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        path = spill_tensors({"a": torch.arange(10.0)}, tmp_path).tensors["a"].path
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before + 1 and os.stat(str(path)).st_size == 0
    read_later(tmp_path, path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del path
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def read_later(folder, path):
    """A reader that was told a path keeps it: the number of its descriptor does not go to another file meanwhile."""
    memory, done = mmap.mmap(-1, 4096), queue.SimpleQueue()
    reader = open_reader("direct", 1)
    issue = reader.prepare(Read(path, 4096, 40, ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, 0, done.put))
    other = spill_tensors({"a": torch.zeros(10)}, folder)
    issue()
    assert "truncated" in str(done.get(timeout=30)) and other.nbytes == 40
    reader.close()


@pytest.mark.parametrize("end", ["exit", at_length("exception"), "SIGINT", at_length("SIGTERM"), "SIGKILL"])
def test_nothing_is_left_however_the_process_ends(tmp_path, end):
    code = (
        "import sys, os, signal, torch\n"
        "from forebay.rewriter.checkpoints.module_weights import spill_tensors\n"
        "kept = spill_tensors({'a': torch.zeros(100_000)}, sys.argv[1])\n"
        "print(os.readlink(kept.tensors['a'].path), os.stat(kept.tensors['a'].path).st_size, flush=True)\n"
        + {"exit": "", "exception": "1 / 0"}.get(end, f"os.kill(os.getpid(), signal.{end}); signal.pause()")
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    path, size = done.stdout.removesuffix("\n").rsplit(" ", 1)
    assert int(size) > 400_000 and path.startswith(str(tmp_path)) and path.endswith("(deleted)")
    assert done.returncode == {"exit": 0, "exception": 1}.get(end) or done.returncode == -getattr(signal, end, 0)
    assert os.listdir(tmp_path) == []


def test_a_forked_child_neither_loses_nor_frees_the_file(tmp_path):
    spilled = spill_tensors({"a": torch.arange(1000.0)}, tmp_path)
    record = spilled.tensors["a"]
    child = os.fork()
    if child == 0:
        good = torch.equal(read_tensor(record), torch.arange(1000.0))
        spilled.backing.free()  # type: ignore[attr-defined]
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(read_tensor(record), torch.arange(1000.0))


def test_stale_names_are_removed_and_others_left(tmp_path):
    (tmp_path / f"{PREFIX}abc").touch()
    (tmp_path / "mine.safetensors").write_bytes(b"x")
    kept = spill_tensors({"a": torch.zeros(3)}, tmp_path)
    assert os.listdir(tmp_path) == ["mine.safetensors"] and kept.nbytes == 12


def test_a_limit_of_file_sizes_is_named(tmp_path):
    """The process's own limit, in a process of its own."""
    code = ("import resource, signal, torch; from forebay.rewriter.checkpoints.module_weights import spill_tensors\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
            f"spill_tensors({{'a': torch.zeros(100_000)}}, {str(tmp_path)!r})")
    done = run_code(code)
    assert done.returncode == 1 and "CheckpointError" in done.stderr and "ulimit -f" in done.stderr, done.stderr


def test_a_full_disk_is_named_and_nothing_stays(tmp_path, monkeypatch):
    module = nn.Linear(256, 256)
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(writing, "_free_nbytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: not enough disk space: 267264 bytes needed, 1000 free"):
        spill_module(module, tmp_path)
    monkeypatch.undo()
    full = os.open("/dev/full", os.O_RDWR)
    monkeypatch.setattr(writing, "_flush", lambda fd: os.write(full, b"x"))  # a real ENOSPC after the first bytes
    with pytest.raises(CheckpointError, match="not enough disk space: 267264 bytes needed"):
        spill_module(module, tmp_path)
    assert os.listdir(tmp_path) == []
    gc.collect()
    new = [os.stat(f"/proc/self/fd/{fd}").st_size for fd in set(os.listdir("/proc/self/fd")) - before
           if os.path.exists(f"/proc/self/fd/{fd}")]  # fmt: skip
    assert sum(new) == 0


def test_what_cannot_be_spilled_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="'weight' cannot be spilled: it is a meta tensor"):
        spill_module(nn.Linear(2, 2, device="meta"), tmp_path)
    with pytest.raises(CheckpointError, match=r"'a' cannot be spilled: .*sparse"):
        spill_tensors({"a": torch.eye(3).to_sparse()}, tmp_path)
    with pytest.raises(CheckpointError, match=r"'a' has dtype torch\.complex64"):
        spill_tensors({"a": torch.zeros(3, dtype=torch.complex64)}, tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        spill_module(nn.Linear(2, 2), tmp_path / "absent")
    assert os.listdir(tmp_path) == []


def test_a_folder_in_memory_is_warned_about():
    if not os.access("/dev/shm", os.W_OK) or not in_page_cache_filesystem("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    with pytest.warns(UserWarning, match="lies in memory"):
        spill_tensors({"a": torch.zeros(3)}, "/dev/shm")
