"""Models by their names on the Hugging Face Hub: found in the local cache, or fetched where the network may be used.

Layout of the cache: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from forebay.rewriter.checkpoints.checkpoint import ADAPTER, ADAPTER_CONFIG, INDEX, PICKLE_SUFFIXES, SINGLE
from forebay.rewriter.checkpoints.config import TEMPLATES
from forebay.rewriter.checkpoints.gguf_header import PART
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.files import read_input, read_input_text
from forebay.rewriter.ir.printable import printable, unfiltered

MODEL = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+?))?(/(?P<file>[^@]+\.(?i:gguf)))?")
WEIGHTS = (".gguf", ".safetensors", *PICKLE_SUFFIXES)  # end the names of files
COMMIT = re.compile("[0-9a-f]{40}")
# What a model's folder needs in addition to weights, at the top of a repository.
FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")


class HubModel(NamedTuple):
    """A model as a user names it: OWNER/NAME, OWNER/NAME@REVISION, or either followed by /FILE.gguf."""

    repository: str
    revision: str
    file: str

    def __str__(self) -> str:
        return self.repository + f"@{self.revision}" * (self.revision != "main") + f"/{self.file}" * bool(self.file)


def hub_model(name: str) -> HubModel | None:
    """The model that a name means on the Hub; None for one that means none there."""
    found = MODEL.fullmatch(name)
    if found is None or found["repository"].lower().endswith(WEIGHTS):
        return None
    return HubModel(found["repository"], found["revision"] or "main", found["file"] or "")


def fetching(folder: Path) -> str:
    """The command that fetches what a folder of the cache lacks; "" for other folders."""
    stored = folder.parent.parent.name
    name = stored.removeprefix("models--").replace("--", "/")
    return f"hf download {name}" if folder.parent.name == "snapshots" and name != stored else ""


def locate_on_hub(model: HubModel) -> Path:
    """The folder or the GGUF file of a model in the local cache, fetched if it is not there.

    Raises:
        CheckpointError: it is neither there nor to be had; the message names the model and says what to do.
    """
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise CheckpointError(f"{model} needs huggingface_hub, which finds it: pip install "
                              "'forebay[models]'") from error
    cache = Path(constants.HF_HUB_CACHE)
    snapshot = _snapshot(cache, model)
    lacks = "" if snapshot is None else _lacking(snapshot, model)
    if snapshot is None or lacks:
        where = f"not in the local Hugging Face cache ({cache})" if snapshot is None else (
            f"in the local Hugging Face cache without {lacks}")
        if constants.is_offline_mode():
            raise CheckpointError(f"{model} is no file or folder, it is {where}, and HF_HUB_OFFLINE is set: unset it "
                                  "to fetch the model, or name a folder or a .gguf file")
        snapshot = _fetch(model, where)
    return snapshot / model.file


def _snapshot(cache: Path, model: HubModel) -> Path | None:
    """The folder of the cache that holds a revision of a model; None where there is none."""
    stored = cache / f"models--{model.repository.replace('/', '--')}"
    commit = model.revision
    if not COMMIT.fullmatch(commit):
        try:
            commit = read_input_text(stored / "refs" / commit).strip()
        except (OSError, ValueError):
            return None
    found = stored / "snapshots" / commit
    return found if COMMIT.fullmatch(commit) and found.is_dir() else None


def _lacking(snapshot: Path, model: HubModel) -> str:
    """The first file of a model that a snapshot lacks; "" where it is whole."""
    adapter = (snapshot / ADAPTER_CONFIG).exists() and not (snapshot / "config.json").exists()
    needed = _parts(model.file) if model.file else [ADAPTER] if adapter else ["config.json"]
    if not model.file and not adapter and not (snapshot / SINGLE).exists():
        needed.append(INDEX)
        try:
            named = json.loads(read_input(snapshot / INDEX))["weight_map"].values()
            needed += sorted({name for name in named if isinstance(name, str)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # an index that is there and no index is told of where it is opened
    return next((name for name in needed if not (snapshot / name).exists()), "")


def _parts(file: str) -> list[str]:
    """The files of the GGUF model of which `file` is one."""
    found = PART.fullmatch(file)
    return [file] if found is None else [
        f"{found['stem']}-{n:05}-of-{found['count']}{found['ending']}" for n in range(1, int(found["count"]) + 1)]


def _fetch(model: HubModel, where: str) -> Path:
    """Fetch the files of a model, with bars of progress, and return its folder in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        # which, unlike a listing, fails at once without a network
        found = HfApi().model_info(model.repository, revision=model.revision, timeout=10)
        files = _chosen(model, [file.rfilename for file in found.siblings or ()])
        with redirect_stderr(unfiltered(sys.stderr)):  # bars draw over themselves
            return Path(snapshot_download(model.repository, revision=model.revision,
                                          allow_patterns=[re.sub(r"([\[*?])", r"[\1]", file) for file in files]))
    except (CheckpointError, MemoryError):
        raise
    except GatedRepoError as error:
        raise CheckpointError(f"{model} is gated: accept its terms at https://huggingface.co/{model.repository}, then "
                              "log in: hf auth login") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{model}: the Hub has no such revision of {model.repository}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"no model {model}: no such file or folder, and no such model on the Hugging Face Hub; "
                              "if it is private, log in: hf auth login") from error
    except Exception as error:  # of the network, in whatever HTTP library huggingface_hub uses
        raise CheckpointError(f"{model} is no file or folder, it is {where}, and cannot be fetched: {error}") from error


def _chosen(model: HubModel, files: Sequence[str]) -> list[str]:
    """Return the files of a repository that a model needs."""
    absent = [file for file in _parts(model.file) if file not in files] if model.file else []
    ggufs = sorted(file for file in files if file.lower().endswith(".gguf"))
    weights = [file for file in files if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", file)]
    if model.file and not absent:
        return _parts(model.file)
    if absent or (ggufs and not weights):
        what = f"has no {absent[0]}" if absent else "has GGUF files, of which one is named, as in OWNER/NAME/FILE.gguf"
        raise CheckpointError(f"{model.repository} {what}. It has {', '.join(ggufs) or 'no GGUF file'}")
    if not weights and ADAPTER in files:
        weights = [ADAPTER]
    if not weights:
        raise CheckpointError(f"{model} has no {SINGLE} and no shards of it; only safetensors and GGUF files are read")
    if SINGLE in weights:
        weights = [SINGLE]  # as transformers chooses
    beside = [file for file in files if file.endswith(FILES) and str(PurePosixPath(file).parent) in (".", TEMPLATES) and
              printable(file) == file]
    return [*weights, *beside]
