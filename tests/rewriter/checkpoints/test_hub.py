"""Models by their names on the Hugging Face Hub: in a cache as huggingface_hub lays it out, or fetched into one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from families import llama
from huggingface_hub import constants, errors
from safetensors.torch import load_file, save_file
from tiny_gguf import split, write_model

from forebay.api import wrap
from forebay.commands.prompts import load_tokenizer
from forebay.commands.quantize import quantize_command
from forebay.commands.terminal import JobError
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.hub import hub_model
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import locate_model, resolve_model

COMMITS = ("1" * 40, "2" * 40)
TINY, GGUFS = "some-org/Tiny.model_1", "some-org/tiny-GGUF"


def store(cache: Path, name: str, files: Path, commit: str = COMMITS[0], ref: str = "main") -> Path:
    """Keep the files of a folder as a snapshot: links to blobs that are called by what they hold."""
    stored = cache / f"models--{name.replace('/', '--')}"
    snapshot = stored / "snapshots" / commit
    for folder in (snapshot, stored / "blobs", (stored / "refs" / ref).parent):
        folder.mkdir(parents=True, exist_ok=True)
    (stored / "refs" / ref).write_text(commit)
    for path in files.iterdir():
        blob = stored / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of two models: one sharded, one as GGUF files, of which one is split."""
    import transformers

    folders = {name: tmp_path_factory.mktemp(name.partition("/")[2]) for name in (TINY, GGUFS)}
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(llama(2)).save_pretrained(folders[TINY])
    tensors, weight_map = load_file(folders[TINY] / "model.safetensors"), {}
    (folders[TINY] / "model.safetensors").unlink()
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        shard = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folders[TINY] / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    (folders[TINY] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_model(folders[GGUFS] / "tiny-Q8_0.gguf", "llama", kinds=("Q8_0",))
    split(folders[GGUFS] / "tiny-Q8_0.gguf", (7,))
    return folders


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, Path]) -> Path:
    """Where huggingface_hub keeps models; conversions have a place of their own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize(("name", "meant"), [
    ("a/b", ("a/b", "main", "")), ("a-1/b.c_d@v1.0", ("a-1/b.c_d", "v1.0", "")),
    ("a/b@refs/pr/3", ("a/b", "refs/pr/3", "")), ("a/b/c.gguf", ("a/b", "main", "c.gguf")),
    ("a/b@v1/Q4_K_M/c-00001-of-00002.gguf", ("a/b", "v1", "Q4_K_M/c-00001-of-00002.gguf")),
    ("a", None), ("./a/b", None), ("/a/b", None), ("../b", None), ("a/b/c", None), ("a/b.gguf", None), ("~/a", None),
    ("a/b.safetensors", None), ("a/../b", None), ("", None), ("a/b@", None), ("a b/c", None)])
def test_names(name: str, meant: tuple[str, str, str] | None) -> None:
    found = hub_model(name)
    assert found == meant and (found is None or str(found) == name)


def test_a_snapshot_of_links_runs_and_nothing_is_written_there(cache: Path, made: dict[str, Path]) -> None:
    """By wrap and by quantize; a folder of that name where the command runs comes first."""
    snapshot = store(cache, TINY, made[TINY])
    before = sorted((path, path.lstat().st_mtime_ns) for path in cache.rglob("*"))
    assert resolve_model(TINY) == snapshot
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with wrap(TINY, "4MB", prompt=8, new_tokens=2) as lm, wrap(made[TINY], "4MB", prompt=8, new_tokens=2) as same:
        assert torch.equal(lm.next_logits(ids), same.next_logits(ids))
    quantize_command(TINY, cache.parent / "q", "w8g32")
    assert (cache.parent / "q" / "forebay.json").exists()
    assert sorted((path, path.lstat().st_mtime_ns) for path in cache.rglob("*")) == before
    shutil.copytree(made[TINY], cache.parent / TINY)
    assert resolve_model(TINY) == Path(TINY)


def test_revisions_are_those_that_are_named(cache: Path, made: dict[str, Path]) -> None:
    first, second = store(cache, TINY, made[TINY]), store(cache, TINY, made[TINY], COMMITS[1], "refs/pr/1")
    assert locate_model(TINY) == locate_model(f"{TINY}@{COMMITS[0]}") == first
    assert locate_model(f"{TINY}@refs/pr/1") == locate_model(f"{TINY}@{COMMITS[1]}") == second
    for unknown in ("v2", "../../x", "3" * 40):
        with pytest.raises(CheckpointError, match=f"{TINY}@{unknown} is .*not in the local"):
            locate_model(f"{TINY}@{unknown}")


def test_gguf_files_are_named_one_by_one(cache: Path, made: dict[str, Path]) -> None:
    """Any part of a split one opens the whole."""
    snapshot = store(cache, GGUFS, made[GGUFS])
    folder = resolve_model(f"{GGUFS}/tiny-Q8_0-00002-of-00002.gguf")
    assert (folder / "forebay.json").exists() and resolve_model(f"{GGUFS}/tiny-Q8_0-00001-of-00002.gguf") == folder
    assert locate_model(f"{GGUFS}/tiny-Q8_0.gguf") == snapshot / "tiny-Q8_0.gguf"
    (snapshot / "tiny-Q8_0-00001-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"cache without tiny-Q8_0-00001-of-00002\.gguf, and HF_HUB_OFFLINE"):
        resolve_model(f"{GGUFS}/tiny-Q8_0-00002-of-00002.gguf")


@pytest.mark.parametrize("lost", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("how", ["no link", "a link to nothing"])
def test_what_a_snapshot_lacks_is_named(cache: Path, made: dict[str, Path], lost: str, how: str) -> None:
    link = store(cache, TINY, made[TINY]) / lost
    link.resolve().unlink()
    if how == "no link":
        link.unlink()
    with pytest.raises(CheckpointError, match=f"{TINY} is no file or folder, it is in .* without {lost}, and HF_HUB"):
        resolve_model(TINY)


def test_a_snapshot_without_a_tokenizer_says_how_to_fetch_it(cache: Path, made: dict[str, Path]) -> None:
    """As transformers leaves it where it loaded a model alone."""
    store(cache, TINY, made[TINY])
    with pytest.raises(JobError, match=rf"there is no tokenizer.json, .*; fetch it: hf download {TINY}$"):
        load_tokenizer(resolve_model(TINY))


@pytest.fixture
def online(cache: Path, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A Hub of two repositories; what was asked of it."""
    asked: list[list[str]] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    more = {GGUFS: ["README.md", "config.json"], TINY: [
        "README.md", "model.bin", "consolidated.safetensors", "onnx/config.json", "original/x.safetensors",
        "additional_chat_templates/tool_use.jinja", "tokenizer[1].json"]}

    def model_info(self: Any, name: str, *, revision: str, timeout: float) -> SimpleNamespace:
        if name not in more:
            raise errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
        if revision != "main":
            raise errors.RevisionNotFoundError.__new__(errors.RevisionNotFoundError)
        files = [*more[name], *(path.name for path in made[name].iterdir())]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

    def snapshot_download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append(sorted(allow_patterns))
        shutil.rmtree(cache / f"models--{name.replace('/', '--')}", ignore_errors=True)
        return str(store(cache, name, made[name]))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_what_a_model_needs_is_fetched_once(cache: Path, made: dict[str, Path], online: list[list[str]]) -> None:
    """Weights as transformers chooses them, and what lies beside them; again, where a file was lost."""
    for _ in range(2):
        folder = resolve_model(TINY)
    own = [path.name for path in made[TINY].iterdir()]
    assert online == [sorted([*own, "additional_chat_templates/tool_use.jinja", "tokenizer[[]1].json"])]
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert resolve_model(TINY) == folder and len(online) == 2
    for _ in range(2):
        locate_model(f"{GGUFS}/tiny-Q8_0-00001-of-00002.gguf")
    assert online[2:] == [[f"tiny-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]]


@pytest.mark.parametrize(("name", "message"), [
    ("some-org/none", r"no model some-org/none: no such file or folder, and no such model on the Hugging Face Hub"),
    (f"{TINY}@v9", f"{TINY}@v9: the Hub has no such revision of {TINY}"),
    (GGUFS, rf"{GGUFS} has GGUF files, of which one is named, as in OWNER/NAME/FILE\.gguf\. It has tiny-Q8_0-00001"),
    (f"{GGUFS}/other.gguf", rf"{GGUFS} has no other\.gguf\. It has tiny-Q8_0"),
    (f"{TINY}/x.gguf", r"has no x\.gguf\. It has no GGUF file"),
])
@pytest.mark.usefixtures("online")
def test_what_the_hub_lacks_is_named(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_model(name)


def _gated() -> Exception:
    return errors.GatedRepoError.__new__(errors.GatedRepoError)


@pytest.mark.parametrize(("error", "message"), [
    (lambda: OSError("no route"), "a/b is no file or folder, it is not in the local .*and cannot be fetched: no route"),
    (_gated, r"a/b is gated: accept its terms at https://huggingface\.co/a/b, then log in"),
])
def test_a_network_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, online: list[list[str]], error: Callable[[], Exception], message: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(CheckpointError, match=message):
        resolve_model("a/b")
    assert not online
