"""NVIDIA GPUs, and accelerators that are predicted as if they were such."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from forebay.runtime.devices.cuda.memory import KERNELS, draw_nbytes, with_cuda_memory
from forebay.runtime.devices.kind import DeviceKind

if TYPE_CHECKING:
    from forebay.runtime.devices.device import Device
    from forebay.runtime.devices.opening import Opening


def _open(opening: Opening) -> Device:
    from forebay.kernels.gpu_support.overlap import overlap_launches  # these import Triton
    from forebay.runtime.devices.cuda import device

    switches = opening.switches
    overlap_launches(switches.pdl)
    return device.CudaDevice(opening.reader, graphs=switches.graphs, whole=switches.whole_steps,
                             reads_land=opening.reads_land, **opening.shared())


def _here() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


CUDA = DeviceKind(
    name="cuda", kernels=KERNELS, title="GPU",
    covers=lambda device_kind: device_kind.startswith(("NVIDIA", "Tesla")), here=_here, opener=_open,
    collectives="cpu:gloo,cuda:nccl", joins=True, with_memory=with_cuda_memory, draw_nbytes=draw_nbytes,
    select=torch.cuda.set_device, visible=lambda number: {"CUDA_VISIBLE_DEVICES": str(number)},
    free_nbytes=lambda: torch.cuda.mem_get_info()[0],
    one_memory=lambda: bool(torch.cuda.get_device_properties(torch.cuda.current_device()).is_integrated))
# Whatever no other kind covers: planned and predicted as a GPU with host memory beside it.
ACCELERATOR = replace(CUDA, name="accelerator", covers=lambda device_kind: True, here=lambda: None, runs=False,
                      free_nbytes=lambda: None, one_memory=lambda: False)
TPU = replace(ACCELERATOR, name="tpu", covers=lambda device_kind: device_kind.startswith("TPU"), torus=True,
              opener=None)
