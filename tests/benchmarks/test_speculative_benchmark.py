"""What the benchmark of drafts says of answers, from answers that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.speculative import report, table


def row(who: str, text: str, time_s: float, **more: Any) -> dict[str, Any]:
    plain = {"passes": 10, "offered": 0, "accepted": 0, "refused": 0, "read_nbytes": 5e6}
    return {"setting": "30 %", "text": text, "who": who, "round": 1, "time_s": time_s, "tokens": [1] * 11,
            "counted": 10, **plain, **more}


def test_a_line_per_contestant_beside_plain(capsys: pytest.CaptureFixture[str]) -> None:
    drafted = dict(passes=4, offered=20, accepted=6, refused=2, predicted_s=0.5, tokens=[1] * 10 + [2])
    lines = table([row("plain", "copy", 10.0), row("w4", "copy", 5.0, **drafted), row("plain", "story", 12.0),
                   row("w4", "story", 24.0)])
    assert [(x["text"], x["who"]) for x in lines] == [
        ("repeats", "plain"), ("repeats", "w4"), ("plain text", "plain"), ("plain text", "w4")]
    found = lines[1]
    assert found["tokens_per_s"] == 2.0 and found["gain"] == 2.0 and found["tokens_per_pass"] == 2.5
    assert found["pass_over_plain"] == (5 / 4) / (10 / 10)
    assert found["accepted"] == 6 / 20 and found["stands"] == 6 / 8 and found["read_per_token"] == 5e5
    assert found["measured_over_predicted"] == pytest.approx(1.0) and found["same_tokens"] == 10 / 11
    assert lines[-1]["gain"] == 12 / 24 and lines[-1]["measured_over_predicted"] is None
    report(lines)
    assert len({len(line) for line in capsys.readouterr().out.splitlines()}) == 1, "columns stand under their titles"
