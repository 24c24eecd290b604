"""Compiled kernels that a wheel brings: which are taken, before which others, and what the wheel is called."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.kernels.build import compile, prebuilt, processors
from forebay.kernels.build.compile import BuildError, load_library
from forebay.kernels.build.for_wheel import compile_for_wheel, platform_tag
from forebay.kernels.build.library import Library
from forebay.kernels.build.processors import NATIVE, PROCESSORS, processors_here
from forebay.kernels.cpu_support import sources
from forebay.passes.allocators.sources import LIBRARY

ROOT = Path(__file__).resolve().parents[3]
needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")
HASWELL = "fpu sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe"
AVX512 = "avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A function that tells what its code was compiled for; the cache and the package's folder are empty."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "compiled")
    (tmp_path / "a.cpp").write_text(
        '#ifdef __AVX2__\n#define WIDE 1\n#else\n#define WIDE 0\n#endif\nextern "C" int wide() { return WIDE; }\n'
        "#ifndef MADE_BY\n#define MADE_BY 0\n#endif\nextern \"C\" int made_by() { return MADE_BY; }\n")
    return Library("some", (tmp_path / "a.cpp",), ("-O1", NATIVE, "-fPIC"), of_processor=True)


def cxx() -> str:
    found = compile.compiler()
    assert found is not None
    return found


@pytest.mark.parametrize(("architecture", "line", "names"), [
    ("x86_64", f"flags\t\t: {HASWELL} {AVX512} avx512_vnni avx512vbmi avx512_bf16",
     ["v4-vnni-bf16", "v4-vnni", "v4", "v3", "v1"]),
    ("x86_64", f"flags\t\t: {HASWELL} {AVX512} avx512_vnni avx512_bf16", ["v4-vnni", "v4", "v3", "v1"]),
    ("x86_64", f"flags\t\t: {HASWELL} {AVX512} avx512_bf16", ["v4", "v3", "v1"]),
    ("x86_64", f"flags\t\t: {HASWELL} {AVX512.replace('avx512vl', '')}", ["v3", "v1"]),
    ("x86_64", f"flags\t\t: {HASWELL.replace('f16c', '')}", ["v1"]),
    ("aarch64", "Features\t: fp asimd asimddp atomics asimdrdm", ["v8.2-dotprod", "v8"]),
    ("aarch64", "Features\t: fp asimd", ["v8"]),
    ("riscv64", "isa\t\t: rv64imafdc", []),
])  # fmt: skip
def test_what_a_processor_can_run(
    architecture: str, line: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    monkeypatch.setattr(processors, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processors.platform, "machine", lambda: architecture)
    assert [kind.name for kind in processors_here()] == names


@needs_compiler
def test_the_packages_own_code_comes_first_and_needs_no_compiler(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = replace(library, flags=(*library.flags, "-DMADE_BY=1"))
    compile_for_wheel([shipped], prebuilt.FOLDER, cxx())
    index = prebuilt.FOLDER / prebuilt.INDEX
    index.write_text(json.dumps({"some": library.digest()}))  # as if it were of the same flags
    assert load_library(library).made_by() == 1
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_library(library).made_by() == 1
    library.sources[0].write_text('extern "C" int made_by() { return 2; }\n')
    with pytest.raises(BuildError, match="no C"):
        load_library(library)
    monkeypatch.delenv("CXX")
    assert load_library(library).made_by() == 2, "sources that were edited are compiled"


@needs_compiler
def test_the_most_capable_code_that_loads_is_taken(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_wheel([library], prebuilt.FOLDER, cxx())
    kinds = PROCESSORS[processors.platform.machine()]
    assert {path.name for path in prebuilt.FOLDER.iterdir()} == {
        prebuilt.INDEX, *(f"some-{kind.name}.so" for kind in kinds)}
    for count in (1, len(kinds)):
        monkeypatch.setattr(prebuilt, "processors_here", lambda count=count: kinds[-count:])
        wide = any(kind.needs >= {"avx2"} for kind in kinds[-count:])
        assert load_library(library).wide() == wide

@needs_compiler
def test_code_of_a_newer_system_is_passed_over(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try in a folder of its own: the loader knows a library by its path."""
    monkeypatch.setenv("CXX", cxx())
    compile_for_wheel([library], prebuilt.FOLDER, cxx())
    names = [f"some-{kind.name}.so" for kind in processors_here()]
    monkeypatch.setenv("CXX", "no-such-compiler")
    for broken, loads in ((names[:1], True), (names, False)):
        folder = tmp_path / f"{len(broken)} broken"
        shutil.copytree(prebuilt.FOLDER, folder)
        for name in broken:
            (folder / name).write_bytes(b"made for a newer system")
        with monkeypatch.context() as patch:
            patch.setattr(prebuilt, "FOLDER", folder)
            if loads:
                assert load_library(library).made_by() == 0
            else:
                with pytest.raises(BuildError, match="no C"):
                    load_library(library)


@needs_compiler
def test_a_cache_that_was_compiled_elsewhere_serves_without_a_compiler(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container carries it; not where the processor is another, nor for other sources."""
    load_library(library)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_library(library).made_by() == 0
    with monkeypatch.context() as other:
        other.setattr(compile, "processor_name", lambda: "another")
        with pytest.raises(BuildError, match="no C"):
            load_library(library)
    kept = next((tmp_path / "cache").glob("*.so"))
    kept.chmod(0o777)
    with pytest.raises(BuildError, match="can be written by other users"):
        load_library(library)
    kept.chmod(0o755)
    library.sources[0].write_text('extern "C" int made_by() { return 2; }\n')
    with pytest.raises(BuildError, match="no C"):
        load_library(library)


@pytest.mark.parametrize(("texts", "tag"), [
    ((b"\0GLIBC_2.2.5\0GLIBC_2.34\0", b"\0GLIBC_2.4\0"), "manylinux_2_34_x86_64"),
    ((b"\0GLIBC_2.2.5\0",), "manylinux_2_17_x86_64"),
    ((b"\0libc.musl\0",), "linux_x86_64"),
])  # fmt: skip
def test_a_wheel_names_the_oldest_system_that_runs_it(texts: tuple[bytes, ...], tag: str, tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    assert platform_tag("x86_64", paths) == tag


@needs_compiler
@pytest.mark.all
def test_the_wheel(tmp_path: Path) -> None:
    """`make wheel`: its name and its files, and code for this processor in every library."""
    subprocess.run(["make", "-s", "wheel", f"PYTHON={sys.executable}", f"DIST={tmp_path}"], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert wheel.stem.rpartition("-")[2].startswith(("manylinux_2_", "linux_"))
    with zipfile.ZipFile(wheel) as held:
        names = {name.rpartition("/")[2] for name in held.namelist() if name.startswith("forebay/kernels/compiled/")}
        assert "forebay/kernels/cpu_support/team.h" in held.namelist(), "the sources too: the build stays the fallback"
        held.extractall(tmp_path / "held")
    architecture = PROCESSORS[wheel.stem.split("_", 3)[-1] if "manylinux" in wheel.stem else "x86_64"]
    assert names == {prebuilt.INDEX, "allocators.so", *(f"cpu-{kind.name}.so" for kind in architecture)}
    index = json.loads((tmp_path / "held/forebay/kernels/compiled" / prebuilt.INDEX).read_text())
    assert index == {each.name: each.digest() for each in (sources.kernel_library(), LIBRARY)}
