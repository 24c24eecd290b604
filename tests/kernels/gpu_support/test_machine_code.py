"""What the order of machine code decides: kernels that overlap wait first, prefill multiplies during the softmax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
OPCODES = """
import json, sys
from dataclasses import replace
from forebay.kernels.gpu_support.overlap import waiting
from tests.kernels.audit.audit_kernels import compile_case, discover, disassemble
from tests.kernels.audit.sass import hot_turn, parse
wanted, waits = sys.argv[1].split(",") if sys.argv[1] else [], sys.argv[2] == "waits"
taken = {}
for case in discover():
    if "sm_90" in case.archs and (not wanted or any(case.name.startswith(each) for each in wanted)):
        taken.setdefault(case.fn.__name__, case)
found = {}
for name, case in taken.items():
    listing = parse(disassemble(compile_case(replace(case, fn=waiting(case.fn)) if waits else case, "sm_90"))[1])
    shown = listing.instructions if waits else hot_turn(listing).body
    found[name] = [each.opcode + each.modifiers * (each.opcode == "WARPGROUP") for each in shown]
print(json.dumps(found))
"""


def opcodes(prefixes: str, what: str) -> dict[str, list[str]]:
    """SASS for sm_90 by kernel: of the whole waiting copy, or of the hot loop."""
    command = [sys.executable, "-c", OPCODES, prefixes, what]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.all
def test_a_kernel_that_overlaps_waits_before_all_else() -> None:
    found = opcodes("", "waits")
    assert len(found) >= 25
    for name, code in found.items():
        wait, release = code.index("ACQBULK"), code.index("PREEXIT")
        touched = [at for at, opcode in enumerate(code) if opcode.startswith(("LD", "ST", "ATOM", "RED", "UTMA", "BRA"))
                   and opcode != "LDC"]
        assert wait <= 3 and wait < release < min(touched), name


@pytest.mark.all
def test_long_prompts_multiply_during_the_softmax() -> None:
    """Of the products of q and the next keys most are issued before the last exponential of the tile at hand."""
    (code,) = opcodes("prefill_attention/long", "hot").values()
    assert code.count("MUFU") >= 32
    ended = code.index("WARPGROUP.DEPBAR.LE")
    exponentials = [at for at, opcode in enumerate(code) if opcode == "MUFU"]
    assert exponentials[-1] < ended
    assert code[: exponentials[-1]].count("HGMMA") >= 4
