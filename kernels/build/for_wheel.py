"""Compile the libraries that a wheel brings, and name the systems that they run on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forebay.kernels.build.compile import BuildError, build
from forebay.kernels.build.library import Library
from forebay.kernels.build.prebuilt import INDEX, file_name
from forebay.kernels.build.processors import NATIVE, PROCESSORS

# The C++ library is linked in, because systems have older ones. Its unused parts go: they would ask for a newer glibc.
SELF_CONTAINED = ("-static-libstdc++", "-s", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")
OLDEST_GLIBC = 17  # of 2.17, the oldest that wheels can name


def compile_for_wheel(libraries: Sequence[Library], folder: Path, cxx: str) -> str:
    """Compile every library for every kind of processors that `cxx` compiles for, into `folder`.

    Returns:
        The platform tag of a wheel that holds them: the oldest system that has all that they ask for.

    Raises:
        BuildError: The compiler's architecture has no list of kinds, or it refused a source.
    """
    machine = _machine_of(cxx)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for library in libraries:
        for kind in PROCESSORS[machine] if library.of_processor else (None,):
            own = () if kind is None else kind.flags
            flags = *(flag for flag in library.flags if flag != NATIVE), *own
            target = folder / file_name(library, kind)
            try:
                shutil.copyfile(build(replace(
                    library, flags=flags, of_processor=False, link_flags=SELF_CONTAINED), cxx), target)
            except subprocess.CalledProcessError as error:
                raise BuildError(f"{cxx} failed: {error.stderr.decode(errors='replace').strip()[-600:]}") from error
            made.append(target)
    (folder / INDEX).write_text(json.dumps({library.name: library.digest() for library in libraries}) + "\n")
    return platform_tag(machine, made)


def platform_tag(machine: str, libraries: Sequence[Path]) -> str:
    """The tag for libraries of an architecture, by the newest symbols of glibc that they ask for."""
    asked = [int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    return f"manylinux_2_{max(OLDEST_GLIBC, *asked)}_{machine}" if asked else f"linux_{machine}"


def _machine_of(cxx: str) -> str:
    told = subprocess.run([cxx, "-dumpmachine"], capture_output=True, check=True, text=True).stdout.strip()
    machine = told.partition("-")[0]
    if machine not in PROCESSORS:
        raise BuildError(f"{cxx} compiles for {told}; wheels are made for {' and '.join(PROCESSORS)}")
    return machine
