"""A small model's folder, and a server over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving.served import Running, save_model, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(folder) as running:
        yield running
