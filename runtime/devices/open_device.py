"""Open the device that a machine has."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable

from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.cpu.device import open_cpu
from forebay.runtime.devices.cuda.kind import ACCELERATOR, CUDA
from forebay.runtime.devices.device import Device, RuntimeFault
from forebay.runtime.devices.kind import DeviceKind
from forebay.runtime.devices.kinds import HOST, register_kind
from forebay.runtime.devices.null.device import NullDevice
from forebay.runtime.devices.null.kind import NULL
from forebay.runtime.devices.opening import Opening
from forebay.runtime.disk.reader import KINDS, DiskReader, open_reader, readers_beside
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.run.trace import Trace

Opener = Callable[[Opening], Device]


def _open_cuda(opening: Opening) -> Device:
    from forebay.runtime.devices.cuda.device import open_cuda  # which imports Triton

    return open_cuda(opening)


OPENERS: dict[str, Opener] = {HOST.name: open_cpu, CUDA.name: _open_cuda, ACCELERATOR.name: _open_cuda,
                              NULL.name: NullDevice}


def register_device(kind: DeviceKind, opener: Opener) -> None:
    """Add a device from outside the package.

    Args:
        kind: Its facts. Machines whose `device_kind` it covers are planned, predicted and opened by it.
        opener: Makes its `Device` from readers, spill files and switches.
    """
    register_kind(kind)
    OPENERS[kind.name] = opener


def open_device(
    machine: Machine, switches: Switches, trace: Trace | None = None, folder: str | None = None
) -> Device:
    """Open the device of the plan's machine. It reads and writes by the path that the profile found fastest.

    Args:
        machine: The profile that the plan was made for.
        switches: The debugging switches.
        trace: Records what runs, if given.
        folder: Where spill files lie; by default where the profile was measured.

    Raises:
        RuntimeFault: No such device is here.
    """
    near, opener = machine.near_disk, OPENERS.get(machine.kind.name)
    if opener is None:
        raise RuntimeFault(f"this plan is for {machine.device_kind}, which is only predicted; plan for this machine")
    link, back = machine.link("disk", near), machine.link(near, "disk")
    method = back.method if back.method in KINDS else "auto"
    spill = SpillSpace(folder or machine.folder or tempfile.gettempdir(), method, back.depth or None,
                       back.chunk_nbytes or None)
    with contextlib.ExitStack() as opened:

        def read_by(kind: str, **how: int | None) -> DiskReader:
            reader = open_reader(kind, **how)
            opened.callback(reader.close)
            return reader

        reader = read_by(link.method or "auto", depth=link.depth or None,  # a data sheet says neither
                         chunk_nbytes=link.chunk_nbytes or None)
        loads, lookups = (read_by(kind, depth=depth) for kind, depth in readers_beside())
        device = opener(Opening(reader, loads, lookups, spill, switches, trace))
        opened.pop_all()
    return device
