"""The one folder that Forebay keeps things in between processes: compiled code, models, the profile of the machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """`$FOREBAY_CACHE`, else ~/.cache/forebay; it need not exist."""
    return Path(os.environ.get("FOREBAY_CACHE") or "~/.cache/forebay").expanduser()


def make_cache_folder() -> Path:
    """`cache_folder()`, made for its owner alone (0700) where it is missing; OSError where it cannot be."""
    folder = cache_folder()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name` of the cache folder; the kernel lets go of it when this process dies."""
    descriptor = os.open(make_cache_folder() / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
