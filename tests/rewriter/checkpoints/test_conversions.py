"""What the cache holds of converted models is told by its source, and deleted without a trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_gguf import write_model
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.rewriter.checkpoints.conversions import delete_conversion, list_conversions
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import held, resolve_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files_of(cache: Path) -> set[str]:
    """All but locks."""
    return {path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"}


def test_each_is_listed_with_its_file_until_it_is_deleted(tmp_path: Path, cache: Path) -> None:
    assert list_conversions() == []
    paths = [tmp_path / f"{name}.gguf" for name in ("kept", "changed", "gone")]
    for path in paths:
        write_model(path, "llama")
    folders = {path.stem: resolve_model(path) for path in paths}
    paths[1].touch()
    paths[2].unlink()
    found = {each.name: each for each in list_conversions()}
    assert found.keys() == {folder.name for folder in folders.values()} == files_of(cache)
    for path, state in zip(paths, ("current", "changed", "gone"), strict=True):
        each = found[folders[path.stem].name]
        assert (each.source, each.state) == (path, state)
        assert each.nbytes >= sum(file.stat().st_size for file in folders[path.stem].glob("*.safetensors")) > 0

    run = CliRunner().invoke(app, ["models"])
    assert run.exit_code == 0 and f"{paths[1]}  (has changed since)" in run.output and str(cache) in run.output
    assert CliRunner().invoke(app, ["models", "--delete-unused"]).exit_code == 0
    assert files_of(cache) == {folders["kept"].name} and paths[1].exists()
    assert CliRunner().invoke(app, ["models", "--delete", folders["kept"].name]).exit_code == 0
    assert files_of(cache) == set() and list_conversions() == [] and paths[0].exists()
    assert resolve_model(paths[0]) == folders["kept"] and folders["kept"].exists(), "made anew when it is asked for"


def test_what_a_killed_conversion_or_deletion_left_is_listed_and_goes(cache: Path) -> None:
    for name in ("whole-1/a", ".whole-1.abcd.partial/b", ".other-2.x_y.partial/c"):
        (cache / "models" / name).parent.mkdir(parents=True)
        (cache / "models" / name).write_bytes(bytes(9000))
    found = {each.name: each for each in list_conversions()}
    assert {name: (each.state, each.source) for name, each in found.items()} == {
        "whole-1": ("unfinished", None), "other-2": ("unfinished", None)}
    assert found["whole-1"].nbytes == 2 * found["other-2"].nbytes >= 18000
    assert delete_conversion("whole-1") == found["whole-1"].nbytes
    assert files_of(cache) == {".other-2.x_y.partial"}
    delete_conversion("other-2")
    assert files_of(cache) == set()


@pytest.mark.parametrize("name", ["nothing", "..", "", "../models", ".whole-1.abcd.partial"])
def test_only_what_is_listed_is_deleted(cache: Path, name: str) -> None:
    (cache / "models/whole-1").mkdir(parents=True)
    (cache / "models/.whole-1.abcd.partial").mkdir()
    with pytest.raises(CheckpointError, match=r"no converted model .*there are whole-1"):
        delete_conversion(name)
    assert files_of(cache) == {"whole-1", ".whole-1.abcd.partial"}


def test_one_that_is_being_converted_stays(cache: Path) -> None:
    (cache / "models/whole-1").mkdir(parents=True)
    with held(cache / "models/.whole-1.lock"):
        run = CliRunner().invoke(app, ["models", "--delete", "whole-1"])
    assert run.exit_code == 2 and "being converted by another process" in run.output
    assert files_of(cache) == {"whole-1"} and os.listdir(cache / "models/whole-1") == []


@pytest.mark.parametrize(("noted", "state"), [
    ('{"path": "/m", "state": [Infinity]}', "unfinished"), ("[" * 200_000, "unfinished"), ('{"path": 3}', "unfinished"),
    ('{"path": "a\\u0000b", "state": [1]}', "gone")])
def test_a_note_of_something_else_is_no_error(cache: Path, noted: str, state: str) -> None:
    folder = cache / "models" / "m-0"
    folder.mkdir(parents=True)
    (folder / "source.json").write_text(noted)
    assert [found.state for found in list_conversions()] == [state]
