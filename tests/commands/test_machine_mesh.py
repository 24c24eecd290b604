"""`forebay machine --mesh` on two ranks: what they exchange is measured, kept, and shown by rank 0."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.rewriter.machine.mesh_links import RING_STEPS
from forebay.rewriter.machine.profile import Machine, load_machine, save_machine
from forebay.runtime.measure import kept
from forebay.runtime.measure import machine as measuring
from forebay.runtime.measure.kept import cached_machine, machine_cache_path


def command(*options: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "forebay", "machine", *options], text=True, env=os.environ | env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.all
def test_two_ranks_measure_what_they_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    path = machine_cache_path(tmp_path)
    save_machine(Machine.default(), path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [command("--mesh", "--json", "--folder", str(tmp_path), RANK=str(rank), WORLD_SIZE="2", OMP_NUM_THREADS="1",
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)]
    (one, said), (other, _) = (process.communicate(timeout=240) for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0], said
    found = load_machine(path)
    assert json.loads(one) == json.loads(found.to_json()) and not other
    assert replace(found, mesh=Machine.default().mesh) == Machine.default(), "all else is as it was"
    assert [(link.kind, link.ranks) for link in found.mesh.exchanges] == [(kind, 2) for kind in RING_STEPS]
    assert found.mesh.ranks == 2 and found.mesh.backend == "gloo"
    for link in found.mesh.exchanges:
        assert 0 < link.latency_s + 4e6 / link.bandwidth_bytes_per_s < 60

    # measured anew by one process, which cannot measure this, it stays
    monkeypatch.setattr(measuring, "measure_machine", lambda *_, **__: replace(Machine.default(), name="new"))
    monkeypatch.setattr(kept, "share_now", lambda: 0.0)
    anew = cached_machine(tmp_path, anew=True)
    assert anew.name == "new" and anew.mesh == found.mesh == load_machine(path).mesh


def test_one_process_alone_is_told_how_to_start_several(tmp_path: Path) -> None:
    alone = command("--mesh", "--folder", str(tmp_path), FOREBAY_CACHE=str(tmp_path))
    _, said = alone.communicate(timeout=120)
    assert alone.returncode != 0
    assert "torchrun --nproc-per-node=2 --no-python forebay machine --mesh" in " ".join(said.split())
