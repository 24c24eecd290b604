"""The console script: what must be so before anything else is imported."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable

from forebay.kernels.build.process_limits import limited_cores

CUT_OFF = 128 + 13  # exit code of a command whose output is no longer read, as of one that SIGPIPE ended
MANY_OBJECTS = 200_000  # between two looks of Python's collector, some 30 MB; imports and kept graphs make as many


def main() -> None:
    """Set what must be so before torch is loaded, then run the command; without the packages that the
    command line needs, say which to install."""
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # spinning OpenMP threads take the core the disk reader needs
    if (cores := limited_cores()) is not None:  # more threads would be stopped in turn
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    gc.set_threshold(MANY_OBJECTS, 50)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started this
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # of a stream whose file is another by now
            sys.stdout.reconfigure(errors="backslashreplace")  # what an encoding such as ASCII lacks
    atexit.register(gc.freeze)  # or at its end Python looks through all of torch once more, for 0.2 s
    try:
        from forebay.commands.app import main as run_command
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "forebay":
            raise
        sys.exit(f"forebay: {missing} is not installed; pip install 'forebay[models,cli]'")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + 2)
    sys.exit(_ended(run_command))


def _ended(command: Callable[[], object]) -> int:
    """Run the command and write all of its output; returns the exit code."""
    from forebay.commands.terminal import FAILED, say

    code: object = None
    try:
        try:
            command()
        except SystemExit as ended:
            code = ended.code
            if _pipe_broke(ended):
                raise BrokenPipeError from ended
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            say(f"error: the output cannot be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
        code = CUT_OFF if isinstance(error, BrokenPipeError) else FAILED
    return code if isinstance(code, int) else 0


def _pipe_broke(error: BaseException | None) -> bool:
    """Return whether an error came of a pipe that nobody reads."""
    while error is not None and not isinstance(error, BrokenPipeError):
        error = error.__cause__ or error.__context__
    return error is not None
