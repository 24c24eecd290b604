"""C++ to a shared library: compiled once per machine with the system's compiler, kept in the cache folder, loaded only
from files that nobody else can write."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.kernels.build.cache_folder import locked, make_cache_folder
from forebay.kernels.build.process_limits import available_nbytes, core_count

LINK_FLAGS = ("-shared",)
COMPILE_LIMIT_S = 300
COMPILER_NBYTES = 640 << 20  # of one; 550 MiB were seen
# What the system may give at another time, and what would help.
SHORTAGES = {errno.EMFILE: "raise the limit of open files (ulimit -n)", errno.ENFILE: "end other programs",
             errno.ENOMEM: "free memory", errno.EAGAIN: "raise the limit of processes (ulimit -u)"}


class BuildError(RuntimeError):
    """A library that cannot be compiled, kept or trusted here; the message says why, in one line or the compiler's."""


@dataclass(frozen=True)
class Library:
    """What a shared library is made of: its sources, the flags they take, folders of headers searched after a source's
    own, and whether its code differs between processors (`-march=native`)."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    include: tuple[Path, ...] = ()
    of_processor: bool = False


def compiler() -> str | None:
    """Path of the C++ compiler: `$CXX`, or the first of c++, g++ and clang++ on the path; None where there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (named,) if named else ("c++", "g++", "clang++"))), None)


def load_library(library: Library) -> ctypes.CDLL:
    """The library, compiled on its first use on this machine; BuildError where it cannot be had, OSError where the
    system lacks files, memory or processes just now: slower code would hide that, and what it needs may not fit."""
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler found; install g++ or clang++, or set CXX")
    try:
        return ctypes.CDLL(str(build(library, cxx)))
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{cxx} failed: {error.stderr.decode(errors='replace').strip()[-600:]}") from error
    except (OSError, subprocess.SubprocessError) as error:
        for code, advice in SHORTAGES.items():
            # the loader of libraries gives words and no number
            if getattr(error, "errno", None) == code or str(error).endswith(os.strerror(code)):
                raise OSError(code, f"the {library.name} kernels cannot be built or loaded: {os.strerror(code)}; "
                                    f"{advice}") from error
        raise BuildError(str(error)) from error


def build(library: Library, cxx: str) -> Path:
    """Compile what the cache folder lacks, several sources at once, and return the library's path.

    Each source becomes an object whose name is a hash of it, the headers it includes, flags, compiler version and
    processor: an edit compiles what it touches, and what is there stays. Of processes that begin at once one builds and
    the others wait. Raises OSError, subprocess.SubprocessError, or BuildError for code that others could have written.
    """
    machine = _cpu_name() if library.of_processor else f"{platform.system()} {platform.machine()}"
    common = _version(cxx), cxx.encode(), " ".join((*library.flags, *LINK_FLAGS)).encode(), machine.encode()
    texts = {path: _text_of(path, library.include) for path in sorted(library.sources)}
    folder = make_cache_folder()
    trust(folder)
    objects = {path: folder / f"{path.stem}-{_digest(text, *common)}.o" for path, text in texts.items()}
    made = folder / f"{library.name}-{_digest(*(path.name.encode() for path in objects.values()))}.so"
    if made.exists():
        return trust(made)
    longest_first = sorted(texts, key=lambda path: -len(texts[path]))
    command = [cxx, *library.flags, *(f"-I{path}" for path in library.include)]
    with locked(f"{library.name}.lock"), concurrent.futures.ThreadPoolExecutor(_compilers()) as pool:
        list(pool.map(lambda path: _make(objects[path], [*command, "-c", str(path)]), longest_first))
        _make(made, [cxx, *library.flags, *LINK_FLAGS, *(str(trust(path)) for path in objects.values())])
    return trust(made)


def _compilers() -> int:
    """Compilers to run at once: one a core, as many as find memory."""
    return max(1, min(core_count(), available_nbytes() // COMPILER_NBYTES))


def trust(path: Path) -> Path:
    """The file or folder that `path` leads to, if it is the user's own and nobody else can write it or the folder it
    lies in; else BuildError: whoever can write compiled code runs it as the user."""
    real = path.resolve()
    for place in (real,) if real.is_dir() else (real.parent, real):
        status = place.stat()
        if status.st_uid != os.geteuid():
            raise BuildError(f"{place} belongs to another user; set FOREBAY_CACHE to a folder of your own")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BuildError(f"{place} can be written by other users; run chmod go-w {place}")
    return real


@functools.cache
def _version(cxx: str) -> bytes:
    return subprocess.run([cxx, "--version"], capture_output=True, check=True, timeout=COMPILE_LIMIT_S).stdout


def _cpu_name() -> str:
    """Text that differs between processors for which -march=native gives different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _text_of(source: Path, include: Sequence[Path]) -> bytes:
    """A source and every header of ours that it includes, itself or through another."""
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


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def _make(target: Path, command: Sequence[str]) -> None:
    """Run a compiler's command that writes target, unless it is there; a rename puts it in place whole, writable by
    nobody but its owner whatever the umask."""
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        subprocess.run([*command, "-o", str(made)], capture_output=True, check=True, timeout=COMPILE_LIMIT_S)
        made.chmod(0o755)
        os.replace(made, target)
