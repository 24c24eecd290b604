"""Open the device that a machine has."""

from __future__ import annotations

import contextlib
import tempfile

from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.device import Device, RuntimeFault
from forebay.runtime.devices.opening import Opening
from forebay.runtime.disk.reader import KINDS, DiskReader, open_reader, readers_beside
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.run.trace import Trace


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
    near, opener = machine.near_disk, machine.kind.opener
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
        device = opener(Opening(reader, loads, lookups, spill, switches, trace, near == "device"))
        opened.pop_all()
    return device
