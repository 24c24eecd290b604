"""Machine presets: every number has a source, nonsense is refused by field, JSON both ways."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from forebay.rewriter.machine.presets import PRESETS, PresetError, load_machine_or_preset
from forebay.rewriter.machine.profile import Machine, machine_from_json, save_machine


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_has_a_source(name: str) -> None:
    machine = PRESETS[name]
    machine.validate()
    assert {path for path, number in machine.numbers().items() if number} <= set(machine.sources)
    assert set(machine.sources) <= set(machine.numbers()) and machine.name == name
    launches = "as on two cores of a Zen 4" if machine.kind.on_host_cores else "an asynchronous launch"
    assert machine.source("dispatch_s").endswith(launches)


@pytest.mark.parametrize("name", PRESETS)
def test_json_both_ways(name: str) -> None:
    assert machine_from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_what_a_profile_does_not_name_was_measured() -> None:
    measured = dataclasses.replace(Machine.default(), date="2026-01-01")
    assert measured.source("dispatch_s") == "measured by forebay machine on 2026-01-01"


@pytest.mark.parametrize(("where", "value", "says"), [
    (("product_flops",), -1.0, "product_flops"), (("product_flops",), 1e15, "product_flops exceeds the peak"),
    (("attention_bytes_per_s",), 1e15, "attention_bytes_per_s exceeds the peak"),
    (("tiers", "device", "capacity_nbytes"), 0, "tiers.device.capacity_nbytes"),
    (("tiers", "device", "capacity_nbytes"), 1.5, r"capacity_nbytes: expected int, found 1\.5"),
    (("tiers", "device", "bandwidth_bytes_per_s"), 1e15, "exceeds the peak"),
    (("links", 2, "bandwidth_bytes_per_s"), 0.0, r"links\[2\].bandwidth_bytes_per_s"),
    (("memory_bytes_per_s",), float("nan"), "memory_bytes_per_s"), (("links",), [], "none from host to device"),
    (("sources",), {}, "sources.tiers.device.capacity_nbytes"), (("name",), "", "name"),
    (("dispatch_s",), "fast", "dispatch_s: expected float, found 'fast'"),
    (("colour",), "red", "colour: unknown field"),
    (("tiers", "host", "capacity_nbytes"), True, "tiers.host.capacity_nbytes"),
])
def test_nonsense_is_refused_by_field(tmp_path: Path, where: tuple, value: object, says: str) -> None:
    data = json.loads(PRESETS["t4"].to_json())
    target = data
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = value
    (tmp_path / "mine.json").write_text(json.dumps(data))
    with pytest.raises(PresetError, match=rf"mine\.json: .*{says}"):
        load_machine_or_preset(str(tmp_path / "mine.json"))


def test_missing_field_and_a_missing_link_are_named(tmp_path: Path) -> None:
    data, path = json.loads(PRESETS["t4"].to_json()), tmp_path / "mine.json"
    data["links"] = [link for link in data["links"] if link["dst"] != "disk"]
    path.write_text(json.dumps(data))
    with pytest.raises(PresetError, match="none from host to disk"):
        load_machine_or_preset(str(path))
    del data["links"]
    path.write_text(json.dumps(data))
    with pytest.raises(PresetError, match="links is missing"):
        load_machine_or_preset(str(path))


def test_files(tmp_path: Path) -> None:
    preset, profile, broken = (tmp_path / n for n in ("preset.json", "profile.json", "broken.json"))
    preset.write_text(dataclasses.replace(PRESETS["t4"], name="mine").to_json())
    assert load_machine_or_preset(str(preset)).name == "mine"
    save_machine(Machine.default(), profile)
    assert load_machine_or_preset(str(profile)) == Machine.default()
    for text in ("{", '{"name": "t4", "gemm_flops": 1e13}'):
        broken.write_text(text)
        with pytest.raises(PresetError, match=r"broken\.json"):
            load_machine_or_preset(str(broken))
    with pytest.raises(PresetError, match="presets are t4"):
        load_machine_or_preset("t5")
