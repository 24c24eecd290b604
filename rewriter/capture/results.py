"""Results of a captured module: which memory each result lies in, and how it is laid out there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Constant:
    """A result that is no tensor, or None."""

    value: object


@dataclass(frozen=True, eq=False)
class Shown:
    """A result that shows memory of the argument at position `argument`; `itself` if it is that argument. `offset`
    counts elements from the argument's first; `dtype` has the size of the argument's."""

    argument: int
    itself: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class Made:
    """A result in memory that the graph makes. Results of one `storage` share it; `offset` counts elements of `dtype`
    from its beginning."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end_nbytes(self) -> int:
        """The end of its last element, from the beginning of its storage."""
        if 0 in self.shape:
            return 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


Result = Constant | Shown | Made


def describe(results: Sequence[Any], tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> tuple[Result, ...]:
    """Return how `results` lie among each other and in `tensors`, the arguments at `positions`. A tensor returned twice
    has one description."""
    owners = {t.untyped_storage()._cdata: p for p, t in zip(positions, tensors, strict=True)}
    arguments = dict(zip(map(id, tensors), positions, strict=True))
    storages: dict[int, int] = {}
    known: dict[int, Result] = {}

    def one(value: Any) -> Result:
        if not isinstance(value, torch.Tensor):
            return Constant(value)
        storage = value.untyped_storage()._cdata
        layout = tuple(value.shape), value.stride(), int(value.storage_offset())
        if storage not in owners:
            return Made(storages.setdefault(storage, len(storages)), value.dtype, *layout)
        return Shown(owners[storage], arguments.get(id(value)) == owners[storage], value.dtype, *layout)

    return tuple(known.setdefault(id(value), one(value)) for value in results)


def give_back(results: Sequence[Result], args: Sequence[Any], values: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The results of a call with `args`: copies on the CPU of `values`, which are those of `made(results)`, that share
    memory and have strides as from eager; views of arguments; constants."""
    wanted = made(results)
    needed: dict[int, int] = {}
    for one in wanted:
        needed[one.storage] = max(needed.get(one.storage, 0), one.end_nbytes)
    alone = {storage: sum(r.storage == storage for r in wanted) == 1 for storage in needed}
    given: dict[Result, Any] = {}
    shared: dict[int, torch.Tensor] = {}
    for one, value in zip(wanted, values, strict=True):
        if alone[one.storage] and 0 not in one.stride:
            target = torch.empty_strided(one.shape, one.stride, dtype=one.dtype)
        else:
            if one.storage not in shared:
                shared[one.storage] = torch.empty(-(-needed[one.storage] // 16) * 16, dtype=torch.uint8)
            target = shared[one.storage].view(one.dtype).as_strided(one.shape, one.stride, one.offset)
        _copy(target, value)
        given[one] = target
    for result in results:
        if isinstance(result, Constant):
            given[result] = result.value
        elif isinstance(result, Shown) and result not in given:
            argument = args[result.argument]
            given[result] = argument if result.itself else argument.view(result.dtype).as_strided(
                result.shape, result.stride, argument.storage_offset() + result.offset)
    return tuple(given[result] for result in results)


def made(results: Sequence[Result]) -> list[Made]:
    """The distinct results that the graph computes, in order."""
    return [r for r in dict.fromkeys(results) if isinstance(r, Made)]


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy, writing each element of an expanded tensor once."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)
