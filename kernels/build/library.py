"""The record of a shared library of C++, and the digest by which its compiled forms are recognized."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Library:
    """The parts of a shared library: its sources, the flags they take, folders of headers searched after a source's
    own, whether its code differs between processors (NATIVE is then one of the flags), and more flags of the linker."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    include: tuple[Path, ...] = ()
    of_processor: bool = False
    link_flags: tuple[str, ...] = ()

    def texts(self) -> dict[Path, bytes]:
        """Each source with every header of ours that it includes, itself or through another."""
        return {path: _text_of(path, self.include) for path in sorted(self.sources)}

    def digest(self) -> str:
        """Hash of all texts and flags, the same on every machine: all names of the processor at hand count alike."""
        flags = (re.sub("^-m(arch|cpu)=native$", "native", flag) for flag in self.flags)
        return digest(" ".join(flags).encode(), *(text for _, text in sorted(
            (path.name, text) for path, text in self.texts().items())))


def digest(*parts: bytes) -> str:
    """Hash of several byte strings and of where each ends."""
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()[:20]


def _text_of(source: Path, include: Sequence[Path]) -> bytes:
    found: dict[Path, bytes] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        if path in found or not path.exists():
            continue
        found[path] = path.read_bytes()
        for name in re.findall(rb'^#include "([^"]+)"', found[path], re.M):
            places = (folder / name.decode() for folder in (path.parent, *include))
            pending += [place for place in places if place.exists()][:1]
    return b"".join(found[path] for path in sorted(found))
