"""Errors that a user can mend are one line, whatever raised them."""

from __future__ import annotations

import io
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from forebay.commands import chat, terminal
from forebay.commands.app import app
from forebay.commands.process_memory import MemoryWatch
from forebay.commands.terminal import (
    ProgressLines,
    clean_errors,
    console,
    doing,
    print_answer,
    printable_output,
    progress_bar,
)
from forebay.rewriter.capture.language_model import CaptureError
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.planning.options import Options


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


def test_what_takes_long_is_said_in_a_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with doing("waiting"), progress_bar() as bar:
        bar.update(bar.add_task("hidden", visible=False), completed=1)
    assert isinstance(bar, ProgressLines) and not bar._timers
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.01)
    with doing("capturing"), progress_bar() as bar:
        bar.update(task := bar.add_task("converting", visible=False), visible=True, completed=1)
        bar._timers[task].join()
    assert capsys.readouterr().err in ("capturing ...\nconverting ...\n", "converting ...\ncapturing ...\n")


def test_memory_is_watched_without_a_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object) -> None:
        raise RuntimeError("can't start new thread")

    watch = MemoryWatch([])
    monkeypatch.setattr(watch._thread, "start", full.__get__(watch._thread))
    with watch:
        held = bytearray(1 << 25)
    assert watch.peak >= watch.before > 0 and held


EVIL = "\x1b]0;owned\x07\x1b[2J[/red]\x9b"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model whose folder, tensors and config have names that command a terminal, and break rich's markup."""
    folder = tmp_path / f"model{EVIL}".replace("/", "\\")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
                     ).save_pretrained(folder)
    return folder


def commands(text: str) -> list[str]:
    return [each for each in text if (ord(each) < 32 and each not in "\n\t") or 127 <= ord(each) < 160]


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(each):04x}" if commands(each) else each for each in text)


def test_names_from_files_reach_no_terminal_as_they_are(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    save_machine(replace(Machine.default(), name=f"box{EVIL}"), tmp_path / f"machine{EVIL[:5]}")
    more = ("--budget", "device=1MiB", "--machine", str(tmp_path / f"machine{EVIL[:5]}"))
    tensors = load_file(hostile / "model.safetensors")
    save_file(tensors | {f"extra{EVIL}": torch.zeros(2)}, tmp_path / "renamed.safetensors", {"format": "pt"})
    shutil.copy(tmp_path / "renamed.safetensors", hostile / "model.safetensors")
    saved, model, here = str(tmp_path / f"plan{EVIL[:5]}"), str(hostile), str(tmp_path)
    for code, shown, arguments in (
        (0, f"box{EVIL}", ("plan", model, *more)),
        (0, f"box{EVIL}", ("-v", "plan", model, *more, "--save-plan", saved)),
        (0, f"box{EVIL}", ("explain", saved)),
        (0, f"box{EVIL}", ("plan", model, *more, "--json")),
        (2, f"no weight format {f'w{EVIL}'!r}", ("quantize", model, f"{here}/out{EVIL[:5]}", "--weights", f"w{EVIL}")),
        (2, f"{model} holds no usable tokenizer", ("run", model, "w", *more)),
        (2, f"{model}/config.json:1: no column", ("allocate", f"{model}/config.json")),
        (2, f"no model at {here}/none{EVIL[:4]}", ("plan", f"{here}/none{EVIL[:4]}", *more)),
        (2, f"t{EVIL}: No such file", ("eval", model, "--text", f"t{EVIL}")),
    ):
        done = CliRunner().invoke(app, list(arguments))
        said = done.stdout + done.stderr
        assert done.exit_code == code and not commands(said), arguments
        assert escaped(shown) in said and (code == 0 or said.startswith("error: ")), arguments


def test_tables_on_a_terminal_keep_their_own_styles_and_show_names_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", screen)
    with printable_output():
        table = Table("name")
        table.add_row(EVIL)
        table.add_row("[bold]x[/bold] :smile:")
        console(stderr=False).print(table)
        print_answer(f"an answer {EVIL}")
    shown = screen.getvalue()
    assert "\\u001b]0;owned\\u0007\\u001b[2J[/red]\\u009b" in shown and "[bold]x[/bold] :smile:" in shown
    assert "\x1b[1m" in shown and "\x1b]" not in shown and "\x1b[2J" not in shown and "an answer \\u001b" in shown


def test_an_answer_goes_into_a_file_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with printable_output(), printable_output():
        print_answer("\x1b[31mred", end="")
        print("\x1b[31mred")
    assert capsys.readouterr().out == "\x1b[31mred\\u001b[31mred\n"


def test_a_budget_is_read_before_the_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "machine_profile", lambda *_: pytest.fail("measuring takes seconds"))
    with pytest.raises(PlanError, match="unknown tier 'gpu'"):
        chat._planned(tmp_path, "gpu=1MiB", Options(), 4)
