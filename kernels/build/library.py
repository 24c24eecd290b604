"""The record of a shared library of C++, and the digest by which its compiled forms are recognized."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
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
        read: dict[str, tuple[bytes, list[str]]] = {}
        return {path: _text_of(str(path), self.include, read) for path in sorted(self.sources)}

    def digest(self, texts: Mapping[Path, bytes] | None = None) -> str:
        """Hash of all `texts` and flags, the same on every machine: all names of the processor at hand count alike."""
        flags = (re.sub("^-m(arch|cpu)=native$", "native", flag) for flag in self.flags)
        return digest(" ".join(flags).encode(), *(text for _, text in sorted(
            (path.name, text) for path, text in (texts or self.texts()).items())))


def digest(*parts: bytes) -> str:
    """Hash of several byte strings and of where each ends."""
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()[:20]


def _text_of(source: str, include: Sequence[Path], read: dict[str, tuple[bytes, list[str]]]) -> bytes:
    """The text of a source and its headers; `read` keeps each file's, and the files that it includes."""
    found: dict[str, bytes] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        if path in found or (path not in read and not os.path.exists(path)):
            continue
        if path not in read:
            text = Path(path).read_bytes()
            places = ((os.path.join(str(folder), name.decode()) for folder in (os.path.dirname(path), *include))
                      for name in re.findall(rb'^#include "([^"]+)"', text, re.M))
            read[path] = text, [place for each in places for place in [*filter(os.path.exists, each)][:1]]
        found[path], included = read[path]
        pending += included
    return b"".join(found[path] for path in sorted(found, key=lambda path: Path(path).parts))
