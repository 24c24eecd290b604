"""The console script: what must be so before anything else is imported."""

from __future__ import annotations

import os
import sys

from forebay.kernels.build.process_limits import limited_cores


def main() -> None:
    """Set what must be in the environment before torch is loaded, then run the command; without the packages that the
    command line needs, say which to install."""
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # spinning OpenMP threads take the core the disk reader needs
    if (cores := limited_cores()) is not None:  # more threads would be stopped in turn
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    try:
        from forebay.commands.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "forebay":
            raise
        sys.exit(f"forebay: {missing} is not installed; pip install 'forebay[models,cli]'")
    app()
