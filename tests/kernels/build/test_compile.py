"""Compiling and loading C++: what is made anew, and what is not trusted."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import re
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from forebay.kernels.build import compile
from forebay.kernels.build.compile import BuildError, load_library
from forebay.kernels.build.library import Library

pytestmark = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")
FLAGS = ("-O1", "-fPIC")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is not there yet."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


@pytest.fixture
def library(tmp_path: Path) -> Library:
    sources, headers = tmp_path / "sources", tmp_path / "headers"
    sources.mkdir()
    headers.mkdir()
    (headers / "inner.h").write_text("#define VALUE 1\n")
    (sources / "outer.h").write_text('#include "inner.h"\n')
    (sources / "a.cpp").write_text('#include "outer.h"\nextern "C" int a() { return VALUE; }\n')
    (sources / "b.cpp").write_text('extern "C" int b() { return 2; }\n')
    return Library("cpu", (sources / "a.cpp", sources / "b.cpp"), FLAGS, (headers,))


def test_an_edit_compiles_what_it_touches(library: Library, cache: Path) -> None:
    def made() -> tuple[tuple[int, int], set[str]]:
        before = set(cache.glob("*"))
        loaded = load_library(library)
        return (loaded.a(), loaded.b()), {path.name.split("-")[0] for path in set(cache.glob("*")) - before}

    assert made() == ((1, 2), {"a", "b", "cpu", "cpu.lock"})
    assert made()[1] == set()
    (library.include[0] / "inner.h").write_text("#define VALUE 3\n")
    assert made() == ((3, 2), {"a", "cpu"})
    library.sources[1].write_text("this is no C++\n")
    cxx = compile.compiler()
    assert cxx is not None
    with pytest.raises(subprocess.CalledProcessError):
        compile.build(library, cxx)
    with pytest.raises(BuildError, match=r"failed: .*b\.cpp"):
        load_library(library)
    assert not list(cache.glob("*/")), "no scratch is left"


def test_of_processes_that_begin_at_once_one_builds(
    library: Library, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve of them once took three times as long as one, each compiling everything."""
    log, script = tmp_path / "log", tmp_path / "c++"
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\nsleep 0.3\nexec {compile.compiler()} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        loaded = list(pool.map(lambda _: load_library(library), range(3)))
    assert [(each.a(), each.b()) for each in loaded] == [(1, 2)] * 3
    compiled = [line for line in log.read_text().splitlines() if "--version" not in line]
    assert sorted(line.count(" -c ") for line in compiled) == [0, 1, 1], "one link, each source once"


def test_who_waits_is_told_how_far_a_build_is(
    library: Library, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *b.cpp*) sleep 0.3;; esac\nexec {compile.compiler()} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(compile, "FIRST_WORD_S", 0.0)
    monkeypatch.setattr(compile, "SAY_EACH_S", 0.05)
    load_library(library)
    assert caplog.messages[0] == "compiling the cpu kernels, once: 0 % done"
    assert re.fullmatch(r"compiling the cpu kernels, once: [1-9]\d % done(, about \d s left)?", caplog.messages[-1])
    caplog.clear()
    load_library(library)
    assert not caplog.messages


def test_a_cache_that_cannot_be_written_is_said_with_what_to_do(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match=r"set FOREBAY_CACHE to a folder that can be written$"):
        load_library(library)


def test_the_cache_is_its_owners_alone(library: Library, cache: Path) -> None:
    mask = os.umask(0)
    try:
        load_library(library)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) & 0o022 for path in cache.iterdir()} == {0}, "whatever the umask"


def _others_write(cache: Path) -> Path:
    return cache


def _others_write_library(cache: Path) -> Path:
    return next(cache.glob("*.so"))


def _others_write_object(cache: Path) -> Path:
    next(cache.glob("*.so")).unlink()
    return next(cache.glob("*.o"))


@pytest.mark.parametrize("victim", (_others_write, _others_write_library, _others_write_object))
@pytest.mark.parametrize("mode", (0o020, 0o002))
def test_what_others_can_write_is_not_loaded(library: Library, cache: Path, victim, mode: int) -> None:
    load_library(library)
    path = victim(cache)
    before = path.stat().st_mode
    path.chmod(before | mode)
    with pytest.raises(BuildError, match=f"can be written by other users; run chmod go-w {path}"):
        load_library(library)
    path.chmod(before)
    load_library(library)


def test_a_link_is_judged_by_what_it_leads_to(library: Library, cache: Path, tmp_path: Path) -> None:
    load_library(library)
    made, elsewhere = next(cache.glob("*.so")), tmp_path / "open"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    made.rename(elsewhere / made.name)
    made.symlink_to(elsewhere / made.name)
    with pytest.raises(BuildError, match=f"{elsewhere} can be written by other users"):
        load_library(library)


def test_another_users_code_is_not_loaded(library: Library, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library(library)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(BuildError, match="belongs to another user; set FOREBAY_CACHE"):
        load_library(library)


def test_without_a_compiler_it_says_what_to_install(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found; install"):
        load_library(library)


@pytest.mark.parametrize("code", sorted(compile.SHORTAGES))
@pytest.mark.parametrize("what", ("process", "loader"))
def test_a_shortage_is_told_and_not_hidden_by_slower_code(
    library: Library, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int, what: str
) -> None:
    def short(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code)) if what == "process" else OSError(f"a.so: {os.strerror(code)}")

    with monkeypatch.context() as patch:
        if what == "process":
            patch.setattr(subprocess, "run", short)
            compile._version.cache_clear()
        else:
            patch.setattr(compile.ctypes, "CDLL", short)
        with pytest.raises(OSError, match=f"the cpu kernels cannot be built or loaded: {os.strerror(code)}; ") as told:
            load_library(library)
    assert told.value.errno == code
    load_library(library)


def test_what_the_system_never_gives_is_no_shortage(library: Library, cache: Path, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    def refused(path: str) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(compile.ctypes, "CDLL", refused)
    with pytest.raises(BuildError, match="Permission denied"):
        load_library(library)


@pytest.mark.parametrize(("cores", "more", "room"), [(1, 0, 1 << 40), (3, 0, 1 << 40), (2, 5, 1500 << 20), (1, 5, 0)])
def test_no_more_compilers_at_once_than_there_are_cores_and_memory_for(
    library: Library, cache: Path, monkeypatch: pytest.MonkeyPatch, cores: int, more: int, room: int
) -> None:
    """`more` cores than find memory for a compiler."""
    folder, lock = library.sources[0].parent, threading.Lock()
    running, most, all_begun = 0, 0, threading.Barrier(cores)
    make = compile._make

    def counted(target: Path, command: list[str]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if "-c" in command:
            all_begun.wait(60)  # as many as may begin at once, and no fewer
        make(target, command)
        with lock:
            running -= 1

    monkeypatch.setattr(compile, "core_count", lambda: cores + more)
    monkeypatch.setattr(compile, "available_nbytes", lambda: room)
    monkeypatch.setattr(compile, "_make", counted)
    sources = [folder / f"{n}.cpp" for n in range(2 * cores)]
    for path in sources:
        path.write_text(f'extern "C" int f{path.stem}() {{ return 0; }}\n')
    load_library(Library("many", tuple(sources), FLAGS))
    assert most == cores
