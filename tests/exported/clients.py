"""Greedy tokens by what runs exported folders, each as its example has it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def by_onnxruntime(folder: Path, rows: Sequence[torch.Tensor], new_tokens: int) -> list[list[int]]:
    """In a process that has no torch."""
    code = ("import sys, json; sys.path.insert(0, sys.argv[1]); from run_onnx import generate\n"
            "found = generate(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))\n"
            "assert 'torch' not in sys.modules; print(json.dumps(found.tolist()))")
    return _asked(code, str(folder), json.dumps([row.tolist() for row in rows]), str(new_tokens))


def by_genai(folder: Path, row: torch.Tensor, new_tokens: int) -> list[int]:
    """Fewer where the model ends its answer."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from run_genai import generate
    finally:
        sys.path.pop(0)
    return generate(folder, row.tolist(), new_tokens).tolist()


def by_torch(asked: Mapping[Path, Sequence[torch.Tensor]], new_tokens: int) -> list[torch.Tensor]:
    """Of each folder, in a process that has neither transformers nor anything of ours but the kernels."""
    code = ("import sys, json; sys.path.insert(0, sys.argv[1]); from run_pt2 import generate; import forebay\n"
            "found = [generate(folder, rows, int(sys.argv[3])).tolist() for folder, rows in json.loads(sys.argv[2])]\n"
            "ours = {name.split('.')[1] for name in sys.modules if name.startswith('forebay.')}\n"
            "assert 'transformers' not in sys.modules and ours == {'kernels'}, ours; print(json.dumps(found))")
    given = json.dumps([(str(folder), [row.tolist() for row in rows]) for folder, rows in asked.items()])
    return [torch.tensor(each) for each in _asked(code, given, str(new_tokens))]


def _asked(code: str, *given: str) -> list:
    ran = subprocess.run([sys.executable, "-c", code, str(EXAMPLES), *given], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])
