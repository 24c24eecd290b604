"""The command itself: help and version in each form, commands by use, -v wherever it is written."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from forebay.commands import app as module
from forebay.commands.app import app
from forebay.version import package_version


def answered(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_help_in_each_form_is_the_same() -> None:
    def rest(shown: str) -> str:
        """All but the name of the program, which is that of the test's runner."""
        return shown.split("[OPTIONS]", 1)[1].partition("\n")[2]

    assert rest(answered("-h")) == rest(answered("--help")) == rest(answered("help"))
    for command in ("run", "plan", "eval"):
        shown = answered("help", command)
        assert f" {command} [OPTIONS]" in shown
        assert rest(answered(command, "-h")) == rest(shown)
    assert CliRunner().invoke(app, ["help", "rum"]).exit_code == 2


def test_commands_come_by_use_and_notes_to_contributors_not_at_all() -> None:
    shown = answered("--help")
    at = [shown.index(f" {name} ") for name in ("run", "chat", "serve", "machine", "plan", "quantize", "allocate")]
    assert at == sorted(at) and "Long:" not in shown


def test_the_version_in_each_form() -> None:
    assert answered("version").strip() == answered("--version").strip() == package_version()


@pytest.mark.parametrize(("args", "levels"), [
    (("-v", "version"), [logging.INFO]), (("version", "-v"), [logging.INFO]), (("version", "-vv"), [logging.DEBUG]),
    (("-v", "version", "--verbose"), [logging.DEBUG]), (("version",), [])])
def test_verbose_before_and_after_the_command(
    args: tuple[str, ...], levels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    inner = module._logged
    monkeypatch.setattr(module, "_logged", lambda level: (asked.append(level), inner(level))[1])
    answered(*args)
    assert asked == levels


@pytest.mark.parametrize(("args", "message"), [
    (("run",), "error: missing argument 'MODEL'; root run --help lists arguments and options\n"),
    (("plan", "demo", "--bath", "2"), "error: no such option: --bath"),
    (("serve", "demo", "--port", "x"), "error: invalid value for '--port': "),
    (("plan", "demo", "--explore", "--pareto", "--diagonal"),
     "error: option '--pareto' requires a value, and '--diagonal' is an option; "),
    (("plan", "demo", "--save-plan", "--no-recompute"), "error: option '--save-plan' requires a value, and "),
    (("eval", "demo", "--text", "--json"), "error: option '--text' requires a value, and '--json' is an option; "),
    (("eval",), "error: missing argument 'MODEL'; root eval --help lists arguments and options\n"),
    (("runn",), "error: no such command 'runn'"), (("help", "rum"), "error: invalid value: no command 'rum'")])
def test_a_mistaken_command_is_one_line(args: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


@pytest.mark.parametrize(("command", "code", "said"), [
    ("help plan | true", 141, ""), ("papers | true", 141, ""), ("models none | true", 2, "error: "),
    ("version > /dev/full", 2, "error: the output cannot be written: No space left on device\n"),
    ("version >&-", 0, "")])
def test_output_that_nobody_reads_ends_a_command_in_silence(command: str, code: int, said: str) -> None:
    words = f"{sys.executable} -m forebay {command}; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert ended.returncode == code and ended.stderr.startswith(said) and bool(ended.stderr) == bool(said)


def test_a_closed_input_and_an_encoding_of_few_characters_are_no_errors() -> None:
    code = "import sys, forebay.commands.app as app; from forebay.commands import cli; " \
           "app.main = lambda: print([*sys.stdin], chr(0x65e5)); cli.main()"
    ended = subprocess.run(["bash", "-c", f"{sys.executable} -c '{code}' <&-"], capture_output=True, text=True,
                           env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[] \\u65e5\n", "")


def test_no_command_shows_the_help() -> None:
    assert answered() == answered("--help")
