"""Errors that a user can mend are one line, whatever raised them."""

from __future__ import annotations

import warnings

import pytest
import typer

from forebay.commands.process_memory import MemoryWatch
from forebay.commands.terminal import clean_errors
from forebay.rewriter.capture.language_model import CaptureError


@pytest.mark.parametrize(("error", "part"), [
    (MemoryError(), "gives no more memory"), (RuntimeError("can't start new thread"), "gives no more threads"),
    (OSError(5, "Input/output error", "weights.bin"), "weights.bin: Input/output error"),
    (OSError(27, "File too large", "out.jsonl"), "out.jsonl: File too large"),
    (FileNotFoundError(2, "No such file or directory", "a\nb"), "error: a b: No such file or directory\n"),
    (OSError(36, "File name too long", "a" * 5000), " … "),
])
def test_what_the_system_refuses_is_one_line(
    error: Exception, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, clean_errors(False):
        raise error
    said = capsys.readouterr().err
    assert ended.value.exit_code == 2 and part in said and said.startswith("error: ") and said.count("\n") == 1
    assert len(said) < 1200
    with pytest.raises(type(error)), clean_errors(True):
        raise error


def test_a_warning_of_a_command_is_one_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.formatwarning
        with clean_errors(False):
            said = warnings.formatwarning(UserWarning("m.gguf names\nno pre-tokenizer"), UserWarning, "gguf.py", 7)
    assert said == "warning: m.gguf names no pre-tokenizer\n" and warnings.formatwarning is before


@pytest.mark.parametrize("cause", [
    MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")])
def test_a_shortage_is_told_and_not_what_came_of_it(cause: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def captured() -> None:
        try:
            raise cause
        except Exception as error:
            raise CaptureError("this model cannot be captured: its own code cannot be traced") from error

    with pytest.raises(typer.Exit), clean_errors(False):
        captured()
    said = capsys.readouterr().err
    assert "gives no more memory" in said and "traced" not in said


def test_errors_of_our_own_making_keep_their_traceback() -> None:
    for error in (RuntimeError("else"), KeyError("k"), AssertionError()):
        with pytest.raises(type(error)), clean_errors(False):
            raise error


def test_memory_is_watched_without_a_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object) -> None:
        raise RuntimeError("can't start new thread")

    watch = MemoryWatch([])
    monkeypatch.setattr(watch._thread, "start", full.__get__(watch._thread))
    with watch:
        held = bytearray(1 << 25)
    assert watch.peak >= watch.before > 0 and held
