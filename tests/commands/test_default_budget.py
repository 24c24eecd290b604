"""Without a budget half of the free memory may be used, and the commands say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import forebay
from forebay import default_budget as module
from forebay.commands.app import app
from forebay.default_budget import budget_or_default, default_budget
from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.runtime.devices.kinds import HOST

FREE = 3 << 30


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_nbytes", lambda: FREE)
    monkeypatch.setattr(module, "kind_of", lambda _: HOST)


def test_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_budget() == budget_or_default(None) == Budget(FREE // 2)
    assert budget_or_default("12MB") == Budget(12_000_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert default_budget() == Budget(FREE // 6), "ranks share the memory"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(module, "kind_of", lambda _: replace(HOST, free_nbytes=lambda: 8 << 30))
    assert default_budget() == Budget(4 << 30, FREE // 2), "of a GPU's memory, and of the host's"
    for own in (8 << 30, 2 << 30):
        shared = replace(HOST, free_nbytes=lambda own=own: own, one_memory=lambda: True)
        monkeypatch.setattr(module, "kind_of", lambda _, shared=shared: shared)
        budget = default_budget()
        assert budget.device + (budget.host or 0) == min(own, FREE) // 2, "of one memory, once"


def test_memory_that_changed_a_little_gives_the_same_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for free in (FREE, FREE + (200 << 20), FREE + (400 << 20), 1000, 7, 1):
        monkeypatch.setattr(module, "available_nbytes", lambda free=free: free)
        sizes.append(default_budget().device)
        assert free // 2 * 8 / 9 <= sizes[-1] <= free / 2
    assert sizes[:3] == [FREE // 2, FREE // 2, FREE // 2 + (128 << 20)]


def test_half_of_what_a_named_machine_has() -> None:
    gpu = PRESETS["t4"]
    assert default_budget(gpu) == Budget(gpu.tiers["device"].capacity_nbytes // 2,
                                         gpu.tiers["host"].capacity_nbytes // 2)
    assert default_budget(Machine.default()) == Budget(2 << 30), "its RAM is not counted twice"


def test_a_model_is_wrapped_and_planned_without_a_budget(llama_checkpoint: Any, tmp_path: Path) -> None:
    with forebay.wrap(llama_checkpoint.folder, prompt=4, new_tokens=2, machine=Machine.default()) as lm:
        assert lm.plan.budget.device == FREE // 2
    save_machine(Machine.default(), profile := tmp_path / "machine.json")
    result = CliRunner().invoke(app, ["plan", str(llama_checkpoint.folder), "--new-tokens", "2"])
    assert result.exit_code == 0, result.output
    assert "no --budget: half of the free memory, 1.5 GiB" in result.output
    other = CliRunner().invoke(app, ["plan", str(llama_checkpoint.folder), "--new-tokens", "2", "--machine",
                                     str(profile)])
    assert other.exit_code == 0 and "half of the memory of that machine, 2.0 GiB" in other.output, other.output
