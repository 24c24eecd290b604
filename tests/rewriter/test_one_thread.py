"""Threads that open models at once take turns: none finds half of a library, or what another's trace has patched."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from transformers import AutoModelForCausalLM

import forebay
import forebay.open_model as opening
from forebay.rewriter.capture import trace

# In a process of its own, which has not loaded transformers yet.
OPENING = """
import sys, threading
import forebay
found = []

def go():
    try:
        with forebay.wrap(sys.argv[1], "device=4MiB", prompt=4, new_tokens=2) as lm:
            found.append(lm.generate([[3, 4]], max_new_tokens=2).tolist())
    except BaseException as error:
        found.append(repr(error))

threads = [threading.Thread(target=go) for _ in range(2)]
for each in threads: each.start()
for each in threads: each.join()
print(found)
sys.exit(len(found) != 2 or len(set(map(str, found))) != 1 or not isinstance(found[0], list))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of other architectures and dtypes, whose traces patch different things."""
    root = tmp_path_factory.mktemp("models")
    for family, dtype in (("llama", torch.float32), ("gpt2", torch.bfloat16)):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]()).to(dtype).save_pretrained(root / family)
    return sorted(root.iterdir())


@pytest.mark.all
def test_threads_that_are_the_first_to_load_transformers(folders: list[Path]) -> None:
    done = subprocess.run([sys.executable, "-c", OPENING, str(folders[0])], capture_output=True, text=True, check=False,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_models_opened_and_run_at_once_answer_as_one_after_the_other(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracing, most = 0, 0

    def counted(*args: Any) -> Any:
        nonlocal tracing, most
        tracing += 1
        most = max(most, tracing)
        time.sleep(0.2)  # others would come meanwhile
        try:
            return real(*args)
        finally:
            tracing -= 1

    real = trace._traced
    found: dict[Path, list[Any]] = {folder: [] for folder in folders}

    def answer(folder: Path) -> None:
        try:
            with forebay.wrap(folder, "device=4MiB", prompt=4, new_tokens=4) as lm:
                found[folder].append(lm.generate([[3, 4]], max_new_tokens=4, do_sample=True, eos_token_id=[198],
                                                 generator=torch.Generator().manual_seed(0)).tolist())
        except Exception as error:
            found[folder].append(error)

    for folder in folders:
        answer(folder)
    monkeypatch.setattr(trace, "_traced", counted)
    monkeypatch.setattr(opening, "graphs_key", lambda *_: None)  # else nobody captures again
    threads = [threading.Thread(target=answer, args=(folder,), daemon=True) for folder in folders for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(300)
    assert not any(each.is_alive() for each in threads)
    assert most == 1
    for first, *others in found.values():
        assert isinstance(first, list) and others == [first, first]
