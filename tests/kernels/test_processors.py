"""Kernels as compiled for other processors than this one: each has code of its own, which this processor runs if it is
one of them or has more, or an emulator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from selection import ALL, without

from forebay.kernels.build import compile
from tests.kernels import emulated

HERE = Path(__file__).resolve().parent
# Names that the compiler has for kinds of processors, and an instruction that the kernels for each would use, as
# /proc/cpuinfo has it.
KINDS = {"x86-64": "sse2", "haswell": "avx2", "skylake-avx512": "avx512f", "icelake-server": "avx512_vnni",
         "armv8-a": "asimd", "armv8.2-a+dotprod": "asimddp"}
ALWAYS = ("x86-64", "armv8-a")
FILES = ("products/linear/test_cpu.py", "products/linear_q/test_cpu.py", "attention/attention/test_cpu.py",
         "attention/attention_q/test_cpu.py", "cache/kv_append/test_cpu.py",
         "attention/choose_blocks/test_cpu.py", "recurrences/test_cpu.py", "formats/test_codebooks.py")


def flags_here() -> set[str]:
    """What /proc/cpuinfo says this processor has; nothing where there is no such file."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


@pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", without(KINDS if ALL else ALWAYS, ("armv8-a",)))
def test_kernels_for(kind: str) -> None:
    """Their own tests pass; "x86-64" forbids all that is not on every such processor, so the portable code runs."""
    if kind in emulated.PROCESSORS and platform.machine() == "x86_64":
        if emulated.CXX is None:
            pytest.skip("no compiler for ARM; install g++-aarch64-linux-gnu")
        emulated.build(kind, emulated.CXX)
        if emulated.QEMU is None:
            pytest.skip("compiled, but no emulator of ARM; install qemu-user-static")
    elif KINDS[kind] not in flags_here():
        pytest.skip(f"this processor is no {kind}")
    files = [str(HERE / name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    command += [] if ALL else ["-m", "not all", "-k", "not opcheck"]  # what that checks is no processor's
    ran = subprocess.run(command, env={**os.environ, "FOREBAY_TEST_PROCESSOR": kind}, capture_output=True, text=True,
                         timeout=900)
    assert ran.returncode == 0, ran.stdout[-3000:]
