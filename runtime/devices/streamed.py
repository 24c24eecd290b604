"""Shared code of devices that issue a Program's items themselves: readers, spill files, workers, kinds of items."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch

from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    LOAD,
    LOOKUP,
    UNORDERED,
    Copy,
    Item,
    Launch,
    Record,
    Release,
    TensorRef,
    Wait,
)
from forebay.runtime.devices.device import Call, RuntimeFault
from forebay.runtime.devices.outward import NamedRows
from forebay.runtime.devices.streams import CopyLedger, Worker, first_fault
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.disk.spill_file import SpillFile
from forebay.runtime.run.trace import Trace

Run = list[tuple[Launch, Call]]  # of launches of the compute stream with nothing between them


def joined_launches(items: Sequence[tuple[Item, Call]], join: Callable[[Run], list[Call]]) -> list[Call]:
    """The calls of items, those of each run of launches as `join` gives them."""
    calls: list[Call] = []
    for alike, group in groupby(items, key=lambda pair: isinstance(pair[0], Launch) and pair[0].stream == COMPUTE):
        run = [*group]
        calls += join(run) if alike else [call for _, call in run]  # type: ignore[arg-type]
    return calls


class StreamedDevice:
    """A device whose streams are the caller's thread, workers, and engines that read and write the disk.

    Attributes:
        queues: Whether a step is issued and runs later, so that the next one may be issued before its result is read.
        loads_beside: Whether a copy from disk to the memory of the device returns before it is done.
    """

    queues = False
    loads_beside = False

    def __init__(
        self, reader: DiskReader, *, lookups: DiskReader | None = None, loads: DiskReader | None = None,
        poison: bool = False, sync: bool = False, trace: Trace | None = None, spill: SpillSpace | None = None,
    ) -> None:
        self.readers = {DISK: reader, LOOKUP: lookups or reader, LOAD: loads or reader}
        self.poison, self.sync, self.trace, self.spill = poison, sync, trace, spill
        self.workers: dict[str, Worker] = {}
        self.ledgers = {stream: CopyLedger(self._fault) for stream in UNORDERED}
        self.named = NamedRows(self.tensor)

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """The tensor at a place in an arena."""
        raise NotImplementedError

    def operand(self, stream: str, ref: TensorRef) -> torch.Tensor:
        """The same, as launches of a stream see it."""
        return self.tensor(ref)

    def write(self, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each value to its target."""
        for target, value in inputs:
            target.copy_(value)

    def read_later(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A result as it is now."""
        kept = value.clone()
        return lambda: kept

    def finish(self) -> None:
        """Wait for everything issued; raise the first error any of it met."""
        raise NotImplementedError

    def open_files(self, files: Mapping[str, int]) -> None:
        """Take spill files."""
        self._spill.open(files)

    def spill_file(self, name: str) -> SpillFile:
        """A spill file that was taken."""
        return self._spill[name]

    @property
    def _spill(self) -> SpillSpace:
        if self.spill is None:
            raise RuntimeFault("this program spills to disk, and its device was given no folder to do so")
        return self.spill

    def bind(self, item: Item, launch: Call | None) -> Call | None:
        """Make an item ready to issue."""
        if isinstance(item, Launch):
            return launch if item.stream == COMPUTE or launch is None else self._beside(item, launch)
        if isinstance(item, Copy):
            return self._in_order(self._bind_copy(item))
        if isinstance(item, Release):
            return self._bind_poison(item) if self.poison else None
        if isinstance(item, Record):
            return self._bind_record(item)
        assert isinstance(item, Wait)
        return self._bind_wait(item)

    def _bind_copy(self, item: Copy) -> Call:
        raise NotImplementedError

    def _bind_poison(self, item: Release) -> Call:
        raise NotImplementedError

    def _bind_record(self, item: Record) -> Call | None:
        raise NotImplementedError

    def _bind_wait(self, item: Wait) -> Call | None:
        raise NotImplementedError

    def _worker(self, stream: str) -> Worker:
        return self.workers[stream]

    def _beside(self, item: Launch, launch: Call) -> Call:
        """A launch on the worker of its stream."""
        worker, run = self._worker(item.stream), launch if self.trace is None else self.trace.timed(item, launch)
        return self._in_order(functools.partial(worker.submit, run))

    def _in_order(self, call: Call, always: bool = False) -> Call:
        """A call that ends with the work that it issues, where all are to (or `always`)."""

        def run() -> None:
            call()
            self.finish()

        return run if self.sync or always else call

    def _begin(self, item: Copy, nbytes: int) -> Callable[[BaseException | None], None]:
        """Note an asynchronous copy; with a trace, also its bytes and when it began and ended."""
        done = self.ledgers[item.stream].begin()
        return done if self.trace is None else self.trace.until(item, nbytes, done)

    def _fault(self) -> BaseException | None:
        """Return the error that ended a thread that copies, reads or writes; None while all live."""
        return first_fault((*self.workers.values(), *self.readers.values(), self.spill))

    def _close_all(self, *threads: Worker | DiskReader) -> None:
        """End workers and readers, in this order, and what writes spill files."""
        for each in (*threads, *filter(None, [self.spill])):
            each.close()
