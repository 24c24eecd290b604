"""Machine presets: every number has a source, nonsense is refused by field, JSON both ways."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from forebay.rewriter.machine.presets import (
    PRESETS,
    MachineRates,
    PresetError,
    load_rates,
    rates_from_json,
    rates_of_machine,
)
from forebay.rewriter.machine.profile import Machine, save_machine


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_has_a_source(name: str) -> None:
    rates = PRESETS[name]
    rates.validate()
    numbers = {f.name for f in dataclasses.fields(MachineRates)} - {"name", "sources"}
    assert set(rates.sources) == numbers
    assert rates.name == name


@pytest.mark.parametrize("name", PRESETS)
def test_json_both_ways(name: str) -> None:
    assert rates_from_json(PRESETS[name].to_json()) == PRESETS[name]


@pytest.mark.parametrize(("field", "value", "says"), [
    ("gemm_flops", -1.0, "gemm_flops"), ("gemm_flops", 1e15, "exceeds peak_flops"),
    ("device_nbytes", 0, "device_nbytes"), ("device_nbytes", 1.5, "expected int"),
    ("disk_read_bytes_per_s", 0.0, "a disk needs rates"), ("memory_bytes_per_s", float("nan"), "memory_bytes_per_s"),
    ("sources", {}, "sources.device_nbytes"), ("name", "", "name"), ("dispatch_s", "fast", "expected float"),
    ("colour", "red", "colour: is not a known field"), ("host_nbytes", True, "host_nbytes"),
])
def test_nonsense_is_refused_by_field(field: str, value: object, says: str) -> None:
    data = json.loads(PRESETS["t4"].to_json())
    data[field] = value
    with pytest.raises(PresetError, match=says):
        rates_from_json(json.dumps(data))


def test_missing_field_is_named() -> None:
    data = json.loads(PRESETS["t4"].to_json())
    del data["disk_nbytes"]
    with pytest.raises(PresetError, match="disk_nbytes: is missing"):
        rates_from_json(json.dumps(data))


def test_files(tmp_path: Path) -> None:
    preset, profile, broken = (tmp_path / n for n in ("preset.json", "profile.json", "broken.json"))
    preset.write_text(dataclasses.replace(PRESETS["t4"], name="mine").to_json())
    assert load_rates(str(preset)).name == "mine"
    save_machine(Machine.default(), profile)
    assert load_rates(str(profile)) == rates_of_machine(Machine.default())
    broken.write_text("{")
    with pytest.raises(PresetError, match=r"broken\.json"):
        load_rates(str(broken))
    with pytest.raises(PresetError, match="presets are t4"):
        load_rates("t5")


def test_a_measured_machine_keeps_its_own_rates() -> None:
    machine = Machine.default()
    rates = rates_of_machine(machine)
    assert rates.gemm_flops == pytest.approx(max(2 * p.m * p.n * p.k / p.time_s for p in machine.gemm))
    assert rates.disk_read_bytes_per_s == 1.5e9
    assert rates.host_attention_bytes_per_s == machine.attention_bytes_per_s  # its device is the CPU
    with pytest.raises(PresetError, match="gemm"):
        rates_of_machine(dataclasses.replace(machine, gemm=()))
