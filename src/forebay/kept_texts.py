"""Texts in the cache folder, each in a file with its checksum, named by the code and the releases that made it.

    FOLDER/KEY.json    a checksum, a newline, the text
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from forebay.rewriter.ir.files import read_input, write_text

PACKAGE = Path(__file__).parent
RELEASES = ("torch", "transformers")  # a text of other ones is made again


def digest_of(*described: object) -> str:
    """Return the name of a text: a digest of the described inputs, Forebay's code, and the `RELEASES`."""
    digest = hashlib.sha256(f"{described!r}\n".encode())
    for name in RELEASES:
        digest.update(f"{name} {_version(name)}\n".encode())
    digest.update(_code_state().encode())
    return digest.hexdigest()[:32]


def read_kept(path: Path) -> str | None:
    """The text of a file; None where there is none.

    Raises:
        ValueError: It is not as it was written.
        OSError: It cannot be read.
    """
    if not path.is_file():
        return None
    checksum, _, text = read_input(path).decode().partition("\n")
    if checksum != _checksum(text):
        raise ValueError("another checksum")
    with suppress(OSError):  # a folder that others made is read all the same
        os.utime(path)
    return text


def keep_text(path: Path, text: str, most: int) -> None:
    """Write a text, whole or not at all. The folder keeps the `most` texts that were read last. OSError where it cannot
    be written."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_text(path, f"{_checksum(text)}\n{text}")
    found = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime_ns, reverse=True)
    for old in found[most:]:
        for each in (old, old.with_suffix(".safetensors")):
            each.unlink(missing_ok=True)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _code_state() -> str:
    """Return the path, size and time of each file of Forebay's own code."""
    states = ((path, os.stat(path)) for path in _sources())
    return "".join(f"{path} {status.st_size} {status.st_mtime_ns}\n" for path, status in states)


def _sources() -> list[str]:
    """The files of Forebay's own code."""
    return sorted(os.path.join(at, name) for at, _, names in os.walk(PACKAGE, followlinks=True)
                  for name in names if name.endswith(".py"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
