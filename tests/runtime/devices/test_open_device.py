"""open_device opens a reader for each stream that reads the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import forebay.runtime.devices.open_device as module
from forebay.rewriter.ir.program import READS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.switches import Switches
from forebay.runtime.devices import kinds
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.devices.device import Device, RuntimeFault
from forebay.runtime.devices.open_device import open_device
from forebay.runtime.devices.opening import Opening


def test_weights_rows_and_caches_do_not_queue_behind_each_other(tmp_path: Path) -> None:
    device = open_device(Machine.default(), Switches(), folder=str(tmp_path))
    assert isinstance(device, ThreadDevice)
    try:
        assert len({id(device.readers[stream]) for stream in READS}) == len(READS) == 3
    finally:
        device.close()


def test_a_data_sheet_that_names_no_depth_opens_as_well(tmp_path: Path) -> None:
    machine = Machine.default()
    links = tuple(replace(link, depth=0, chunk_nbytes=0) for link in machine.links)
    device = open_device(replace(machine, links=links), Switches(), folder=str(tmp_path))
    try:
        assert all(reader.fault() is None for reader in device.readers.values())
    finally:
        device.close()


def test_a_plan_for_chips_that_are_only_predicted_is_refused(tmp_path: Path) -> None:
    machine = replace(Machine.default(), device_kind="TPU v4")
    with pytest.raises(RuntimeFault, match="this plan is for TPU v4, which is only predicted; plan for this machine"):
        open_device(machine, Switches(), folder=str(tmp_path))


@pytest.mark.parametrize("fails", [0, 1, 2, "device"])
def test_a_reader_or_device_that_cannot_be_opened_leaves_no_reader(
    fails: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Reader] = []
    calls = iter(range(3))

    class Reader:
        def __init__(self) -> None:
            left.append(self)

        def close(self) -> None:
            left.remove(self)

    def open_or_fail(*args: object, **options: object) -> Reader:
        if next(calls) == fails:
            raise OSError("no more threads")
        return Reader()

    def no_device(opening: Opening) -> Device:
        assert len(left) == 3
        raise OSError("no more threads")

    monkeypatch.setattr(kinds, "KINDS", [replace(kinds.HOST, opener=no_device)])
    monkeypatch.setattr(module, "open_reader", open_or_fail)
    with pytest.raises(OSError, match="no more threads"):
        open_device(Machine.default(), Switches(), folder=str(tmp_path))
    assert left == []
