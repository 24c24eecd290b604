"""Every benchmark is importable, because all that it takes from the package exists, and its command line is read."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_benchmark_is_importable_and_shows_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one test: the first imports take most of the time."""
    found = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py")]
    assert len(found) > 30
    commands = []
    for name in found:
        module = importlib.import_module(name)
        if f"python -m {name.removesuffix('.__main__')}" in (module.__doc__ or "") and hasattr(module, "main"):
            commands.append(name)
            monkeypatch.setattr(sys, "argv", [name, "--help"])
            with pytest.raises(SystemExit) as ended:
                module.main()
            assert ended.value.code == 0, name
            assert "--" in capsys.readouterr().out, name
    assert {f"benchmarks.{name}" for name in ("offload", "server", "gpu_offload", "papers.__main__")} < {*commands}
