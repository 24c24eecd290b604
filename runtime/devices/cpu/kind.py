"""The CPU: its device tier is a budgeted slice of RAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.kernels.operator import HOST_KERNELS as KERNELS
from forebay.runtime.devices.kind import DISK_SLOTS, DeviceKind, with_workspace

if TYPE_CHECKING:
    from forebay.runtime.devices.device import Device
    from forebay.runtime.devices.opening import Opening


def _open(opening: Opening) -> Device:
    from forebay.runtime.devices.cpu.device import open_cpu

    return open_cpu(opening)


CPU = DeviceKind(
    name="cpu", kernels=KERNELS, title="CPU", covers=lambda device_kind: device_kind == KERNELS, opener=_open,
    on_host_cores=True, slot_nbytes=DISK_SLOTS, near_disk="device", halves_alike=False,
    exchange_step_s=5e-4, exchange_bytes_per_s=5e8,  # cautious: gloo through a loopback took 0.2 to 1.4 ms a step
    with_memory=lambda launch: with_workspace(launch, KERNELS))
