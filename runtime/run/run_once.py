"""One step of a Program on given weights, copies one after the other: what FOREBAY_BISECT compares."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from forebay.rewriter.ir.program import Copy, FileSlice, Item, Program, Rows, TensorRef, place_of
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.run.executor import BoundProgram


def run_once(
    program: Program, weights: Mapping[str, torch.Tensor], files: Mapping[str, FileSlice],
    inputs: Mapping[str, torch.Tensor],
) -> list[torch.Tensor]:
    """The outputs of the first step of `program` on the CPU, from an empty cache. Weights and inputs are told by name;
    what the program reads of `files` it reads of these. KeyError for a missing one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        moved = _SideFile(str(path), {place: name for name, place in files.items() if name in weights})
        with path.open("wb") as file:
            for name in moved.names:
                file.write(_bytes(weights[name]).numpy().data)
        device = ThreadDevice(open_reader("buffered"), sync=True)
        try:
            device.allocate(program.arenas)
            for name, span in program.resident.items():
                memory = device.tensor(TensorRef(span.arena, span.offset, "uint8", (span.nbytes,), (1,), name))
                memory.copy_(_bytes(weights[name])) if name in weights else memory.zero_()
            bound = BoundProgram(replace(program, prologue=tuple(map(moved.item, program.prologue)),
                                         step=tuple(map(moved.item, program.step))), device)
            for name, memory in bound.inputs.items():
                memory.copy_(inputs[name])
            bound.start()
            bound.run()
            device.finish()
            return [value.clone() for value in bound.outputs.values()]
        finally:
            device.close()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class _SideFile:
    """Weights one behind the other in a file of their own, and items that read them there."""

    def __init__(self, path: str, names: Mapping[FileSlice, str]) -> None:
        self.path, self.names = path, []
        self.places: dict[str, list[tuple[int, int, int]]] = {}  # by file: offset there, offset here, bytes; in order
        end = 0
        for place in sorted(names, key=lambda place: (place.path, place.offset)):
            self.names.append(names[place])
            for file, there, nbytes in _runs(place):
                self.places.setdefault(file, []).append((there, end, nbytes))
                end += nbytes
        for known in self.places.values():
            known.sort()

    def item(self, item: Item) -> Item:
        """`item`, reading from here what it reads of a weight's file."""
        if not isinstance(item, Copy) or not isinstance(place := place_of(item.src), FileSlice):
            return item
        file, first, nbytes = _runs(place)[0]
        known = self.places.get(file, [])
        at = bisect_right(known, first, key=lambda entry: entry[0]) - 1
        if at < 0 or first + nbytes > known[at][0] + known[at][2]:
            raise KeyError(f"{item.label} reads {place}, which is no weight's")
        there, here, _ = known[at]
        source = FileSlice(self.path, here + first - there, place.nbytes)
        return replace(item, src=replace(item.src, table=source) if isinstance(item.src, Rows) else source)


def _runs(place: FileSlice) -> list[tuple[str, int, int]]:
    """File, offset and bytes of what lies in one piece; of bands with gaps all that they span."""
    return [(band.path or place.path, place.offset + band.offset, band.count * band.row_nbytes)
            for band in place.bands] or [(place.path, place.offset, place.nbytes)]
