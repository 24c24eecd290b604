"""Libraries that a wheel brings compiled: one for each kind of processors, with an index of their sources' digests."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from forebay.kernels.build.library import Library
from forebay.kernels.build.processors import Processor, processors_here

FOLDER = Path(__file__).resolve().parents[1] / "compiled"
INDEX = "index.json"


def prebuilt(library: Library) -> list[Path]:
    """The package's compiled forms of `library` that run here, the most capable first.

    None where the package has none, or where its sources or flags are not those that were compiled.
    """
    with contextlib.suppress(OSError, ValueError):
        if json.loads((FOLDER / INDEX).read_text()).get(library.name) == library.digest():
            kinds = processors_here() if library.of_processor else [None]
            return [path for kind in kinds if (path := FOLDER / file_name(library, kind)).exists()]
    return []


def file_name(library: Library, kind: Processor | None) -> str:
    """The name of the compiled form for a kind of processors, or for all of an architecture."""
    return f"{library.name}.so" if kind is None else f"{library.name}-{kind.name}.so"
