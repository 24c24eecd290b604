"""A file that readers open by themselves and that nothing is left of."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

PREFIX = "forebay-measure-"


@contextlib.contextmanager
def temporary_file(folder: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """A descriptor of a new file in `folder` and a path that opens it anew. The file has a name only where one without
    cannot be opened by its descriptor's path (no /proc, or a sandbox's); it has that until the end."""
    with tempfile.TemporaryFile(dir=folder, prefix=PREFIX) as file:
        path = f"/proc/self/fd/{file.fileno()}"
        if opens(path):
            yield file.fileno(), path
            return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PREFIX) as file:
        yield file.fileno(), file.name


def opens(path: str) -> bool:
    """Return whether a file can be opened by this path."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True
