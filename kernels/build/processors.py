"""Kinds of processors that kernels can be compiled for, and which of them the one at hand is."""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# For the processor at hand, by the name that both gcc and clang take for it.
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


@dataclass(frozen=True)
class Processor:
    """A kind of processors: its name in files, the compiler's flags in place of NATIVE, and the instructions that it
    needs by their names in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_VNNI = _V4 | {"avx512_vnni"}
# By architecture, the most capable kind first. The levels are those of the x86-64 psABI.
PROCESSORS = {
    "x86_64": (
        Processor("v4-vnni-bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"),
                  _V4_VNNI | {"avx512vbmi", "avx512_bf16"}),
        Processor("v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4_VNNI),
        Processor("v4", ("-march=x86-64-v4",), _V4),
        Processor("v3", ("-march=x86-64-v3",), _V3),
        Processor("v1", ("-march=x86-64",)),
    ),
    "aarch64": (
        Processor("v8.2-dotprod", ("-march=armv8.2-a+dotprod",), frozenset(("asimddp", "atomics", "asimdrdm"))),
        Processor("v8", ("-march=armv8-a",)),
    ),
}


def processors_here() -> list[Processor]:
    """The kinds that the processor at hand is, the most capable first; none of an architecture without a list."""
    found = {word for line in _cpu_lines("flags", "Features") for word in line.partition(":")[2].split()}
    return [kind for kind in PROCESSORS.get(platform.machine(), ()) if kind.needs <= found]


def processor_name() -> str:
    """Text that differs between processors for which NATIVE gives different code."""
    lines = _cpu_lines("model name", "flags", "Features", "CPU part")
    return "\n".join(lines) or f"{platform.machine()} {platform.processor()}"


def _cpu_lines(*wanted: str) -> list[str]:
    """The lines of /proc/cpuinfo that begin so, each once; none where the kernel tells nothing."""
    with contextlib.suppress(OSError):
        return list(dict.fromkeys(line for line in CPUINFO.read_text().splitlines() if line.startswith(wanted)))
    return []
