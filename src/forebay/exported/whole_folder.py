"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forebay.exported.errors import ExportError
from forebay.rewriter.checkpoints.packed_writer import sync_folder

MANIFEST = "export.json"  # stands in every folder that is exported


@contextlib.contextmanager
def whole_folder(out: Path, force: bool) -> Iterator[Path]:
    """A new folder to write into, which takes the name `out` when all is done; what breaks off leaves nothing behind.
    What stands at `out` is replaced at the end, with `force`, if it is an earlier export. ExportError otherwise."""
    _refuse_existing(out, force)
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(parent, out.name)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.{os.getpid()}.", suffix=".partial", dir=parent))
    except OSError as error:
        raise ExportError(f"{out} cannot be written: {error.strerror}; name another folder") from error
    try:
        yield draft
        draft.chmod(0o777 & ~_umask())  # it was made for its owner alone
        old = None
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.{os.getpid()}.", suffix=".partial", dir=parent))
            out.rename(old / "out")
        draft.rename(out)
        sync_folder(parent)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _remove_stale(parent: Path, name: str) -> None:
    """Remove what processes that were killed left of exports to the same place."""
    for left in parent.glob(f".{glob.escape(name)}.*.partial"):
        owner = left.name.removeprefix(f".{name}.").partition(".")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)


def _refuse_existing(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise ExportError(f"{out} is there already and is no folder; name another")
    if not any(out.iterdir()):
        return
    if not (out / MANIFEST).is_file():
        raise ExportError(f"{out} is not empty and holds no exported model: name a new folder")
    if not force:
        raise ExportError(f"{out} holds an exported model; --force (force=True) replaces it")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
