"""The interface between executor and device: memory, and items made ready to issue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from forebay.kernels.operator import Call
from forebay.rewriter.ir.program import Item, TensorRef
from forebay.runtime.disk.spill_file import SpillFile


class RuntimeFault(RuntimeError):
    """Something failed while a step ran; the message names the item."""


class Device(Protocol):
    """One arena of memory per tier, and streams ordered by events with the semantics of CUDA streams.

    `bind` turns an item into a call without arguments (None: nothing to do). The executor makes the calls in list order
    from one thread, within `issuing`; a call may return before its work is done. What the caller did before is done
    when the work issued within begins, and that work is done when what the caller does afterwards begins. `open_files`
    takes the spill files of a program (nbytes by name) before any of its items is bound, unless they are there already,
    `spill_file` gives one of them, and `hold` what its launches keep outside the arenas (nbytes by name). `write`
    copies values to inputs of the next step. `tensor` gives memory as the host sees it, where it is the host's, and
    `operand` as launches of a stream do. `tell` says what such an input holds. `read_later` gives a call that
    waits for a result alone. A device that `queues` takes the next step's items before that result is read; one that
    `loads_beside` reads resident weights while launches run. `joined`
    gives the calls of items as the device issues them best: fewer of them, in the same order. `finish` returns when all
    work is done, and raises what any of it raised.
    """

    queues: bool
    loads_beside: bool

    def allocate(self, arenas: Mapping[str, int]) -> None: ...

    def open_files(self, files: Mapping[str, int]) -> None: ...

    def spill_file(self, name: str) -> SpillFile: ...

    def hold(self, held: Mapping[str, int]) -> None: ...

    def tensor(self, ref: TensorRef) -> torch.Tensor: ...

    def operand(self, stream: str, ref: TensorRef) -> torch.Tensor: ...

    def bind(self, item: Item, launch: Call | None) -> Call | None: ...

    def write(self, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None: ...

    def tell(self, ref: TensorRef, value: torch.Tensor) -> None: ...

    def read_later(self, value: torch.Tensor) -> Callable[[], torch.Tensor]: ...

    def joined(self, items: Sequence[tuple[Item, Call]]) -> list[Call]: ...

    def issuing(self) -> AbstractContextManager[None]: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...
