"""Shared behavior of the commands on a terminal: errors of one line, signals that stop a job cleanly, progress bars."""

from __future__ import annotations

import errno
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, cast

import typer

from forebay.rewriter.ir.printable import PrintableError, PrintableStream, printable, unfiltered

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

NO_MEMORY = "the system gives no more memory; a smaller --budget or --batch needs less, or end other programs"
NO_THREADS = "the system gives no more threads; raise the limit (ulimit -u, or a container's) or end other programs"
# What the system is short of where no file is to blame.
SHORT = {errno.ENOMEM: NO_MEMORY, errno.EAGAIN: NO_THREADS,
         errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
         errno.ENFILE: "the system has too many files open; end other programs"}
FAILED = 2  # exit code; 128 + the signal's number for a job that was interrupted
PATIENCE_S = 1.0  # before a line says what takes so long, where stderr is no terminal


class JobError(PrintableError, ValueError):
    """A job that cannot start or go on; the message says what to do. Answers already written stay."""


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Turn the first SIGINT or SIGTERM into an entry of the list, a second one into KeyboardInterrupt."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        say("stopping after this step; once more to stop at once")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def clean_errors(debug: bool) -> Iterator[None]:
    """Errors that a user can fix become one line on stderr and exit code 2; with `debug` they keep their traceback.
    Warnings become one line, too."""
    before, warnings.formatwarning = warnings.formatwarning, _warning_line
    try:
        yield
    except (typer.Exit, BrokenPipeError):  # `cli.main` ends a command whose output nobody reads
        raise
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(128 + signal.SIGINT) from None
    except Exception as error:
        message = message_of(error)
        if debug or message is None:
            raise
        say(f"error: {message}")
        raise typer.Exit(FAILED) from None
    finally:
        warnings.formatwarning = before


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {one_line(str(message))}\n"


def message_of(error: Exception) -> str | None:
    """Return the message for the user, or None for an error that a user cannot fix."""
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        extras = "models,cli,serve" if missing in ("starlette", "uvicorn") else "models,cli"
        return None if missing == "forebay" else f"{missing} is not installed; pip install 'forebay[{extras}]'"
    if isinstance(error, OSError) and error.errno in SHORT and not error.filename:
        return SHORT[error.errno]
    if isinstance(error, OSError) and error.strerror:
        return one_line(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    if _lacks_memory(error):
        return NO_MEMORY
    if isinstance(error, RuntimeError) and str(error).startswith("can't start new thread"):
        return NO_THREADS
    from forebay.exported.errors import ExportError
    from forebay.passes.lower.launches import LoweringError
    from forebay.passes.shard.split import ShardError
    from forebay.rewriter.capture.language_model import CaptureError
    from forebay.rewriter.checkpoints.records import CheckpointError
    from forebay.rewriter.ir.plan import PlanError
    from forebay.rewriter.pipeline.run_passes import StoppedAfter
    from forebay.rewriter.switches import SwitchError
    from forebay.rewriter.verify.bisect import PassChangedResult
    from forebay.rewriter.verify.graph import GraphError
    from forebay.rewriter.verify.program import ProgramError
    from forebay.runtime.devices.device import RuntimeFault
    from forebay.runtime.disk.chunk_queue import ReaderBrokenError
    from forebay.runtime.disk.spill_file import SpillError
    from forebay.session_file import SessionError

    known = (PlanError, CheckpointError, ExportError, CaptureError, SwitchError, JobError, StoppedAfter, GraphError,
             PassChangedResult, ProgramError, LoweringError, ShardError, RuntimeFault, ReaderBrokenError, SpillError,
             SessionError, OSError)
    return one_line(str(error)) if isinstance(error, known) else None


def reason_of(error: BaseException) -> str:
    """Say in one line what went wrong, whether or not a user can fix it."""
    return (message_of(error) if isinstance(error, Exception) else None) or one_line(repr(error))


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error, or what it was raised from, is that there is no memory: a model's code that could not be
    traced for want of it, say."""
    while error is not None:
        if isinstance(error, MemoryError) or (
                isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
            return True
        error = error.__cause__
    return False


def one_line(text: str) -> str:
    """A message without breaks, whose middle is left out where a file's own contents make it endless."""
    text = " ".join(text.split())
    return text if len(text) <= 1000 else f"{text[:700]} … {text[-280:]}"


@contextmanager
def printable_output() -> Iterator[None]:
    """Make whatever is written to stdout and stderr meanwhile `printable`: names from files are part of most lines."""
    with (redirect_stdout(PrintableStream(sys.stdout)),  # type: ignore[type-var]
          redirect_stderr(PrintableStream(sys.stderr))):  # type: ignore[type-var]
        yield


def print_answer(text: str, end: str = "\n") -> None:
    """Print what a model says: on a terminal `printable`, into a file or a pipe as it is."""
    print(text, end=end, flush=True, file=sys.stdout if sys.stdout.isatty() else unfiltered(sys.stdout))


def console(*, stderr: bool = True) -> Console:
    """A console of rich on stderr or stdout, whose own control sequences pass; text is `printable`, and no markup."""
    from rich.console import Console
    from rich.text import Text

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return PrintableConsole(file=unfiltered(sys.stderr if stderr else sys.stdout), markup=False, emoji=False,
                            highlight=False)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what is done meanwhile: on a terminal while it lasts, elsewhere in one line if it takes `PATIENCE_S`."""
    if sys.stderr.isatty():
        with console().status(what):
            yield
        return
    with ProgressLines() as lines:
        lines.add_task(what)
        yield


class ProgressLines:
    """Progress where stderr is no terminal: one line for each task that takes `PATIENCE_S`. Takes rich's calls."""

    disable = True

    def __init__(self) -> None:
        self._tasks: list[str] = []
        self._timers: dict[int, threading.Timer] = {}

    def start(self) -> None:
        """Do nothing: tasks begin when they are added."""

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def add_task(self, description: str, *, visible: bool = True, **state: object) -> TaskID:
        self._tasks.append(description)
        task = cast("TaskID", len(self._tasks) - 1)
        self.update(task, visible=visible)
        return task

    def update(self, task: TaskID, *, visible: bool = False, **state: object) -> None:
        if visible and task not in self._timers:
            timer = self._timers[task] = threading.Timer(PATIENCE_S, say, [f"{self._tasks[task]} ..."])
            timer.daemon = True
            timer.start()


def progress_bar(remaining: bool = True) -> Progress | ProgressLines:
    """A bar on a terminal, and lines elsewhere; with `remaining` it says how long the rest takes at the rate so far."""
    if not sys.stderr.isatty():
        return ProgressLines()
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
                    TextColumn("{task.fields[note]}"), *([TimeRemainingColumn()] if remaining else []),
                    console=console())


def say(text: str) -> None:
    print(printable(text), file=sys.stderr)
