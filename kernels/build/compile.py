"""C++ to a shared library: brought by the package, or compiled once per machine with the system's compiler, kept in the
cache folder, and loaded only from files that nobody else can write."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import functools
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forebay.kernels.build.cache_folder import cache_folder, locked, make_cache_folder
from forebay.kernels.build.library import Library, digest
from forebay.kernels.build.prebuilt import prebuilt
from forebay.kernels.build.process_limits import available_nbytes, core_count
from forebay.kernels.build.processors import processor_name

LINK_FLAGS = ("-shared",)
COMPILE_LIMIT_S = 300
FIRST_WORD_S, SAY_EACH_S = 2.0, 10.0  # of a build, before a user is told how far it is, and from then on
LOG = logging.getLogger("forebay")
COMPILER_NBYTES = 640 << 20  # of one; 550 MiB were seen
# What the system may give at another time, and what would help.
SHORTAGES = {errno.EMFILE: "raise the limit of open files (ulimit -n)", errno.ENFILE: "end other programs",
             errno.ENOMEM: "free memory", errno.EAGAIN: "raise the limit of processes (ulimit -u)"}

UNWRITABLE = errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.ENOTDIR, errno.EEXIST


class BuildError(RuntimeError):
    """A library that cannot be compiled, kept or trusted here; the message says why, in one line or the compiler's."""


def compiler() -> str | None:
    """Path of the C++ compiler: `$CXX`, or the first of c++, g++ and clang++ on the path; None where there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (named,) if named else ("c++", "g++", "clang++"))), None)


def load_library(library: Library) -> ctypes.CDLL:
    """The library: as the package brings it compiled, or compiled on its first use on this machine.

    Without a compiler a copy in the cache folder serves that another machine of the same processor made.

    Raises:
        BuildError: It cannot be had.
        OSError: The system lacks files, memory or processes just now. Slower code would hide that, and what it needs
            may not fit.
    """
    cxx = compiler() or ""
    try:
        if (brought := _load_prebuilt(library)) is not None:
            return brought
        found = build(library, cxx) if cxx else kept(library)
        if found is None:
            raise BuildError("no C++ compiler found; install g++ or clang++, or set CXX")
        return ctypes.CDLL(str(found))
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{cxx} failed: {error.stderr.decode(errors='replace').strip()[-600:]}") from error
    except (OSError, subprocess.SubprocessError) as error:
        _raise_shortage(library, error)
        advice = "; set FOREBAY_CACHE to a folder that can be written"
        raise BuildError(f"{error}{advice if getattr(error, 'errno', 0) in UNWRITABLE else ''}") from error


def _load_prebuilt(library: Library) -> ctypes.CDLL | None:
    """The package's own compiled form; None where there is none, or where this system is older than what it asks for.
    """
    for path in prebuilt(library):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            _raise_shortage(library, error)
            LOG.info("%s is not used: %s", path, error)
    return None


def _raise_shortage(library: Library, error: Exception) -> None:
    """Raise OSError where the system was short of something; else return."""
    for code, advice in SHORTAGES.items():
        # the loader of libraries gives words and no number
        if getattr(error, "errno", None) == code or str(error).endswith(os.strerror(code)):
            raise OSError(code, f"the {library.name} kernels cannot be built or loaded: {os.strerror(code)}; "
                                f"{advice}") from error


def build(library: Library, cxx: str) -> Path:
    """Compile what the cache folder lacks, several sources at once, and return the library's path.

    Each source becomes an object whose name is a hash of it, the headers it includes, flags, compiler version and
    processor: an edit compiles what it touches, and what is there stays. Of processes that begin at once one builds and
    the others wait. Raises OSError, subprocess.SubprocessError, or BuildError for code that others could have written.
    """
    common = _version(cxx), cxx.encode(), " ".join((*library.flags, *LINK_FLAGS)).encode(), _machine(library)
    texts = library.texts()
    folder = make_cache_folder()
    trust(folder)
    objects = {path: folder / f"{path.stem}-{digest(text, *common)}.o" for path, text in texts.items()}
    linked = " ".join(library.link_flags), *(path.name for path in objects.values())
    made = folder / f"{_stem(library, texts)}-{digest(*map(str.encode, linked))}.so"
    if made.exists():
        return trust(made)
    command = [cxx, *library.flags, *(f"-I{path}" for path in library.include)]
    with locked(f"{library.name}.lock"):
        missing = {path: len(texts[path]) for path in texts if not objects[path].exists()}
        _compile_all(missing, lambda path: _make(objects[path], [*command, "-c", str(path)]), library.name)
        _make(made, [cxx, *library.flags, *LINK_FLAGS, *(str(trust(path)) for path in objects.values()),
                     *library.link_flags])
    return trust(made)


def _compile_all(sizes: Mapping[Path, int], compile_one: Callable[[Path], None], name: str) -> None:
    """Compile sources of so many bytes, the largest first, as many at once as `_compilers`; a user who waits is told
    how far it is. The time left counts sources that are being compiled as half done."""
    count, whole = _compilers(), sum(sizes.values())
    began_s, end_s = time.monotonic(), 0.0
    say_s = began_s + FIRST_WORD_S
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        running = {pool.submit(compile_one, path): sizes[path] for path in sorted(sizes, key=lambda path: -sizes[path])}
        while running:
            ended, _ = concurrent.futures.wait(running, say_s - time.monotonic(), concurrent.futures.FIRST_COMPLETED)
            now_s = time.monotonic()
            try:
                for each in ended:
                    running.pop(each)
                    each.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            waiting = list(running.values())
            if ended:
                end_s = began_s + (now_s - began_s) * whole / (whole - sum(waiting) + sum(waiting[:count]) / 2)
            if waiting and now_s >= say_s:
                say_s = now_s + SAY_EACH_S
                left = f", about {end_s - now_s:.0f} s left" if end_s > now_s else ""
                LOG.warning("compiling the %s kernels, once: %.0f %% done%s", name, 100 - 100 * sum(waiting) / whole,
                            left)


def kept(library: Library) -> Path | None:
    """The newest copy in the cache folder that some compiler made of this library for this processor; None where there
    is none. Raises as `build`."""
    found = cache_folder().glob(f"{_stem(library)}-*.so")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return newest and trust(newest)


def _stem(library: Library, texts: Mapping[Path, bytes] | None = None) -> str:
    """The beginning of the names of its compiled files, the same for all compilers."""
    return f"{library.name}-{digest(library.digest(texts).encode(), _machine(library))}"


def _machine(library: Library) -> bytes:
    """Text that differs between machines for which the library's code differs."""
    return (processor_name() if library.of_processor else f"{platform.system()} {platform.machine()}").encode()


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
            raise BuildError(f"{place} can be written by other users; run chmod go-w {shlex.quote(str(place))}")
    return real


@functools.cache
def _version(cxx: str) -> bytes:
    return subprocess.run([cxx, "--version"], capture_output=True, check=True, timeout=COMPILE_LIMIT_S).stdout


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
