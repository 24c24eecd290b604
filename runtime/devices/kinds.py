"""The list of device kinds, and how to find the one that a machine profile names."""

from __future__ import annotations

from forebay.runtime.devices.cpu.kind import CPU
from forebay.runtime.devices.cuda.kind import ACCELERATOR, CUDA, TPU
from forebay.runtime.devices.kind import DeviceKind
from forebay.runtime.devices.null.kind import NULL

KINDS = [CPU, NULL, CUDA, TPU]  # the first that covers a name counts
HOST = CPU  # it computes beside any other device


def register_kind(kind: DeviceKind) -> None:
    """Add a kind of device, before those that are known."""
    KINDS.insert(0, kind)


def kind_of(device_kind: str) -> DeviceKind:
    """The kind of the device that a machine profile names."""
    return next((kind for kind in KINDS if kind.covers(device_kind)), ACCELERATOR)


def device_here() -> str:
    """The `device_kind` of this machine: an accelerator's where one is found, otherwise the CPU's."""
    return next((name for kind in KINDS if (name := kind.here())), HOST.name)
