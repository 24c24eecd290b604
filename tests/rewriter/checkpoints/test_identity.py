"""Two models of one shape are told apart, and a file that changes is seen, whatever its times were set to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forebay.rewriter.checkpoints.identity import (
    MOST_SAMPLES,
    changed_file,
    file_states,
    states_checksum,
    tokenizer_checksum,
)
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.runtime.disk.page_cache import resident_nbytes


def _model(folder: Path, seed: int, names: int = 3) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    save_file({f"t{i}": torch.randn(64, 64, generator=generator) for i in range(names)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_models_of_one_shape_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    found = {open_checkpoint(_model(tmp_path / str(seed), seed)).fingerprint for seed in range(4)}
    assert len(found) == 4
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    assert open_checkpoint(tmp_path / "copy").fingerprint in found


@pytest.mark.parametrize("which", range(5))
def test_a_change_in_the_middle_of_any_tensor_is_seen(tmp_path: Path, which: int) -> None:
    folder = _model(tmp_path / "m", 0, 5)
    before = open_checkpoint(folder)
    record = before.tensors[f"t{which}"]
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(record.offset + record.nbytes // 2)
        file.write(b"\x55")
    assert open_checkpoint(folder).fingerprint != before.fingerprint


def test_of_very_many_tensors_some_are_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({f"t{i}": torch.zeros(2) for i in range(2 * MOST_SAMPLES + 5)}, folder / "model.safetensors")
    first = open_checkpoint(folder).fingerprint
    save_file({f"t{i}": torch.ones(2) for i in range(2 * MOST_SAMPLES + 5)}, folder / "model.safetensors")
    assert open_checkpoint(folder).fingerprint != first


def test_sampling_leaves_nothing_in_the_page_cache(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({f"t{i}": torch.zeros(1 << 20) for i in range(4)}, folder / "model.safetensors")
    fd = os.open(folder / "model.safetensors", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    open_checkpoint(folder)
    assert resident_nbytes(folder / "model.safetensors") < 1 << 20  # the header and its read-ahead


def _overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def _overwrite_and_restore_the_time(path: Path) -> None:
    before = os.stat(path)
    _overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_mtime_ns == before.st_mtime_ns


def _swap(path: Path) -> None:
    other = path.with_name("other")
    shutil.copyfile(path, other)
    os.utime(other, ns=(os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns))
    other.replace(path)


def _swap_and_swap_back(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.with_name("aside").rename(path)


@pytest.mark.parametrize("change", [_overwrite, _overwrite_and_restore_the_time, _swap, _swap_and_swap_back, os.unlink,
                                    lambda path: os.truncate(path, 100)])
def test_a_changed_file_is_seen(tmp_path: Path, change) -> None:
    checkpoint = open_checkpoint(_model(tmp_path / "m", 0))
    checkpoint.require_unchanged()
    path = tmp_path / "m" / "model.safetensors"
    change(path)  # at once: times of one clock tick must not hide it
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed or replaced while it was in use"):
        checkpoint.require_unchanged()


def test_every_shard_is_watched(tmp_path: Path) -> None:
    paths = []
    for i in range(3):
        (tmp_path / f"s{i}").write_bytes(b"x")
        paths.append(str(tmp_path / f"s{i}"))
    states = file_states(paths)
    assert changed_file(states) is None
    for path in reversed(paths):
        Path(path).write_bytes(b"y")
        assert changed_file(states) == path


def test_states_are_summed_up_by_name_size_and_times(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", 0)
    first = states_checksum(open_checkpoint(folder).states)
    folder.rename(tmp_path / "moved")
    assert states_checksum(open_checkpoint(tmp_path / "moved").states) == first
    _overwrite_and_restore_the_time(tmp_path / "moved" / "model.safetensors")
    assert states_checksum(open_checkpoint(tmp_path / "moved").states) != first


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
                                  "added_tokens.json", "merges.txt", "tokenizer.model", "vocab.txt", "spiece.model"])
def test_every_file_of_a_tokenizer_counts(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    seen = {tokenizer_checksum(tmp_path)}
    for text in ("a", "b"):
        (tmp_path / name).write_text(text)
        seen.add(tokenizer_checksum(tmp_path))
    assert len(seen) == 3
    (tmp_path / "config.json").write_text("other")
    assert tokenizer_checksum(tmp_path) in seen
