"""Lines of a job that nobody would write: each is answered, or told in one line, and the others are answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.test_cli import _answers, _forebay, _run_arguments, folder, reference

__all__ = ["folder", "reference"]  # fixtures

LINES: dict[str, Any] = {
    "fine": {"prompt": "w1 w2"}, "nul": {"prompt": "w1 \x00 w2"}, "long": {"prompt": "w1 " * 300_000},
    "most": {"prompt": "w1", "max_new_tokens": 10**30}, "many": {"prompt": "w1", "max_new_tokens": 10**9},
    "deep": {"prompt": "w1", "extra": [[[[]]]]}, "separator": {"prompt": "w1\u2028w2\u0085w3"},
    "digits": {"prompt": "w1", "max_new_tokens": 2}}


def test_each_is_answered_or_told(folder: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"id": name} | line, ensure_ascii=False) for name, line in LINES.items()]
    prompts.write_text("\n".join([*lines, '{"prompt": "w1", "max_new_tokens": ' + "9" * 5000 + "}"]))
    result = _forebay(*_run_arguments(folder, output, prompts=prompts))
    told = [line for line in result.stderr.splitlines() if line.startswith(str(prompts))]
    answers = _answers(output)
    assert result.exit_code == 3 and "Traceback" not in result.output
    assert {"fine", "nul", "deep", "separator", "digits"} <= set(answers)
    assert len(answers) + len(told) == len(LINES) + 1
