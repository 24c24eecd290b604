"""The console script: what must be so before anything else is imported."""

from __future__ import annotations

import atexit
import gc
import os
import sys

from forebay.kernels.build.process_limits import limited_cores

MANY_OBJECTS = 10_000  # between two looks of Python's collector, some megabytes; imports make many times as many


def main() -> None:
    """Set what must be so before torch is loaded, then run the command; without the packages that the
    command line needs, say which to install."""
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # spinning OpenMP threads take the core the disk reader needs
    if (cores := limited_cores()) is not None:  # more threads would be stopped in turn
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    gc.set_threshold(MANY_OBJECTS)
    atexit.register(gc.freeze)  # or at its end Python looks through all of torch once more, for 0.2 s
    try:
        from forebay.commands.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "forebay":
            raise
        sys.exit(f"forebay: {missing} is not installed; pip install 'forebay[models,cli]'")
    app()
