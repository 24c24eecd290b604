"""Every benchmark is importable: what it takes from the package exists."""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_of_the_benchmarks_is_importable() -> None:
    """In one test: what the first imports takes most of the time."""
    found = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "benchmarks").rglob("*.py")
             if path.stem != "__main__"]
    assert len(found) > 30
    for path in found:
        importlib.import_module(".".join(path.parts))
