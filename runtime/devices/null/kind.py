"""A device that computes nothing, for plans that are only made, proved and walked."""

from __future__ import annotations

from dataclasses import replace

from forebay.runtime.devices.cpu.kind import CPU

NULL = replace(CPU, name="null", title="null device", covers=lambda device_kind: device_kind == "null")
