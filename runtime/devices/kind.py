"""The record of a kind of device: what planning, prediction and the command line ask about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from forebay.kernels import operators
from forebay.rewriter.ir.program import Launch

if TYPE_CHECKING:
    from forebay.runtime.devices.device import Device
    from forebay.runtime.devices.opening import Opening


# Bytes of staging slots to compare, of equals the first: 4 MiB are near an NVMe disk's best rate.
DISK_SLOTS = (4 << 20, 8 << 20, 2 << 20, 1 << 20)
# Beside a GPU each copy takes its thread 30 us, in which the link moves 1.5 MiB: an H200's blocks in tiles of 8 MiB
# waited for whoever issued them.
LINK_SLOTS = (16 << 20, 32 << 20, 64 << 20, 8 << 20, 4 << 20, 2 << 20, 1 << 20)


def with_workspace(launch: Launch, kernels: str) -> Launch:
    """Add what an operator's own kernels take beside their operands.

    Args:
        launch: A launch whose `workspace_nbytes` counts what torch's operators take.
        kernels: The key of the bindings in use.

    Returns:
        The launch with the sum of both, in bytes.
    """
    operator = operators.find(launch.op)
    own = 0 if operator is None else operator.workspace_nbytes(launch, kernels)
    return replace(launch, workspace_nbytes=launch.workspace_nbytes + own) if own else launch


@dataclass(frozen=True)
class DeviceKind:
    """Facts of one kind of device. Nothing outside its folder compares device names.

    Attributes:
        name: Its own.
        kernels: The key of operators' bindings that run on it ("cpu", "cuda").
        title: What messages call it.
        covers: Whether a profile's `device_kind` ("cpu", "NVIDIA H100 80GB HBM3") is of this kind.
        here: The `device_kind` of such a device on this machine; None where there is none, and for the CPU.
        opener: Makes its `Device` from readers, spill files and switches; None where it is only predicted.
        on_host_cores: It computes with the cores that also issue copies and read files. Launches then take the issuing
            thread's time, other processes slow them, and products are chosen by measurement.
        slot_nbytes: Sizes of staging slots that plans compare, of equals the first.
        near_disk: The tier that disk reads land in. "host" means that copies hop: disk, pinned host memory, device.
        joins: Its kernels take what several launches do, as one (`join_launches`).
        halves_alike: Its float16 and bfloat16 kernels have the same rates.
        runs: Programs run on it; otherwise it is only predicted.
        torus: Chips of it are linked in a torus.
        collectives: torch.distributed's name of the backend that exchanges among such devices.
        exchange_step_s: Cautious guess of seconds for one ring step of an exchange.
        exchange_bytes_per_s: Cautious guess of an exchange's bandwidth.
        with_memory: Adds to a launch what it takes outside the arenas on this device.
        draw_nbytes: Bytes that drawing a token from so many logits takes outside the arenas; 0 where the constant of a
            budget's promise has them.
        select: Makes the device of this number the process's own.
        visible: The environment in which a process sees only the device of this number.
        free_nbytes: Free bytes of its own memory; None where it computes in the machine's RAM.
        one_memory: Whether a GPU's memory is the machine's RAM.
    """

    name: str
    kernels: str
    title: str
    covers: Callable[[str], bool]
    here: Callable[[], str | None] = lambda: None
    opener: Callable[[Opening], Device] | None = None
    on_host_cores: bool = False
    slot_nbytes: tuple[int, ...] = LINK_SLOTS
    near_disk: Literal["device", "host"] = "host"
    joins: bool = False
    halves_alike: bool = True
    runs: bool = True
    torus: bool = False
    collectives: str = "gloo"
    exchange_step_s: float = 2e-5
    exchange_bytes_per_s: float = 5e9
    with_memory: Callable[[Launch], Launch] = lambda launch: launch
    draw_nbytes: Callable[[int], int] = lambda words: 0
    select: Callable[[int], None] = lambda number: None
    visible: Callable[[int], Mapping[str, str]] = lambda number: {}
    free_nbytes: Callable[[], int | None] = lambda: None
    one_memory: Callable[[], bool] = lambda: False
