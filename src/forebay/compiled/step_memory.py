"""The memory that one compiled model runs in, and what it runs there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.compiled.parameter_store import StoreMap, changes
from forebay.rewriter.capture.compiled_module import ModuleGraph
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import FileSlice, Program
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.open_device import open_device
from forebay.runtime.run.executor import BoundProgram, load_resident
from forebay.runtime.run.session import Session, resident_copies


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan and its proven Program for one set of input sizes and weights. `stores` are the weights' files, which only
    the weights keep."""

    captured: ModuleGraph
    plan: Plan
    program: Program
    files: Mapping[str, FileSlice]
    stores: tuple[weakref.ref[StoreMap], ...]
    machine: Machine
    switches: Switches

    @property
    def maps(self) -> tuple[StoreMap, ...]:
        """The weights' files that are left."""
        return tuple(held for store in self.stores if (held := store()) is not None)

    @property
    def lost(self) -> bool:
        """Whether a file is gone: no tensor used it any more, so this can never run again."""
        return len(self.maps) < len(self.stores)


class Memory:
    """The memory of one compiled model: the arenas of one prepared graph at a time, since each may fill the budget.

    Whoever calls holds `lock`. `holds` is None while a step runs, so that after one that broke off, which leaves copies
    under way that no other step expects, memory is always taken anew. The lock orders threads alone: an operator of the
    step that runs (`running`) may call a compiled module, for which there is no memory then.
    """

    def __init__(self, options: object) -> None:
        self.options = options  # held, so that its identity stays its own
        self.lock = threading.RLock()
        self.holds: Prepared | None = None
        self.running = False
        self._session: Session | None = None
        self._bound: BoundProgram | None = None
        self._seen: tuple[int, ...] = ()  # changes of the weights' files when resident weights were read

    def ready(self, prepared: Prepared) -> None:
        """Take memory for `prepared`, read its resident weights and issue its first copies; if it has all that, read
        again only if weights were changed."""
        seen = tuple(map(changes, prepared.maps))
        if self.holds is prepared and seen == self._seen:
            return
        fresh, self.holds = self.holds is not prepared, None
        try:
            if fresh:
                self._open(prepared)
            else:
                self._reload(prepared)
        except BaseException:
            self.close()
            raise
        self.holds, self._seen = prepared, seen

    def _open(self, prepared: Prepared) -> None:
        self.close()
        device = open_device(prepared.machine, prepared.switches)
        load = resident_copies(prepared.plan, prepared.files)
        self._session = Session(prepared.plan, lambda _: prepared.program, load, prepared.captured.constants, device)
        self._session.load()
        with torch.random.fork_rng(devices=[]):  # trials draw numbers that are the run's to draw
            self._bound = self._session.bound(1)
        self._bound.start()

    def _reload(self, prepared: Prepared) -> None:
        assert self._session is not None and self._bound is not None
        self._session.device.finish()
        load_resident(resident_copies(prepared.plan, prepared.files), self._session.device)
        self._bound.start()  # what was read ahead is old as well

    def run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """One step of a ready program. If it breaks off, memory is given back."""
        prepared, bound = self.holds, self._bound
        assert prepared is not None and bound is not None
        self.holds, self.running = None, True
        try:
            for name, position in prepared.captured.inputs.items():
                target = bound.inputs.get(name)
                if target is not None:
                    target.copy_(args[position].detach())
            bound.run()
            results = prepared.captured.returned(args, [bound.outputs[f"out{i}"] for i in range(len(bound.outputs))])
        except BaseException:
            self.close()
            raise
        finally:
            self.running = False
        self.holds = prepared
        return results

    def close(self) -> None:
        """Give back the arenas."""
        session, self.holds, self._bound, self._session = self._session, None, None, None
        if session is not None:
            session.close()

    def close_if_using(self, maps: Sequence[StoreMap]) -> None:
        with self.lock:
            if self.holds is not None and any(held is m for held in self.holds.maps for m in maps):
                self.close()
