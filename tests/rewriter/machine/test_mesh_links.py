"""Exchanges in a machine's profile: kept as measured, of other numbers of ranks in proportion to their steps, guessed
where nobody measured; and what cannot be true is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forebay.rewriter.machine.mesh_links import RING_STEPS, ExchangeLink, MeshLinks
from forebay.rewriter.machine.profile import Machine, machine_from_json
from forebay.runtime.devices.cpu.kind import CPU
from forebay.runtime.devices.cuda.kind import CUDA

MESH = MeshLinks(4, "gloo", "2026-11-24", (
    ExchangeLink("all_reduce", 2, 1e9, 1e-3, 0.97), ExchangeLink("all_reduce", 4, 5e8, 4e-3),
    ExchangeLink("all_gather_into_tensor", 2, 2e9, 5e-4)), 1.4, 1.1)


def test_a_profile_keeps_what_was_measured_and_older_ones_are_read() -> None:
    machine = replace(Machine.default(), mesh=MESH)
    assert machine_from_json(machine.to_json()) == machine
    older = json.loads(Machine.default().to_json())
    del older["mesh"]
    assert machine_from_json(json.dumps(older)) == Machine.default()


def test_exchanges_take_what_was_measured_of_as_many_ranks() -> None:
    assert MESH.exchange_s("all_reduce", 2, 1e6) == pytest.approx(2e-3)
    assert MESH.exchange_s("all_reduce", 4, 1e6) == pytest.approx(6e-3)
    assert MESH.exchange_s("all_reduce", 3, 1e6) == pytest.approx(2 * 2e-3)
    assert MESH.exchange_s("all_gather_into_tensor", 4, 1e6) == pytest.approx(3e-3)
    assert (MESH.slowed(0.0), MESH.slowed(1.0), MESH.slowed(7.0)) == (1.1, 1.4, 1.4)
    for kind, steps in RING_STEPS.items():
        for device in (CPU, CUDA):
            few, many = (MeshLinks().exchange_s(kind, ranks, 4096, device) for ranks in (2, 8))
            assert 0 < few <= many and (many > few) == (steps(8) > steps(2))


@pytest.mark.parametrize(("field", "value"), [
    ("kind", "all_to_all"), ("ranks", 1), ("latency_s", -1e-3), ("latency_s", float("nan")),
    ("bandwidth_bytes_per_s", 0.0)])
def test_exchanges_that_cannot_be_are_named(field: str, value: object) -> None:
    bad = replace(MESH, exchanges=(MESH.exchanges[0], replace(MESH.exchanges[1], **{field: value})))
    with pytest.raises(ValueError, match=rf"mesh\.exchanges\[1\]\.{field}"):
        replace(Machine.default(), mesh=bad).validate()
    with pytest.raises(ValueError, match=r"mesh\.memory_slowed must be at least 1"):
        replace(Machine.default(), mesh=replace(MESH, memory_slowed=0.5)).validate()
    with pytest.raises(ValueError, match=r"mesh\.overlap_penalty must lie between 0 and 1"):
        replace(Machine.default(), mesh=replace(MESH, overlap_penalty=1.5)).validate()
