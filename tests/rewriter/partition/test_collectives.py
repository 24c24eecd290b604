"""Collectives against closed forms, and against rings that are played step by step."""

from __future__ import annotations

import dataclasses

import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.partition.collectives import ChipMesh, Collective, MeshError, collective_s, mesh_of, one_way

KINDS = ("all-gather", "reduce-scatter", "all-to-all")


def ring_gather_s(size: int, nbytes: float, rate: float, step_s: float) -> float:
    """An all-gather played: each step every chip passes on the newest shard it has."""
    held = [{chip} for chip in range(size)]
    newest, seconds = list(range(size)), 0.0
    while any(len(h) < size for h in held):
        newest = [newest[chip - 1] for chip in range(size)]
        for chip, shard in enumerate(newest):
            held[chip].add(shard)
        seconds += nbytes / size / rate + step_s
    return seconds


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_a_ring_takes_what_its_steps_take(size: int) -> None:
    mesh = ChipMesh((size,), (1e9,), one_way(2e-6))
    expected = ring_gather_s(size, 3e6, 1e9, 2e-6)
    for kind in ("all-gather", "reduce-scatter"):
        assert collective_s(Collective(kind, (0,), 3e6, "x"), mesh) == pytest.approx(expected)


def test_axes_in_turn_pass_on_what_they_gathered() -> None:
    """Together (K - 1) / K of the bytes where the rates are the same, whatever the axes."""
    mesh = ChipMesh((4, 2, 8), (1e9, 1e9, 1e9), one_way(0.0))
    for axes, chips in (((0, 1), 8), ((1, 2), 16), ((0, 1, 2), 64)):
        assert collective_s(Collective("all-gather", axes, 1e6, "x"), mesh) == pytest.approx(
            1e6 * (chips - 1) / chips / 1e9)


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_all_to_all_of_a_ring_is_bound_by_its_links(size: int) -> None:
    """Hops of all bytes over the links of the ring; `bytes_per_s` is of both directions."""
    hops = sum(min(d, size - d) for d in range(size)) / size
    mesh = ChipMesh((size,), (1e9,), one_way(0.0))
    assert collective_s(Collective("all-to-all", (0,), 1e6, "x"), mesh) == pytest.approx(1e6 * hops / 1e9)
    switch = dataclasses.replace(mesh, torus=False)
    assert collective_s(Collective("all-to-all", (0,), 1e6, "x"), switch) == pytest.approx(
        1e6 * (size - 1) / size / 1e9)


@pytest.mark.parametrize("kind", KINDS)
def test_faster_links_and_fewer_bytes_never_take_longer(kind: str) -> None:
    slow, fast = (ChipMesh((4, 4), (rate, 2e9), one_way(1e-6)) for rate in (1e9, 3e9))
    for nbytes in (0.0, 1e3, 1e6):
        item = Collective(kind, (0, 1), nbytes, "x")  # type: ignore[arg-type]
        assert collective_s(item, fast) <= collective_s(item, slow)
        assert collective_s(item, slow) <= collective_s(dataclasses.replace(item, nbytes=nbytes + 1), slow)
    assert collective_s(Collective(kind, (), 1e6, "x"), slow) == 0.0  # type: ignore[arg-type]


def test_whole_cubes_are_rings_and_smaller_slices_lines() -> None:
    tpu = PRESETS["tpu-v4"]
    assert mesh_of(tpu, (4, 4, 4)).bytes_per_s == (90e9, 90e9, 90e9)
    assert mesh_of(tpu, (4, 4, 8)).bytes_per_s == (90e9, 90e9, 90e9)
    assert mesh_of(tpu, (2, 4, 4)).bytes_per_s == (45e9, 45e9, 45e9)
    assert mesh_of(PRESETS["a100-80g"], (8,)).bytes_per_s == (300e9,)


@pytest.mark.parametrize(("machine", "shape", "links", "message"), [
    ("tpu-v4", (0, 4), (), "at least 1 chip"), ("tpu-v4", (2, 2, 2, 2), (), "3 axes"), ("t4", (4,), (), "--links"),
    ("a100-80g", (8, 2), (), "rate by axis"), ("t4", (4,), (0.0,), "above 0"), ("t4", (4,), (1e9, 1e9), "2 rates"),
    ("t4", (4,), (float("nan"),), "above 0")])
def test_meshes_that_cannot_be(machine: str, shape: tuple[int, ...], links: tuple[float, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        mesh_of(PRESETS[machine], shape, links)


def test_collectives_behind_a_switch_take_the_protocol_that_is_fastest_for_their_size() -> None:
    """Of a few bytes the latency counts: NCCL's shortest is 3.6 us and 0.47 us a step; of many the rate alone."""
    mesh = mesh_of(PRESETS["h100"], (8,))
    short, long = (collective_s(Collective("all-gather", (0,), nbytes, "x"), mesh) for nbytes in (8.0, 8e9))
    assert short == pytest.approx(3.6e-6 + 7 * 0.47e-6, rel=1e-3)
    assert long == pytest.approx(8e9 * 7 / 8 / PRESETS["h100"].interconnect_bytes_per_s, rel=1e-2)
    over_pcie = collective_s(Collective("all-gather", (0,), 8.0, "x"), mesh_of(PRESETS["h100"], (8,), (16e9,)))
    assert over_pcie == pytest.approx(3.6e-6 + 7 * 1.0e-6, rel=1e-2)
    assert mesh_of(PRESETS["h100"], (8,), step_s=1e-6).protocols == one_way(1e-6), "what is asked for holds"
