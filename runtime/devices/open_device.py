"""Choose and open the device that a machine has."""

from __future__ import annotations

import os
import tempfile
import warnings

import torch

from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.device import Device
from forebay.runtime.devices.threads import ThreadDevice
from forebay.runtime.disk.reader import KINDS, DiskReader, open_reader, readers_beside
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.run.trace import Trace


def open_device(
    machine: Machine, switches: Switches, trace: Trace | None = None, folder: str | None = None
) -> Device:
    """CUDA when the plan's machine is a GPU, else threads; reads and writes by the path that the machine profile found
    fastest. Spill files lie in `folder`, or else where the profile was measured."""
    near = "device" if machine.device_kind == "cpu" else "host"
    link, back = machine.link("disk", near), machine.link(near, "disk")
    opened: list[DiskReader] = []
    try:
        how = {"depth": link.depth or None, "chunk_nbytes": link.chunk_nbytes or None}  # a data sheet says neither
        opened.append(open_reader(link.method or "auto", **how))
        for kind, depth in readers_beside():
            opened.append(open_reader(kind, depth=depth))
    except BaseException:
        for each in opened:
            each.close()
        raise
    reader, loads, lookups = opened
    method = back.method if back.method in KINDS else "auto"
    spill = SpillSpace(folder or machine.folder or tempfile.gettempdir(), method, back.depth or None,
                       back.chunk_nbytes or None)
    if machine.device_kind != "cpu":
        from forebay.runtime.devices.cuda import CudaDevice

        return CudaDevice(reader, lookups=lookups, loads=loads, poison=switches.poison, sync=switches.sync, trace=trace,
                          spill=spill, graphs=switches.graphs)
    _warn_of_spinning()
    return ThreadDevice(reader, lookups=lookups, loads=loads, poison=switches.poison, sync=switches.sync, trace=trace,
                        spill=spill)


def _warn_of_spinning() -> None:
    """On few cores OpenMP threads that spin while they wait take the core the reader needs (seen: 4 times slower)."""
    calm = os.environ.get("GOMP_SPINCOUNT") == "0" or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    if (os.cpu_count() or 1) <= 4 and not calm and torch.get_num_threads() > 1:
        warnings.warn("OpenMP threads spin while they wait, which slows streaming on few cores: set GOMP_SPINCOUNT=0 "
                      "before Python starts (the forebay command does)", RuntimeWarning, stacklevel=3)
