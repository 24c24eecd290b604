"""Errors that others raise without a name: of reads and writes through a descriptor, and of Rust."""

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


@contextmanager
def panicking() -> Iterator[None]:
    """Raise a panic of the tokenizers library, which is no Exception (pyo3 has it beside them), as a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizers library broke off: {error}") from None
