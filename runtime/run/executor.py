"""The one loop that runs Programs, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from forebay.rewriter.ir.program import COMPUTE, DOWNLOAD, WRITE, Copy, Item, Launch, Program
from forebay.runtime.devices.device import Call, Device
from forebay.runtime.run.bind import bind_launch
from forebay.runtime.run.trace import Trace


class BoundProgram:
    """A Program on a device: calls made ready once, made in order every step.

    `inputs` and `outputs` are tensors over the arena: write, `run`, read.
    """

    def __init__(self, program: Program, device: Device, trace: Trace | None = None) -> None:
        self.program, self.device, self.trace = program, device, trace
        if program.files:
            device.open_files(program.files)
        if held := program.held_nbytes():
            device.hold(held)
        self.inputs = {name: device.tensor(ref) for name, ref in program.inputs.items()}
        self.outputs = {name: device.tensor(ref) for name, ref in program.outputs.items()}
        self.stores = any(isinstance(i, Copy) and i.stream in (DOWNLOAD, WRITE) for i in program.step)
        self._prologue = self._bind(program.prologue)
        self._step = self._bind(program.step)

    def _bind(self, items: Iterable[Item]) -> list[Call]:
        """The items as calls that the device joins, but for a trace, which times each; launches on other streams the
        device times where it runs them."""
        ready = [(item, call) for item in items if (call := self._ready(item)) is not None]
        if self.trace is None:
            return self.device.joined(ready)
        return [call if isinstance(item, Launch) and item.stream != COMPUTE else self.trace.timed(item, call)
                for item, call in ready]

    def _ready(self, item: Item) -> Call | None:
        if not isinstance(item, Launch):
            return self.device.bind(item, None)
        return self.device.bind(item, bind_launch(item, partial(self.device.operand, item.stream)))

    def start(self) -> None:
        """Issue the copies that the first step expects in flight; once, before the first step of any program that
        shares its slots."""
        with torch.inference_mode(), self.device.issuing():
            for call in self._prologue:
                call()

    def write(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Give the step those of `inputs` that it has."""
        known = {name: value for name, value in inputs.items() if name in self.inputs}
        self.device.write([(self.inputs[name], value) for name, value in known.items()])
        for name, value in known.items():
            self.device.tell(self.program.inputs[name], value)

    def run(self) -> None:
        """One step. When it returns, the outputs hold its results; copies for the next step may be under way."""
        with torch.inference_mode(), self.device.issuing():
            for call in self._step:
                call()


def load_resident(items: Iterable[Item], device: Device) -> None:
    """Run copies that fill resident memory, and wait for them."""
    for item in items:
        call = device.bind(item, None)
        if call is not None:
            call()
    device.finish()
