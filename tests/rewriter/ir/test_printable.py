"""Names from files cannot command a terminal."""

from __future__ import annotations

import json

import pytest

import forebay
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.printable import PrintableError, printable


@pytest.mark.parametrize(("text", "shown"), [
    ("\x1b[31mred\x1b[0m", "\\u001b[31mred\\u001b[0m"), ("a\rb", "a\\u000db"),
    ("\x07\x08\x00", "\\u0007\\u0008\\u0000"),
    ("\x9b2J\x7f", "\\u009b2J\\u007f"), ("abc\u202egnp.exe", "abc\\u202egnp.exe"), ("\udc80", "\\udc80"),
    ("tab\tand\nline, é, 漢字, 🙂, مرحبا", "tab\tand\nline, é, 漢字, 🙂, مرحبا"),
])
def test_what_a_terminal_obeys_is_written_as_its_escape(text: str, shown: str) -> None:
    assert printable(text) == shown and printable(shown) == shown
    assert json.loads(printable(json.dumps([text], ensure_ascii=False)).replace("\n", "\\n").replace(
        "\t", "\\t")) == [text]


@pytest.mark.parametrize("kind", [CheckpointError, PlanError, forebay.CaptureError, forebay.ExportError])
def test_messages_of_errors_are_printable(kind: type[Exception]) -> None:
    assert issubclass(kind, PrintableError)
    assert str(kind("lm_head\x1b]0;title\x07")) == "lm_head\\u001b]0;title\\u0007"


def test_messages_to_the_log_are_printable(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logging.getLogger("forebay").warning("tensor %s of %d", "\x1b[2J", 3)
    assert caplog.messages[-1] == "tensor \\u001b[2J of 3"
