"""Equal runs of bytes at equal distances, between host memory and a GPU, as one copy instead of one for each."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from forebay.runtime.devices.cuda.driver import driver_function
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.devices.outward import copy_runs
from forebay.runtime.disk.chunks import RowRun

LOG = logging.getLogger("forebay")
MAX_PITCH = (1 << 31) - 1  # bytes between rows that every driver takes
EITHER_WAY = 4  # cudaMemcpyDefault and hipMemcpyDefault: the addresses say from where to where

# target, its pitch, source, its pitch, bytes of a row, rows, stream
PitchedCopy = Callable[[int, int, int, int, int, int, int], None]


class PitchedRuns(NamedTuple):
    """`rows` runs of `nbytes`: the first from `source` to `target`, each next one further on by the steps."""

    source: int
    target: int
    nbytes: int
    rows: int = 1
    source_step: int = 0
    target_step: int = 0


def grouped(moved: tuple[RowRun, ...]) -> list[PitchedRuns]:
    """Join neighboring runs of equal length and equal steps; runs that overlap or go backward stay apart."""
    found: list[PitchedRuns] = []
    for source, target, nbytes in moved:
        if found and found[-1].nbytes == nbytes:
            last = found[-1]
            steps = (source - last.source - (last.rows - 1) * last.source_step,
                     target - last.target - (last.rows - 1) * last.target_step)
            fits = nbytes <= min(steps) and max(steps) <= MAX_PITCH
            if fits if last.rows == 1 else steps == last[4:]:
                found[-1] = PitchedRuns(*last[:3], last.rows + 1, *steps)
                continue
        found.append(PitchedRuns(source, target, nbytes))
    return found


@functools.cache
def pitched_copy() -> PitchedCopy | None:
    """The driver's copy of rows, after it moved the right bytes both ways on this GPU; None where it did not."""
    try:
        copy = _checked_errors(driver_function("cudaMemcpy2DAsync", "hipMemcpy2DAsync"))
        _refuse_other_bytes(copy, *_tensors())
    except (OSError, AttributeError, RuntimeError) as error:
        LOG.info("runs of bytes are copied one by one: %s", error)
        return None
    return copy


def _checked_errors(call: Any) -> PitchedCopy:
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2 + [ctypes.c_size_t] * 2 + [ctypes.c_int, ctypes.c_void_p]
    call.restype = ctypes.c_int

    def copy(
        target: int, target_pitch: int, source: int, source_pitch: int, nbytes: int, count: int, stream: int
    ) -> None:
        code = call(target, target_pitch, source, source_pitch, nbytes, count, EITHER_WAY, stream)
        if code:
            raise RuntimeFault(f"copying {count} rows of {nbytes} bytes failed (error {code} of the GPU's driver)")

    return copy


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.cuda.Stream]:
    host, back = (torch.zeros(64, dtype=torch.uint8).pin_memory() for _ in range(2))
    return host, torch.zeros(64, dtype=torch.uint8, device="cuda"), back, torch.cuda.current_stream()


def _refuse_other_bytes(
    copy: PitchedCopy, host: torch.Tensor, device: torch.Tensor, back: torch.Tensor, stream: Any
) -> None:
    """Copy rows from `host` to `device` and on to `back`, of 64 bytes each; RuntimeFault where other bytes come."""
    host.copy_(torch.arange(64))
    copy(device.data_ptr() + 1, 9, host.data_ptr() + 3, 16, 5, 4, stream.cuda_stream)
    copy(back.data_ptr(), 12, device.data_ptr() + 1, 9, 5, 4, stream.cuda_stream)
    stream.synchronize()
    expected = torch.zeros(64, dtype=torch.uint8)
    for row in range(4):
        expected[12 * row : 12 * row + 5] = host[3 + 16 * row : 8 + 16 * row]
    if not torch.equal(back, expected):
        raise RuntimeFault("the GPU's driver copied other bytes than it was asked to")


class RunCopier:
    """Copies runs between two byte tensors on the current stream; what equal runs join to is kept for the next time.
    `whole` is the run of all bytes of two tensors of one size."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, copy: PitchedCopy | None) -> None:
        self.source, self.target, self.copy = source, target, copy
        self.whole: tuple[RowRun, ...] = ((0, 0, source.numel()),)
        self._moved: tuple[RowRun, ...] = ()
        self._groups: list[PitchedRuns] = []

    def __call__(self, moved: tuple[RowRun, ...]) -> None:
        if moved is self.whole:
            self.target.copy_(self.source, non_blocking=True)
            return
        if self.copy is None or len(moved) == 1:
            copy_runs(moved, self.source, self.target, non_blocking=True)
            return
        if self._moved is not moved:
            self._groups = [self._within(group) for group in grouped(moved)]
            self._moved = moved
        stream = torch.cuda.current_stream().cuda_stream
        source, target = self.source.data_ptr(), self.target.data_ptr()
        for group in self._groups:
            if group.rows == 1:
                copy_runs((group[:3],), self.source, self.target, non_blocking=True)
            else:
                self.copy(target + group.target, group.target_step, source + group.source, group.source_step,
                          group.nbytes, group.rows, stream)

    def _within(self, group: PitchedRuns) -> PitchedRuns:
        """The group, whose rows a driver would copy wherever they are; RuntimeFault where they leave a tensor."""
        for memory, at, step in ((self.source, group.source, group.source_step),
                                 (self.target, group.target, group.target_step)):
            if at < 0 or at + (group.rows - 1) * step + group.nbytes > memory.numel():
                raise RuntimeFault(f"{group} leaves memory of {memory.numel()} bytes")
        return group
