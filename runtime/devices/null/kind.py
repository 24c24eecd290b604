"""A device that computes nothing, for plans that are only made, proved and walked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forebay.runtime.devices.cpu.kind import CPU

if TYPE_CHECKING:
    from forebay.runtime.devices.device import Device
    from forebay.runtime.devices.opening import Opening


def _open(opening: Opening) -> Device:
    from forebay.runtime.devices.null.device import NullDevice

    return NullDevice(opening.reader, **opening.shared())


NULL = replace(CPU, name="null", title="null device", covers=lambda device_kind: device_kind == "null",
               opener=_open)
