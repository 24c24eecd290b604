"""One plan on one device: memory taken, resident weights loaded while the first step runs, further steps run."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import DISK, Copy, FileSlice, Item, Program, Rows, Span, TensorRef
from forebay.rewriter.ir.schedule.routed_fetch import expert_place
from forebay.rewriter.ir.shared_draft import SharedDraft
from forebay.runtime.devices.device import Device, RuntimeFault
from forebay.runtime.run.cache_blocks import CacheBlocks
from forebay.runtime.run.executor import BoundProgram, load_resident
from forebay.runtime.run.loading import FirstStep, while_loading
from forebay.runtime.run.step_inputs import StepInputs
from forebay.runtime.run.trace import Trace

LOG = logging.getLogger("forebay")


def resident_copies(plan: Plan, files: Mapping[str, FileSlice]) -> list[Copy]:
    """The copies that fill resident memory, on every tier that is not the disk, from the weights' files. PlanError,
    naming the weight, where its size in the plan is not that of its memory and of its bytes in the file."""
    placed = {b.name: b for b in plan.buffers if b.kind == "weight"}
    copies = []
    for w in plan.weights:
        if w.tier == "disk" or not w.nbytes:
            continue
        place, source = placed[w.name], files[w.name]
        if not w.nbytes == place.nbytes == source.nbytes:
            raise PlanError(f"plan.weights: {w.name} has {w.nbytes} bytes, but {place.nbytes} in plan.buffers and "
                            f"{source.nbytes} in {source.path}; plan again")
        copies.append(Copy(DISK, source, Span(place.arena, place.offset, w.nbytes, w.name), f"load {w.name}"))
    return copies


class KnownPrefixes(Protocol):
    """Prefixes of prompts that need not be computed again; `PrefixReuse` says what its methods do."""

    def expect(self, prompts: Iterable[tuple[torch.Tensor, str]] | None) -> list[tuple[bytes, ...]]: ...

    def enter(self, prompts: Mapping[int, torch.Tensor], adapters: Mapping[int, str]) -> int: ...

    def keep(self, slots: Iterable[int], at: int, tokens: int) -> None: ...

    def overwrite(self, inputs: StepInputs) -> None: ...

    def forget(self, slots: Iterable[int]) -> None: ...

    def next_unknown(self, ids: torch.Tensor, adapter: str) -> int: ...


class Session:
    """Holds the arenas of a plan until `close`.

    Args:
        plan: The plan.
        program: Gives the Program for a number of tokens per sequence.
        growth: The Program between prefill and decoding where the cache then gets more room.
        every_position: Whether the Programs give logits of every token of a step.
        rope_switch_length: A cache begun within so many tokens is no use beyond them: whoever runs steps then begins
            again (0: never).
        shared: A step that drafts in the plan's memory.
        rewindable: Whether states may take a token again; others take each token once.
        adapters: Columns of the adapters that requests name.

    Attributes:
        prefixes: What is known of prompts before they are computed, if anything (`reuse_prefixes`).
        blocks: Where the sequences of a staged cache stand.
    """

    prefixes: KnownPrefixes | None = None

    def __init__(
        self,
        plan: Plan,
        program: Callable[[int], Program],
        load: Iterable[Copy],
        constants: Mapping[str, torch.Tensor],
        device: Device,
        trace: Trace | None = None,
        growth: Program | None = None,
        every_position: bool = False,
        rope_switch_length: int = 0,
        shared: SharedDraft | None = None,
        rewindable: bool = True,
        adapters: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        if plan.prefill_overlays_kv_cache and growth is None:
            raise RuntimeFault("this plan's cache grows after the prefill; give the session the program that does it")
        self.plan, self.device, self.trace = plan, device, trace
        self.every_position, self.rope_switch_length, self.rewindable = every_position, rope_switch_length, rewindable
        self._program, self._growth, self.shared, self._adapters = program, growth, shared, adapters or {}
        self._grow: BoundProgram | None = None
        self._drafting: BoundProgram | None = None
        self.blocks = CacheBlocks(plan) if plan.schedule.batching.cache.staged else None
        self._bound: dict[int, BoundProgram] = {}
        self._started = False
        self._ran: BoundProgram | None = None  # last
        self._prologue: tuple[Item, ...] | None = None  # one for all: any step's end serves any start
        self._first: FirstStep | None = None  # while weights that it does not read may still come
        self._waited_s = 0.0
        self._end = weakref.finalize(self, _end, device)  # memory must outlast the reads that land in it
        self._end.atexit = False
        try:
            device.allocate(plan.arenas if shared is None else shared.beside(plan).arenas)
            self._write_constants(constants)
            self._routing = {  # of pools, in which all slots are empty
                b.name: device.tensor(TensorRef(b.arena, b.offset, "int64", (b.nbytes // 8,), (1,), b.name)).zero_()
                for b in plan.buffers if b.kind == "routing"}
            self._load = (*load, *(() if shared is None else shared.load))
            if not device.loads_beside:
                self.load()
        except BaseException:
            self._end()
            raise

    def _write_constants(self, constants: Mapping[str, torch.Tensor]) -> None:
        placed = {b.name: b for b in self.plan.buffers if b.kind == "constant"}
        for name, value in constants.items():
            b = placed[name]
            blank = torch.empty(value.shape, dtype=value.dtype, device="meta")
            ref = TensorRef(b.arena, b.offset, str(value.dtype)[6:], tuple(value.shape), tuple(blank.stride()), name)
            self.device.tensor(ref).copy_(value)

    def load(self) -> None:
        """Read the resident weights that no step has begun to read, and wait for them."""
        load, self._load = self._load, ()
        if load:
            load_resident(load, self.device)

    def bound(self, tokens: int) -> BoundProgram:
        """The step over `tokens` tokens per sequence, ready to run."""
        found = self._bound.get(tokens)
        if found is None:
            found = self._bound[tokens] = BoundProgram(self._made(tokens), self.device, self.trace)
        return found

    def _made(self, tokens: int) -> Program:
        program = self._program(tokens)
        LOG.debug("made %s: %d items", program.name, len(program.step))
        if self._prologue not in (None, program.prologue):
            raise RuntimeFault(f"{program.name} expects other copies in flight than the steps before it leave")
        self._prologue = program.prologue
        self._write_places(program)
        return program

    def _begun(self, tokens: int) -> BoundProgram:
        """The first step over `tokens` tokens per sequence; it reads the resident weights, unless they were read."""
        load, self._load = self._load, ()
        if not load:
            return self.bound(tokens)
        self._first = FirstStep(while_loading(self._made(tokens), load), self.device, self.trace)
        return self._first

    def take_waited_s(self) -> float:
        """Return the seconds that the first step waited for resident weights, and 0 from then on."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _write_places(self, program: Program) -> None:
        """Tell, before the first step that brings experts into slots, where in its slot each expert lies."""
        for item in program.step:
            if isinstance(item, Copy) and isinstance(item.src, Rows) and item.src.apart and item.src.index is not None:
                known = self._routing.pop(item.src.index.buffer, None)
                if known is not None:
                    assert isinstance(item.src.table, FileSlice)
                    row = item.src.table.rows(item.src.row_nbytes)
                    known[: item.src.rows] = torch.tensor([expert_place(row(i)) for i in range(item.src.rows)])

    def step(self, inputs: StepInputs) -> torch.Tensor:
        """Run one step; return logits [B, V], or with `every_position` [B, S, V], valid until the next step."""
        bound = self.bound(inputs.tokens) if self._started else self._begun(inputs.tokens)
        if self.prefixes is not None:
            self.prefixes.overwrite(inputs)
        bound.write(inputs.by_name())
        if "positions" in bound.inputs or "until" in bound.inputs:
            bound.write(inputs.counted())
        if self._adapters and inputs.adapters is None:
            bound.write({"adapters": self.adapter_columns([""] * len(inputs.start))})
        if self.blocks is not None:
            bound.write(self.blocks.step(inputs.start, inputs.tokens, inputs.batch_slots))
        if not self._started:
            bound.start()
            self._started = True
        self._run(bound)
        return bound.outputs["out0"]

    def adapter_columns(self, names: Sequence[str]) -> torch.Tensor:
        """`StepInputs.adapters` of rows that have these adapters. RuntimeFault for a name that is none."""
        columns = torch.zeros(len(names), max((end for _, end in self._adapters.values()), default=0))
        for row, name in enumerate(names):
            if name and name not in self._adapters:
                raise RuntimeFault(f"no adapter {name!r}; there are {', '.join(self._adapters) or 'none'}")
            first, end = self._adapters.get(name, (0, 0))
            columns[row, first:end] = 1
        return columns

    def draft(self, inputs: StepInputs) -> torch.Tensor:
        """Run the step that drafts over one token of each sequence, inputs and result as of `step`. What it writes to
        the cache, at `start`, the model's own steps write anew before they read it."""
        assert self.shared is not None
        self.load()
        bound = self._drafting = self._drafting or BoundProgram(self.shared.program, self.device, self.trace)
        if self.prefixes is not None:
            self.prefixes.overwrite(inputs)
        bound.write(inputs.by_name())
        self._run(bound)
        return bound.outputs["out0"]

    def crosses_rope_switch(self, held: int, length: int) -> bool:
        """Return whether a cache of calls of `held` tokens is no use to one that comes to count `length`."""
        return (held <= self.rope_switch_length) != (length <= self.rope_switch_length)

    def _run(self, bound: BoundProgram) -> None:
        """Run a program. Its proof orders what it stores with what it loads itself; another program's stores have ended
        before it begins."""
        if self._ran is not None and self._ran is not bound and self._ran.stores:
            self.device.finish()
        if self._first is not None and bound is not self._first:
            self._first.finish()
            self._first = None
        self._ran = bound
        bound.run()
        if bound is self._first:
            self._waited_s = bound.waited_s

    def grow(self) -> None:
        """Give the cache its full length: after the last chunk of the prompts, before the first step of one token."""
        if self._growth is not None:
            self.load()
            self._grow = self._grow or BoundProgram(self._growth, self.device, self.trace)
            self._run(self._grow)

    def close(self) -> None:
        """Wait for copies under way and give the memory back; a session that is dropped does so by itself. What those
        copies meet no longer matters: no step waits for them."""
        self._bound.clear()
        self._grow = self._ran = self._drafting = self._first = self.prefixes = None
        self._end()


def _end(device: Device) -> None:
    try:
        with contextlib.suppress(Exception):
            device.finish()
    finally:
        device.close()
