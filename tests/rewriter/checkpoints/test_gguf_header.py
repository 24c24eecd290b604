"""A model in several GGUF files opens from any of them; a part that is absent or another's is named."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_gguf import split, write_model

from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.conversions import list_conversions
from forebay.rewriter.checkpoints.gguf_header import gguf_parts, read_gguf
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import packed_copy, resolve_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_any_part_is_the_whole_model(tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    write_model(whole, "llama")
    parts = split(whole, (0, 7))  # the first one without tensors, as gguf-split can write it
    for dequantize in (False, True):
        wanted = open_checkpoint(resolve_model(whole, dequantize=dequantize)).tensors
        folders = {resolve_model(part, dequantize=dequantize) for part in parts}
        assert len(folders) == 1, "converted once"
        found = open_checkpoint(folders.pop()).tensors
        read = read_tensor if dequantize else read_dequantized
        assert found.keys() == wanted.keys()
        assert all(torch.equal(read(record), read(wanted[name])) for name, record in found.items())
    copy = open_checkpoint(packed_copy(resolve_model(parts[2]), "w4g32")).tensors
    assert copy.keys() == wanted.keys(), "a draft is made from all parts too"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("names", [
    ("M.Q8_0.GGUF",), ("sha256-1f",), ("m-00001-of-00002.GGUF", "m-00002-of-00002.GGUF")])
def test_a_file_is_known_by_what_it_holds(tmp_path: Path, names: tuple[str, ...]) -> None:
    write_model(tmp_path / "m.gguf", "llama", kinds=("Q8_0",))
    wanted = open_checkpoint(resolve_model(tmp_path / "m.gguf")).tensors
    parts = split(tmp_path / "m.gguf", (7,)) if len(names) > 1 else [tmp_path / "m.gguf"]
    (tmp_path / "other").mkdir()
    for part, name in zip(parts, names, strict=True):
        part.rename(tmp_path / "other" / name)
    found = open_checkpoint(resolve_model(tmp_path / "other" / names[-1])).tensors
    assert all(torch.equal(read_dequantized(record), read_dequantized(wanted[name])) for name, record in found.items())
    if len(names) > 1:
        (tmp_path / "other" / names[0]).unlink()
        with pytest.raises(CheckpointError, match=rf"of which {names[0]} cannot be found"):
            resolve_model(tmp_path / "other" / names[1])


def test_a_folder_that_is_no_model_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_model(tmp_path / "files" / "m.GGUF", "llama", kinds=("Q8_0",))
    with pytest.raises(CheckpointError, match=r"name a file in it instead: m\.GGUF"):
        resolve_model(tmp_path / "files")
    for name in ("poems", "code"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    for named in (dict(name_or_path=tmp_path / "adapters"),
                  dict(name_or_path=tmp_path / "files" / "m.GGUF", adapter=tmp_path / "adapters")):
        with pytest.raises(CheckpointError, match="holds adapters in folders of its own: name one of code, poems"):
            resolve_model(**named)


@pytest.mark.usefixtures("cache")
def test_a_change_of_any_part_is_a_change(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama")
    parts = split(tmp_path / "m.gguf", (5, 7))
    before = resolve_model(parts[0])
    assert [each.state for each in list_conversions()] == ["current"]
    parts[2].touch()
    assert [each.state for each in list_conversions()] == ["changed"]
    assert resolve_model(parts[0]) != before
    parts[1].unlink()
    assert {each.state for each in list_conversions()} == {"gone"}


def test_links_into_a_store_of_files_are_followed_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama")
    (tmp_path / "seen").mkdir()
    for number, part in enumerate(split(tmp_path / "m.gguf", (5,))):
        stored = part.rename(tmp_path / f"blob{number}")
        (tmp_path / "seen" / part.name).symlink_to(stored)
    header = read_gguf(tmp_path / "seen/m-00002-of-00002.gguf")
    assert header.path.name == "m-00001-of-00002.gguf" and len(header.tensors) == 20


@pytest.mark.usefixtures("cache")
def test_a_draft_is_made_of_a_linked_file(tmp_path: Path) -> None:
    """Its place in the store has no name that tells a GGUF file."""
    write_model(tmp_path / "m.gguf", "llama")
    (tmp_path / "seen.gguf").symlink_to((tmp_path / "m.gguf").rename(tmp_path / "blob"))
    assert open_checkpoint(packed_copy(resolve_model(tmp_path / "seen.gguf"), "w4g32")).tensors


def test_absent_and_mistaken_parts_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama")
    first, second, third = split(tmp_path / "m.gguf", (5, 7))

    third.rename(tmp_path / "away")
    for read in (gguf_parts, read_gguf):
        with pytest.raises(CheckpointError, match=r"part 1 of 3 of a split model, of which m-00003-of-00003\.gguf "
                                                  "cannot be found: put all parts into"):
            read(first)
    shutil.copy(second, third)
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf is not part 3 of 3 of a split model"):
        read_gguf(first)
    (tmp_path / "away").rename(third)
    assert len(read_gguf(third).tensors) == 20
    renamed = second.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"is one of the 3 parts of a split model and is not named like one"):
        read_gguf(renamed)
    renamed = renamed.rename(tmp_path / "m-00002-of-00004.gguf")
    with pytest.raises(CheckpointError, match=r"is one of the 3 parts .*NAME-00001-of-00003\.gguf"):
        gguf_parts(renamed)


def test_parts_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama")
    first, _ = split(tmp_path / "m.gguf", (5,), first={"split.tensors.count": np.int32(99)})
    with pytest.raises(CheckpointError, match=r"says that the split model has 99 tensors, but its 2 parts hold 20"):
        read_gguf(first)


def test_a_whole_file_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    write_model(path, "llama")
    assert gguf_parts(path) == (path,) and read_gguf(path).path == path
    absent = tmp_path / "n-00001-of-00003.gguf"
    assert gguf_parts(absent) == (absent,)


def test_short_lists_are_read_and_long_ones_stepped_over(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama", settings={"attention.head_count_kv": [2, 2]})
    header = read_gguf(tmp_path / "m.gguf")
    assert header.get("attention.head_count_kv") == (2, 2)
    assert header.metadata["tokenizer.ggml.tokens"] is None
    assert dataclasses.replace(header, metadata={}).get("attention.head_count_kv") is None
