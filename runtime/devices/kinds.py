"""The list of device kinds, and how to find the one that a machine profile names.

Each folder below `runtime/devices/` with a `kind.py` holds records, and all are found: a new device is a folder.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from forebay.runtime.devices.cpu.kind import CPU
from forebay.runtime.devices.cuda.kind import ACCELERATOR
from forebay.runtime.devices.kind import DeviceKind

HOST = CPU  # it computes beside any other device


def _of_folders() -> list[DeviceKind]:
    """The records of all folders; that of what no other covers comes last."""
    here, found = Path(__file__).parent, dict[str, DeviceKind]()
    for path in sorted(here.glob("*/kind.py")):
        module = importlib.import_module(f"{__name__.rpartition('.')[0]}.{path.parent.name}.kind")
        found |= {kind.name: kind for kind in vars(module).values() if isinstance(kind, DeviceKind)}
    return sorted(found.values(), key=lambda kind: kind is ACCELERATOR)


KINDS = _of_folders()  # the first that covers a name counts


def register_device(kind: DeviceKind) -> None:
    """Add a device from outside the package, before those that are known.

    Args:
        kind: Its facts, and its opener. Machines whose `device_kind` it covers are planned, predicted and opened by it.
    """
    KINDS.insert(0, kind)


def kind_of(device_kind: str) -> DeviceKind:
    """The kind of the device that a machine profile names."""
    return next(kind for kind in KINDS if kind.covers(device_kind))


def device_here() -> str:
    """The `device_kind` of this machine: an accelerator's where one is found, otherwise the CPU's."""
    return next((name for kind in KINDS if (name := kind.here())), HOST.name)
