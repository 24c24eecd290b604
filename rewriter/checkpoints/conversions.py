"""The models that were converted into the cache folder: what there is, of which files, and how to be rid of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from forebay.kernels.build.cache_folder import cache_folder
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import MODELS, SOURCE, held, source_state
from forebay.rewriter.ir.files import naming

PARTIAL = re.compile(r"\.(.+)\.[^.]+\.partial")  # of a conversion or a deletion that was killed


@dataclass(frozen=True)
class Converted:
    """A model in the cache: its folder's name, bytes on disk, and the file or folder that it was made from, None where
    nothing says so. `state`: current, changed or gone, as that file is now; unfinished where a conversion was stopped.
    """

    name: str
    nbytes: int
    source: Path | None
    state: str


def list_conversions() -> list[Converted]:
    """List the conversions in the cache, the largest first."""
    models = cache_folder() / MODELS
    names = set()
    for folder in models.iterdir() if models.is_dir() else ():
        left = PARTIAL.fullmatch(folder.name)
        if folder.is_dir() and (left or not folder.name.startswith(".")):
            names.add(left[1] if left else folder.name)
    found = [_described(models, name) for name in names]
    return sorted(found, key=lambda each: (-each.nbytes, each.name))


def delete_conversion(name: str) -> int:
    """Delete one by its name, with what killed conversions left of it, and return its bytes; the file that it was made
    from stays. Killed, it leaves nothing that would be taken for a model.

    CheckpointError for a name that is not there, and for a conversion that is under way.
    """
    models = cache_folder() / MODELS
    known = {each.name: each for each in list_conversions()}
    if name not in known:
        raise CheckpointError(f"no converted model {name!r} in {models}; there are "
                              f"{', '.join(sorted(known)) or 'none'}")
    with held(models / f".{name}.lock", wait=False):
        folder, partials = models / name, _partials(models, name)
        if folder.exists():
            with naming(folder):
                partials.append(Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=models)))
                folder.rename(partials[-1])
        for partial in partials:
            with naming(partial):
                shutil.rmtree(partial)
    return known[name].nbytes


def _partials(models: Path, name: str) -> list[Path]:
    return [path for path in models.iterdir() if (left := PARTIAL.fullmatch(path.name)) and left[1] == name]


def _described(models: Path, name: str) -> Converted:
    folder = models / name
    nbytes = sum(_nbytes(each) for each in (folder, *_partials(models, name)))
    try:
        noted = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
        source, state = Path(noted["path"]), list(map(int, noted["state"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Converted(name, nbytes, None, "unfinished")
    try:
        now = "current" if source_state(source) == state else "changed"
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        now = "gone"
    return Converted(name, nbytes, source, now)


def _nbytes(folder: Path) -> int:
    """Bytes that a folder's files take on disk; of one that is being deleted what is left."""
    total = 0
    for inside, _, files in os.walk(folder):
        for file in files:
            try:
                total += (Path(inside) / file).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total
