"""Errors of reads and writes through a descriptor, which do not say of which file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise an OSError that names no file anew with `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
