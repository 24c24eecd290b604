"""A folder in the cache, or of a conversion, that appears whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.rewriter.checkpoints.packed_writer import sync_folder
from forebay.rewriter.checkpoints.records import CheckpointError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name `out` once everything is on disk; a failure leaves nothing.
    CheckpointError where another process has made `out` meanwhile."""
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private
        try:
            partial.rename(out)
        except OSError as error:
            raise CheckpointError(f"{out} appeared during the conversion: another process made it") from error
        sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
